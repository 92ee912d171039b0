"""The laws of every family that has some, over every member: those in its folder, or those of `--member`."""

from __future__ import annotations

import pytest
from members import every

from atoll.testing import Case, cases, families

CASES = [case for family in families() for case in cases(family, *every(family))]
LONG = ("every engine gives the same run", "any number of workers gives the same run", "a resumed run ends the same")
"""Laws of whole runs in several processes: of these every third member keeps them fast, and all of them slowly."""


def cases_of_all() -> list[object]:
    """Return every case, those of long laws marked as slow but for every third member of a family."""
    seen: dict[str, int] = {}
    marked: list[object] = []
    for case in CASES:
        long = next((law for law in LONG if law in str(case)), None)
        if long is not None:
            place = f"{str(case).split()[0]} {long}"
            seen[place] = seen.get(place, -1) + 1
        is_slow = long is not None and seen[place] % 3 > 0
        marked.append(pytest.param(case, id=str(case), marks=[pytest.mark.slow] * is_slow))
    return marked


@pytest.mark.parametrize("case", cases_of_all())
def test_a_member_keeps_a_law(case: Case) -> None:
    case.check()
