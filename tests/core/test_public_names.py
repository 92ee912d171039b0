"""Public names: none goes or changes unnoticed, and each is documented."""

from __future__ import annotations

import difflib
import re

import pytest
from core.public_names import FILE, PAGE, families, lines, public_names

import atoll
from atoll.core.parts import members

PAGES = {path.name: path.read_text() for path in sorted(PAGE.parent.glob("*.md"))}


def test_nothing_public_changes_unnoticed() -> None:
    """If this fails on purpose: `python tests/core/public_names.py`, and a line in the changelog.

    New members and commands may come without a line: a new member is one new file.
    """
    promised, found = FILE.read_text().splitlines(), lines()
    found = [line for line in found if line in promised or line.startswith("atoll.")]
    changes = difflib.unified_diff(promised, found, "promised", "found", n=0, lineterm="")
    assert found == promised, "\n".join(changes)


def test_the_page_names_all_exports() -> None:
    assert sorted(name for name in public_names()["atoll"] if "." not in name) == atoll.__all__
    assert all(hasattr(atoll, name) for name in atoll.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Plam'"):
        atoll.Plam  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", [name for names in public_names().values() for name in names])
def test_a_public_name_is_explained(name: str) -> None:
    """On another page than the one that lists it."""
    word = name.rpartition(".")[2]
    code = [re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL) for page, text in PAGES.items() if page != PAGE.name]
    assert any(re.search(rf"\b{word}\b", each) for page in code for each in page), f"no page explains {name}"


def test_all_families_have_members() -> None:
    assert {"algorithms", "aggregators", "transforms", "attacks", "models", "engine"} < set(families())
    assert all(members(family) for family in families())
