"""Fashion-MNIST: articles of clothing in the format of MNIST."""

from __future__ import annotations

from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files
from atoll.data.idx import read_idx
from atoll.data.sources import Apt, Https, RawFile, Source
from atoll.data.unpack import from_deb, gunzip

SUMMARY = "70,000 articles of clothing, 28x28 grey, 10 classes"
SIZE = "31 MB"

FILES = (
    RawFile(
        name="train-images-idx3-ubyte",
        num_bytes=47_040_016,
        sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    RawFile(
        name="train-labels-idx1-ubyte",
        num_bytes=60_008,
        sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    RawFile(
        name="t10k-images-idx3-ubyte",
        num_bytes=7_840_016,
        sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    RawFile(
        name="t10k-labels-idx1-ubyte",
        num_bytes=10_008,
        sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
HOME = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
SOURCES = (
    Source(route=Https(tuple(f"{HOME}/{file.name}.gz" for file in FILES)), unpack=gunzip),
    Source(route=Apt("dataset-fashion-mnist"), unpack=from_deb("usr/share/datasets/fashion-mnist")),
)
CLASS_NAMES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def fashion_mnist(*, quiet: bool = False) -> Dataset:
    """Load 60,000 articles for training and 10,000 for test (Xiao et al. 2017, arXiv:1708.07747)."""
    paths = raw_files("fashion_mnist", FILES, SOURCES, quiet=quiet)
    train_x, train_y, test_x, test_y = (read_idx(paths[file.name]) for file in FILES)
    return Dataset(
        name="fashion_mnist",
        train_x=train_x[:, None],
        train_y=train_y,
        test_x=test_x[:, None],
        test_y=test_y,
        num_classes=10,
        scale=1 / 255,
        class_names=CLASS_NAMES,
        origin="Fashion-MNIST (Xiao, Rasul and Vollgraf 2017), MIT licence",
    )
