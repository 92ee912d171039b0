"""Every rule on what goes together refuses its examples before training, with the way out, which then works.

Rules are found by listing the table; a new one brings its examples.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.api import run
from atoll.checks.rule import EXAMPLE_PLAN, FIELD, NETWORK, Rule, general
from atoll.checks.table import TABLE, rules
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.engine.base import InProcess
from atoll.network.server.parts import dry_run_for
from atoll.simulation.dry_run import dry_run

RULES = {rule.name: rule for rule in rules()}
EXAMPLES = [(rule.name, number) for rule in rules() for number in range(len(rule.refused))]


def built(rule: Rule[Any], plan: Plan) -> None:
    """Build and rehearse a plan where the rule is applied."""
    if NETWORK in rule.parts:
        dry_run_for(plan, 6)
    else:
        dry_run(plan)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_documented_and_has_examples(name: str) -> None:
    rule = RULES[name]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
    assert rule.refused and rule.mended
    assert set(rule.parts) <= {*Plan.dotted_keys(), NETWORK}
    for text in (rule.reason, rule.way_out):
        assert general(text) and "|" not in general(text)
        assert not text.endswith(".") and not general(text)[0].isspace()


def test_names_are_unique() -> None:
    assert len(RULES) == sum(len(some) for some in TABLE.values())


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_a_rule_refuses_its_examples_before_training(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, begun = RULES[name], list[str]()
    monkeypatch.setattr(InProcess, "works", lambda *args: begun.append("trained") or [])
    plan = EXAMPLE_PLAN.replace(rule.refused[number])
    with pytest.raises(PlanError) as error:
        built(rule, plan)
    assert error.value.rule == name
    way_out = re.sub(r"\\\{.*?\\\}", ".+", re.escape(FIELD.sub("{}", rule.way_out)))
    assert re.search(way_out, str(error.value)), str(error.value)
    assert not re.search(r"\{\w+\||None", str(error.value))
    if NETWORK not in rule.parts:
        with pytest.raises(PlanError, match=re.escape(str(error.value))):
            run(plan)
    assert not begun


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_the_way_out_leads_out(name: str, number: int) -> None:
    rule = RULES[name]
    built(rule, EXAMPLE_PLAN.replace(rule.refused[number]).replace(rule.mended))


@pytest.mark.parametrize("name", [rule.name for rule in rules() if "secagg" in rule.parts or "privacy" in rule.parts])
def test_a_rule_is_silent_about_plans_without_its_parts(name: str) -> None:
    assert not RULES[name].applies_to(EXAMPLE_PLAN)


def test_the_page_of_rules_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "tools" / "rules_page.py"
    spec = importlib.util.spec_from_file_location("rules_page", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), "run python tools/rules_page.py"
