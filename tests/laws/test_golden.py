"""Results that are known to the bit stay what they are."""

from __future__ import annotations

import json

import pytest
from laws.golden_plans import FILE, PLANS, hashes, machine, outcome, size

KNOWN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_ends_with_the_bits_that_it_ended_with(name: str) -> None:
    """On a machine that rounds like one that they were recorded on; on others the parameters are about as long."""
    result = outcome(name)
    assert size(result) == pytest.approx(KNOWN["norms"][name], rel=0.05)
    recorded = KNOWN["hashes"].get(machine())
    if recorded is not None:
        assert hashes(result) == recorded[name]


def test_all_machines_know_all_plans() -> None:
    assert all(each.keys() == PLANS.keys() for each in KNOWN["hashes"].values())
