"""The bundle of the page: small, on its own, and what its sources make."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from ui.browser import FRONTEND

from atoll.report.figures import THEME
from atoll.report.main_figure import SHARES, SMALLER_IS_BETTER

NAMES = ("index.html", "app.js", "app.css", "LICENSES.txt")
MAX_BYTES = 100_000
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML", "http://www.w3.org/1999/xhtml"}
"""Names of languages that look like addresses; nothing is loaded from there."""


def bundled(name: str) -> str:
    return files("atoll.ui").joinpath("static", name).read_text("utf-8")


def test_the_bundle_is_small() -> None:
    sizes = {name: len(gzip.compress(bundled(name).encode(), 9)) for name in NAMES}
    assert sum(sizes.values()) < MAX_BYTES, sizes


@pytest.mark.parametrize("name", ["index.html", "app.js", "app.css"])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = bundled(name)
    assert set(re.findall(r"https?://[\w./-]+", text)) <= NAMESPACES
    assert not re.search(r"""(src|href)=["']?//|@import|url\((?!["']?data:)|sourceMappingURL""", text)


def test_no_text_becomes_code() -> None:
    text = bundled("app.js")
    assert not re.search(r"\beval\(|new Function|\bFunction\(|import\(|importScripts|setTimeout\([\"']", text)


def test_no_script_or_style_is_inline() -> None:
    text = bundled("index.html")
    assert re.findall(r"<script[^>]*>", text) == ['<script src="app.js" defer>']
    assert re.search(r'<script src="app.js" defer></script>', text)
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)


def test_the_dictionaries_have_the_same_texts() -> None:
    en, zh = (json.loads((FRONTEND / "src/i18n" / f"{name}.json").read_text("utf-8")) for name in ("en", "zh"))
    assert list(en) == list(zh)
    places = {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in en.items()}
    assert {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in zh.items()} == places
    assert all(en.values()) and all(zh.values())
    code = "\n".join(path.read_text("utf-8") for path in sorted((FRONTEND / "src").rglob("*.ts*")))
    built = set(re.findall(r"`(\w+)\.\$\{", code))
    unused = [key for key in en if f'"{key}"' not in code and key.split(".")[0] not in built]
    assert not unused


def test_the_page_has_the_colours_of_the_report() -> None:
    css = (FRONTEND / "src/style/theme.css").read_text("utf-8")
    blocks = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{[^{}]*\}", css)]
    light, dark, system_dark = blocks
    assert light == {name: pair[0] for name, pair in THEME.items()}
    assert dark == system_dark == {name: pair[1] for name, pair in THEME.items()}


def test_the_page_shows_the_same_figures_in_percent_as_the_report() -> None:
    code = (FRONTEND / "src/format.ts").read_text("utf-8")
    sets = dict(re.findall(r"export const (\w+) = new Set\(\[([^\]]*)\]", code))
    assert set(re.findall(r'"(\w+)"', sets["SHARES"])) == SHARES
    assert set(re.findall(r'"(\w+)"', sets["SMALLER_IS_BETTER"])) == SMALLER_IS_BETTER


@pytest.mark.slow
def test_a_fresh_build_is_what_is_committed(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm: install node 20 to build the page")
    root = tmp_path / "frontend"
    shutil.copytree(FRONTEND, root, ignore=shutil.ignore_patterns("node_modules", "build"))

    def npm_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([npm, *arguments], cwd=root, capture_output=True, text=True, timeout=600)

    installed = npm_run("ci", "--ignore-scripts")
    if installed.returncode:
        pytest.skip(f"the packages cannot be installed: {installed.stderr[-300:]}")
    for command in ("check", "test", "build"):
        done = npm_run("run", command)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert (tmp_path / "src/atoll/ui/static" / name).read_text("utf-8") == bundled(name), f"{name}: run make ui"
