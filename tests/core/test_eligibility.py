from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.eligibility import Eligibility
from atoll.core.errors import PlanError
from atoll.core.plan import Plan

STRICT = Eligibility(idle=True, charging=True, unmetered=True, min_battery=0.8, min_memory=512)
GOOD: dict[str, float | bool] = {"idle": True, "charging": True, "unmetered": True, "battery": 0.8, "memory": 512}


def test_an_empty_rule_accepts_every_device() -> None:
    assert Eligibility().why_not({}) is None
    assert Eligibility().why_not({"idle": False, "battery": 0.0}) is None


def test_a_device_that_meets_all_requirements_is_eligible() -> None:
    assert STRICT.why_not(GOOD) is None
    assert STRICT.why_not({**GOOD, "battery": 1, "memory": 8192.0, "colour": 3.0}) is None


@pytest.mark.parametrize("name", GOOD)
def test_a_device_without_a_required_attribute_is_not_eligible(name: str) -> None:
    stated = {key: value for key, value in GOOD.items() if key != name}
    assert STRICT.why_not(stated) == f"{name} is not stated, and the rule asks for it"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"idle": False}, "idle is false, the rule asks for true"),
        ({"unmetered": 0.0}, "unmetered is 0.0, the rule asks for true"),
        ({"charging": math.nan}, "charging is nan, the rule asks for true"),
        ({"battery": 0.79}, "battery is 0.79, the rule asks for at least 0.8"),
        ({"battery": math.nan}, "battery is nan, the rule asks for at least 0.8"),
        ({"memory": 511.5}, "memory is 511.5, the rule asks for at least 512"),
    ],
)
def test_the_reason_is_given_in_words(change: dict[str, float | bool], says: str) -> None:
    assert STRICT.why_not({**GOOD, **change}) == says


def test_a_rule_may_require_false_and_zero() -> None:
    assert Eligibility(charging=False).why_not({"charging": False}) is None
    assert Eligibility(charging=False).why_not({"charging": True}) == "charging is true, the rule asks for false"
    assert Eligibility(min_memory=0).why_not({}) == "memory is not stated, and the rule asks for it"


@given(battery=st.floats(0, 1), least=st.floats(0, 1))
def test_a_bound_is_inclusive(battery: float, least: float) -> None:
    assert (Eligibility(min_battery=least).why_not({"battery": battery}) is None) == (battery >= least)


def test_it_is_a_table_of_the_plan() -> None:
    plan = Plan.from_toml("devices = 'fleet'\n[eligibility]\ncharging = true\nmin_memory = 512")
    assert plan.eligibility == Eligibility(charging=True, min_memory=512.0)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert plan.identity() != Plan(devices="fleet").identity()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("min_battery = 80", "80 % is 0.8"),
        ("min_battery = nan", "eligibility.min_battery must be a finite number in [0, 1], got nan"),
        ("min_memory = -1", "0 or more"),
        ("idle = 1", "eligibility.idle must be true or false, got 1"),
        ("min_batery = 0.5", "did you mean 'min_battery'"),
    ],
)
def test_a_wrong_rule_is_refused_with_a_way_out(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_toml(f"[eligibility]\n{text}")
    assert says in str(error.value)
