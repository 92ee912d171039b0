"""Building blocks of HTML pages: self-contained files with Atoll's style, which load no other file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING

from atoll.report.figures import theme_css, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def shell(brand: str, heading: str, lead: str, body: str, script: str = "") -> str:
    """Return a page: `body` is HTML, the other texts are plain, and no script runs but `script`."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "version": escape(_version()),
        "brand": escape(brand),
        "heading": escape(heading),
        "lead": escape(lead),
        "theme": theme_css(":root"),
        "style": read_packaged("page.css"),
        "body": body,
        "script": f"<script>{script}</script>\n" if script else "",
        "script_policy": f"; script-src 'sha256-{digest}'" if script else "",
    }
    # One pass, so that a run's text that looks like a placeholder is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], read_packaged("page.html"))


def read_packaged(name: str) -> str:
    """Return the text of a file in this package."""
    return files("atoll.report").joinpath(name).read_text("utf-8")


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 0) -> str:
    """Return a table of cells that are HTML, under plain titles; the first `text` columns hold words, not numbers."""
    css = [' class="text"' if column < text else "" for column in range(len(head))]
    top = "".join(f"<th{css[n]}>{escape(title)}</th>" for n, title in enumerate(head))
    body = "".join("<tr>" + "".join(f"<td{css[n]}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="num"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def image(figure: Figure, what: str, kind: str = "") -> str:
    """Return a figure as an HTML element with the image inside."""
    svg = base64.b64encode(to_svg(figure).encode("utf-8", "replace")).decode()
    source = f"data:image/svg+xml;base64,{svg}"
    return f'<figure class="scroll {kind}"><img alt="{escape(what)}" src="{source}"></figure>'


def _version() -> str:
    try:
        return version("atoll")
    except PackageNotFoundError:
        return ""
