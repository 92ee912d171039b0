"""Bounds on the sizes of models, above which a single tensor would not fit into memory."""

from __future__ import annotations

from typing import Annotated

from atoll.core.options import Range

Width = Annotated[int, Range(1, 2**16)]
"""Number of units of a layer, or length of one side of an image."""
MaybeWidth = Annotated[int, Range(0, 2**16)]
"""Number of units of a layer that may be missing: 0 leaves it out."""
Shape = tuple[Width, ...]
"""Shape of one sample."""
Image = tuple[Width, Width, Width]
"""Channels, height and width of one image."""
Classes = Annotated[int, Range(1, 2**20)]
"""Number of classes."""
Depth = Annotated[int, Range(1, 100)]
"""Number of layers."""
