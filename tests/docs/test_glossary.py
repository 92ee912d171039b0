"""The glossary: every word once, and each where it says that it lives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.reading import ROOT

PAGE = ROOT / "docs" / "glossary.md"
ROWS = re.findall(r"^\| (?!word|name|---)(.+?) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
DESIGNED = """client server round version attempt cohort delta uplink downlink engine driver num_x sigma shape-suffix
task update payload broadcast statistics extras slot member family part plan job rule mechanism exposure memory state
spec stack privacy-ledger signed-ledger request-body-limits writer presence handler session null-watcher
minimum-survivors"""
"""Words that the design fixes; those of two words are joined here."""


def words() -> list[str]:
    """Return the words of the first column, without their context (`slot, of a vector`)."""
    return [each.strip("` ") for word, _, _ in ROWS for each in word.partition(", of")[0].split(", ")]


@pytest.mark.parametrize("word", DESIGNED.split())
def test_a_word_of_the_design_is_explained(word: str) -> None:
    assert word.replace("-", " ") in words()


def test_every_word_has_one_row() -> None:
    first = [word for word, _, _ in ROWS]
    assert len(first) == len(set(first)) > 80


@pytest.mark.parametrize(("word", "place"), [(word, place) for word, _, place in ROWS], ids=[row[0] for row in ROWS])
def test_a_word_lives_where_the_glossary_says(word: str, place: str) -> None:
    """A path in src/atoll; for names in code, also an example that is in that file."""
    *names, path = re.findall(r"`([\w./]+)`", place)
    found = ROOT / "src" / "atoll" / path
    assert found.exists(), f"{word}: there is no {found}"
    assert all(name in found.read_text() for name in names), f"{word}: {path} has no {names}"


def test_decisions_are_listed_and_well_formed() -> None:
    """Context, decision and consequences on at most a page; paths that they name exist."""
    folder = ROOT / "docs" / "decisions"
    records = sorted(folder.glob("0*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    index = (folder / "index.md").read_text()
    for path in records:
        text = path.read_text()
        number, title = text.splitlines()[0].removeprefix("# ").split(". ", 1)
        assert f"| [{number}]({path.name}) | {title} |" in index
        assert re.findall(r"^## (.*)$", text, re.M) == ["Context", "Decision", "Consequences"]
        assert len(text.splitlines()) <= 50
        for place in re.findall(r"`((?:[a-z_]+/)+(?:[\w.]+)?)`", text):
            assert (ROOT / "src" / "atoll" / place).exists() or (ROOT / place).exists(), f"{path.name}: no {place}"


LINKED = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the project and, with `#`, to a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), f"{page.name}: {target} is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {found.name} has no heading for #{anchor}"
