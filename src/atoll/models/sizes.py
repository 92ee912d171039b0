"""How large the pieces of a model may be. Beyond, one tensor alone would not fit into memory."""

from __future__ import annotations

from typing import Annotated

from atoll.core.options import Range

Width = Annotated[int, Range(1, 2**16)]
"""Of a layer, or of one side of an image."""
Shape = tuple[Width, ...]
Image = tuple[Width, Width, Width]
"""Channels, height and width."""
Classes = Annotated[int, Range(1, 2**20)]
Depth = Annotated[int, Range(1, 100)]
