"""Images in folders: `class/image` or `site/class/image`, read when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import DataError
from atoll.data.rows import file_rows
from atoll.data.tables import class_numbers, drawn_rows
from atoll.data.targets import Array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
MODES = {1: "L", 3: "RGB"}


def folder_fields(
    path: Path, test: float | Path, seed: int, sites: bool, size: tuple[int, int] | None, channels: int, check: bool
) -> dict[str, Any]:
    """Return the fields of a `Dataset` of images in folders of their classes."""
    if channels not in MODES:
        raise DataError(f"channels is 1 (grey) or 3 (colour), got {channels}")
    files, classes, owners = _listed(path, sites)
    is_test = drawn_rows(len(files), test, seed) if isinstance(test, float) else np.zeros(len(files), dtype=bool)
    parts = {"train": [f for f, held in zip(files, is_test, strict=True) if not held]}
    labels = {"train": [c for c, held in zip(classes, is_test, strict=True) if not held]}
    if isinstance(test, float):
        parts["test"] = [f for f, held in zip(files, is_test, strict=True) if held]
        labels["test"] = [c for c, held in zip(classes, is_test, strict=True) if held]
    else:
        parts["test"], labels["test"], _ = _listed(test, sites)
    names = sorted(set(classes))
    if len(names) < 2:
        raise DataError(f"{path} has images of one class only, '{names[0]}': give at least two folders, one a class")
    fields: dict[str, Any] = {"problem": "classification", "num_classes": len(names), "class_names": tuple(names)}
    size = size or _first_size(parts["train"][0])
    reader = ImageReader(size, channels)
    for part, paths in parts.items():
        if check:
            for file in paths:
                reader(file)
        fields |= {f"{part}_x": file_rows(paths, reader), f"{part}_y": class_numbers(labels[part], names, str(path))}
    if sites:
        site_names = sorted({o for o, held in zip(owners, is_test, strict=True) if not held})
        places = {name: place for place, name in enumerate(site_names)}
        fields["owners"] = np.array([places[o] for o, held in zip(owners, is_test, strict=True) if not held])
        fields["owner_names"] = tuple(site_names)
    return fields | {"scale": 1 / 255}


class ImageReader:
    """Reads an image file as bytes of shape (channels, height, width)."""

    def __init__(self, size: tuple[int, int], channels: int) -> None:
        self.height, self.width = size
        self.mode = MODES[channels]

    def __call__(self, path: Path) -> Array:
        """Return the image of a file."""
        from PIL import Image

        try:
            with Image.open(path) as image:
                pixels = image.convert(self.mode)
                if pixels.size != (self.width, self.height):
                    pixels = pixels.resize((self.width, self.height), Image.Resampling.BILINEAR)
                array = np.asarray(pixels, dtype=np.uint8)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{path} is no image that can be read: {error}; repair or remove it") from error
        return array[None] if self.mode == "L" else np.ascontiguousarray(np.moveaxis(array, 2, 0))


def _first_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is no image that can be read: {error}; repair or remove it") from error


def _listed(path: Path, sites: bool) -> tuple[list[Path], list[str], list[str]]:
    """Return the images of a folder in order, with their classes and sites."""
    layout = "site/class/image" if sites else "class/image"
    if not path.is_dir():
        raise DataError(f"there is no folder {path}: give one that holds {layout}")
    files, depth = [], 3 if sites else 2
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            if len(file.relative_to(path).parts) != depth:
                raise DataError(f"{file} does not lie in {layout} below {path}: move it, or set sites={not sites}")
            files.append(file)
    empty = [
        each for each in sorted(path.iterdir()) if each.is_dir() and not any(f.is_relative_to(each) for f in files)
    ]
    if not files or empty:
        raise DataError(f"{empty[0] if empty else path} holds no images: put images in {layout}, or remove the folder")
    return files, [file.parts[-2] for file in files], [file.parts[-3] if sites else "" for file in files]
