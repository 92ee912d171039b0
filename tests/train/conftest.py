"""Plans that tests of training share."""

from __future__ import annotations

import pytest

from atoll.core.plan import Plan


@pytest.fixture
def new_plan(digits_plan: Plan) -> Plan:
    """Four of twelve clients are held out of training."""
    return digits_plan.replace({"evaluation.new_clients": 4, "evaluation.holdout": 0.3})
