"""The laws of every family that has some, over every member: those in its folder, or those of `--member`."""

from __future__ import annotations

import pytest
from members import every

from atoll.testing import Case, cases, families

CASES = [case for family in families() for case in cases(family, *every(family))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_member_keeps_a_law(case: Case) -> None:
    case.check()
