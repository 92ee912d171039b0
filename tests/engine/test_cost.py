"""What a round is said to cost beside what rounds cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import run
from atoll.cli.main import app
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.simulation.cost import Sample, line_of, round_cost, turns_of


def test_the_line_goes_through_both_cohorts() -> None:
    """4 and 8 groups of 10 clients on 2 workers: 2 and 4 turns, so 0.1 s a turn and 0.3 s besides."""
    samples = [Sample(40, 0.5, 0, 0), Sample(80, 0.7, 0, 0)]
    once, group = line_of(samples, 10, 2)
    assert (once, group) == pytest.approx((0.3, 0.1))
    assert once + group * turns_of(1000, 10, 2) == pytest.approx(5.3)
    assert turns_of(1001, 10, 2) == 51 and turns_of(1, 10, 2) == 1


def test_noise_makes_no_negative_seconds() -> None:
    assert line_of([Sample(40, 0.5, 0, 0), Sample(80, 0.4, 0, 0)], 10, 2) == (0.4, 0.0)
    assert line_of([Sample(40, 0.1, 0, 0), Sample(80, 0.4, 0, 0)], 10, 2)[0] == 0.0
    assert line_of([Sample(4, 0.5, 0, 0)], 10, 2) == (0.0, 0.5)


@pytest.mark.parametrize("engine", ["inline", {"name": "processes", "workers": 2, "stack": 2}])
def test_what_is_sent_is_what_a_run_sends(digits_plan: Plan, engine: object) -> None:
    plan = digits_plan.replace({"engine": engine, "evaluation.every": 0})
    found = round_cost(plan)
    last = run(plan).history[-1]
    assert found.bytes_down * plan.rounds == last["bytes_down"] and found.bytes_up * plan.rounds == last["bytes_up"]
    assert (found.num_clients, found.num_workers, found.stack) == ((5, 0, 0) if engine == "inline" else (5, 2, 2))
    assert found.seconds > 0 and found.memory > 50e6
    assert (found.worker_memory > 10e6) == (engine != "inline")


def test_a_private_plan_is_measured_too(digits_plan: Plan) -> None:
    private = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-5}
    assert round_cost(digits_plan.replace({"privacy": private, "sampler": "poisson"})).num_clients > 0


@pytest.mark.parametrize("policy", ["asynchronous", {"name": "buffered", "goal": 2, "concurrency": 4}])
def test_rounds_that_overlap_are_refused(digits_plan: Plan, policy: object) -> None:
    with pytest.raises(PlanError, match=r'policy "cohort" alone.*metrics\.jsonl'):
        round_cost(digits_plan.replace({"policy": policy}))


def test_the_command_tells_it(tmp_path: Path, digits_plan: Plan) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(digits_plan.to_toml())
    said = CliRunner().invoke(app, ["plan", "cost", str(path), "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["num_clients"] == 5
    said = CliRunner().invoke(app, ["plan", "cost", str(path)])
    assert said.exit_code == 0 and "5 clients a round in this process" in said.stdout
