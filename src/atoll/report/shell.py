"""What all pages share: one self-contained HTML file with Atoll's look, which loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from atoll.report.figures import theme_css


def shell(brand: str, heading: str, lead: str, body: str, script: str = "") -> str:
    """A page: `body` is HTML, `script` runs and nothing else does, the other texts are plain."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filling = {
        "version": escape(_version()),
        "brand": escape(brand),
        "heading": escape(heading),
        "lead": escape(lead),
        "theme": theme_css(":root"),
        "style": packaged("page.css"),
        "body": body,
        "script": f"<script>{script}</script>\n" if script else "",
        "script_policy": f"; script-src 'sha256-{digest}'" if script else "",
    }
    # One pass, so that text from a run that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filling[match[1]], packaged("page.html"))


def packaged(name: str) -> str:
    """The text of a file that lies beside this one."""
    return files("atoll.report").joinpath(name).read_text("utf-8")


def _version() -> str:
    try:
        return version("atoll")
    except PackageNotFoundError:
        return ""
