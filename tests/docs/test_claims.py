"""What the docs say of other systems and of time: of which version, and on what machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.reading import PAGES, ROOT

PEERS = {"Flower": "flwr", "pfl": "pfl", "Opacus": "opacus"}
TOLD = (*PAGES, *sorted((ROOT / "benchmarks").glob("*.md")))


def paragraphs(page: Path) -> list[str]:
    return re.split(r"\n\s*\n", page.read_text())


def pinned(package: str) -> str:
    """The version that benchmarks install, without its last part."""
    texts = [path.read_text() for path in (ROOT / "benchmarks" / "peers").glob("requirements-*.txt")]
    (found,) = {match for text in texts for match in re.findall(rf"^{package}(?:\[\w+\])?==(\d+\.\d+)", text, re.M)}
    return str(found)


@pytest.mark.parametrize("page", TOLD, ids=[page.stem for page in TOLD])
def test_a_peer_is_named_with_its_version(page: Path) -> None:
    """In each paragraph or table; a measured one is the version that the benchmark installs."""
    whole = page.read_text()
    for paragraph in paragraphs(page):
        for peer, package in PEERS.items():
            if re.search(rf"\b{peer}\b", paragraph):
                versions = re.findall(rf"\b{peer}(?:'s)?(?: is)? (\d+\.\d+)", whole)
                assert pinned(package) in versions, f"{page.name} names no version of {peer}"
                here = re.findall(rf"\b{peer}(?:'s)?(?: is)? (\d+\.\d+)|commit [0-9a-f]{{7}}", paragraph)
                assert here or page.parent.name == "benchmarks", f"{page.name}, without version:\n{paragraph}"


def test_how_long_examples_take_says_on_what_machine() -> None:
    """Sentences such as `takes a few seconds`; protocols' deadlines and results by the clock are no such thing."""
    for text in ("README.md", "Makefile", "docs/federation.md", "docs/measures.md", "docs/which_algorithm.md"):
        for sentence in re.split(r"(?<=[.:])\s|\n\n", (ROOT / text).read_text()):
            if re.search(
                r"(a few|about half|about a quarter of|some|than a) (seconds|a?\s*minute|minutes|an\s+hour)", sentence
            ):
                assert "quiet" in sentence, f"{text}: {sentence}"
