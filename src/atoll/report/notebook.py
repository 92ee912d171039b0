"""Output for notebooks: figures, a result with its curves, and progress that is updated in place."""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

DPI = 100
REFRESH_SECONDS = 0.2
"""Minimum time between two updates of a notebook's output."""


class Picture(Figure):
    """A figure that a notebook displays, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()


def result_html(lines: Sequence[str], figure: Picture | None) -> str:
    """Return lines of text and a figure as HTML that needs no other file."""
    text = "<br>".join(html.escape(line) for line in lines)
    if figure is None:
        return f"<p>{text}</p>"
    png = base64.b64encode(figure._repr_png_()).decode()
    return f'<p>{text}</p><img alt="accuracy and loss by round" src="data:image/png;base64,{png}">'


class CellOutput:
    """An output of a notebook's cell that is updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn_at = 0.0

    def show(self, share: float, text: str, *, now: bool = False) -> None:
        """Draw a bar that is filled to `share`, and text; skip updates within REFRESH_SECONDS, unless `now`."""
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        if not now and time.monotonic() - self._drawn_at < REFRESH_SECONDS:
            return
        self._drawn_at = time.monotonic()
        bar = HTML(f'<progress value="{share:.4f}" max="1"></progress> <code>{html.escape(text)}</code>')
        if self._handle is None:
            self._handle = display(bar, display_id=True)
        else:
            self._handle.update(bar)
