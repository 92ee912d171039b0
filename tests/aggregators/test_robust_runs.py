"""Robust rules at work: what plans refuse, what becomes of bad updates, and that runs resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless
from members import every_example
from torch import Tensor

from atoll import Plan, run
from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import SERVER, Update
from atoll.core.parts import Part
from atoll.report.reading import part_text
from atoll.testing.aggregators import server_settings
from atoll.train.build import build_job

BASE: dict[str, Any] = {
    "partition": {"num_clients": 12},
    "rounds": 3,
    "local": {"lr": 0.3, "batch_size": 32},
    "engine": {"name": "vectorised", "stack": 4},
}
TRIMMED = {"name": "trimmed_mean", "f": 2}
RULES: dict[str, dict[str, Any]] = {
    **{name: {"aggregator": name} for name in ("geometric_median", "mean", "median", "norm_clipping")},
    "bucketing": {"aggregator": {"name": "bucketing", "rule": "median"}},
    "centered_clipping": {"aggregator": {"name": "centered_clipping", "tau": 1.0, "iterations": 2}},
    "fltrust": {"aggregator": "fltrust", "server": {"samples": 100}},
    "majority": {"aggregator": "majority", "server": {"lr": 0.01}},
    "nnm": {"aggregator": {"name": "nnm", "f": 2, "rule": TRIMMED}},
    "sybils": {"aggregator": {"name": "sybils", "rule": "norm_clipping"}},
    **{
        name: {"aggregator": {"name": name, "f": 2 if name != "bulyan" else 1}}
        for name in ("bulyan", "caf", "krum", "median_of_means", "minimum_diameter", "multi_krum", "trimmed_mean")
    },
}


def plan_of(**changes: Any) -> Plan:
    return Plan(**{**BASE, **changes})


def too_short() -> Attack:
    """Send fewer parameters than there are."""

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=honest.delta_D[:-3])

    return Attack(update=update)


@pytest.mark.parametrize("attack", ["not_finite", {"name": "not_finite", "value": "inf"}, too_short])
@pytest.mark.parametrize("part", every_example("aggregators"), ids=repr)
def test_what_is_no_number_or_has_another_shape_is_rejected_and_counted(part: Part, attack: Any) -> None:
    num_clients = max(12, part.build("aggregators").min_updates + 2)
    around = {**server_settings(part), "partition": {"num_clients": num_clients}}
    result = run(plan_of(aggregator=part, **around, attack=attack, attackers={"clients": (2, 5)}))
    assert [row["clients"] for row in result.history] == [num_clients - 2] * 3
    assert [row["rejected"] for row in result.history] == [2, 4, 6]
    assert bool(result.params_D.isfinite().all())


def test_a_cohort_too_small_for_the_rule_is_refused_with_the_plan() -> None:
    with pytest.raises(PlanError, match=r"krum with f = 3 needs at least 2f \+ 3 = 9 updates, but 8 make a version"):
        run(plan_of(aggregator={"name": "krum", "f": 3}, policy={"size": 8}))
    with pytest.raises(PlanError, match=r"raise policy\.size to 13"):
        nested = {"name": "bucketing", "rule": {"name": "krum", "f": 2}}
        run(plan_of(aggregator=nested))
    with pytest.raises(PlanError, match="but 5 make a version"):
        buffered = {"name": "buffered", "size": 5, "concurrency": 10}
        run(plan_of(aggregator={"name": "trimmed_mean", "f": 3}, policy=buffered))
    assert run(plan_of(aggregator={"name": "krum", "f": 3}, policy={"size": 9}, rounds=1)).history


def test_a_round_with_too_few_valid_updates_is_abandoned() -> None:
    """Of 12 clients, 4 send NaN, and cohorts of 9 need 7 valid ones."""
    rule = {"name": "krum", "f": 2}
    plan = plan_of(
        aggregator=rule, policy={"size": 9}, attack="not_finite", attackers={"clients": (0, 1, 2, 3)}, rounds=6
    )
    result = run(plan)
    assert [row["round"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert all(row["clients"] >= 7 for row in result.history)
    assert result.history[-1]["abandoned"] > 0
    hopeless = run(plan_of(aggregator=rule, attack="not_finite", attackers={"num": 6}))
    assert not hopeless.history
    assert "gave up" in hopeless.reason


def test_a_cohort_of_bad_clients_only_does_not_end_the_run() -> None:
    plan = plan_of(policy={"size": 1}, attack="not_finite", attackers={"num": 6}, rounds=8)
    result = run(plan)
    assert len(result.history) == 8
    assert result.history[-1]["abandoned"] == result.history[-1]["rejected"] > 0


@pytest.mark.parametrize("name", ["centered_clipping", "bucketing", "median_of_means", "fltrust", "nnm"])
def test_a_run_resumes_with_what_the_rule_and_the_clients_remember(name: str, tmp_path: Path) -> None:
    changes = {**RULES[name], "uplink": [{"name": "momentum", "beta": 0.5}]}
    changes |= {"attack": "alie", "attackers": {"num": 2}}
    whole = run(plan_of(**changes, rounds=6))
    run(plan_of(**changes, rounds=2), out=tmp_path / "run", report=False)
    resumed = run(plan_of(**changes, rounds=6), out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(whole.params_D, resumed.params_D)
    assert timeless(whole.history) == timeless(resumed.history)


@pytest.mark.parametrize("name", ["fltrust", "nnm", "centered_clipping"])
def test_the_number_of_workers_changes_nothing(name: str) -> None:
    engines = [{"name": "processes", "workers": n, "stack": 4} for n in (1, 2)]
    ends = [run(plan_of(**{**RULES[name], "engine": engine})).params_D for engine in (*engines, BASE["engine"])]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_the_server_trains_on_samples_of_its_own_as_a_client_does() -> None:
    plan = plan_of(aggregator="fltrust", server={"samples": 50}, rounds=1)
    federation = build_job(plan).federation
    indices = federation.train_indices(SERVER)
    assert len(set(indices.tolist())) == federation.num_samples(SERVER) == 50
    assert (build_job(plan).federation.train_indices(SERVER) == indices).all()
    assert not (build_job(plan.replace({"seed": 1})).federation.train_indices(SERVER) == indices).all()
    for algorithm in ("scaffold", "qffl", "moon"):
        assert run(plan.replace({"algorithm": algorithm})).history
    with pytest.raises(PlanError, match=r"set server\.samples"):
        run(plan_of(aggregator="fltrust"))
    with pytest.raises(PlanError, match=r"leave it out, or use fltrust"):
        run(plan_of(aggregator="median", server={"samples": 50}))
    with pytest.raises(PlanError, match="only 1437 training samples"):
        run(plan_of(aggregator="fltrust", server={"samples": 5000}))


def test_a_nested_rule_is_written_in_a_plan_file() -> None:
    text = 'aggregator = {name = "nnm", f = 2, rule = {name = "trimmed_mean", f = 2}}'
    plan = Plan.from_toml(text)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan(aggregator=Part("nnm", f=2, rule=Part("trimmed_mean", f=2))) == plan
    assert part_text(plan.aggregator) == "nnm (f 2, rule trimmed_mean (f 2))"
    assert plan.replace({"aggregator.rule.f": 1}).aggregator.options["rule"] == {"name": "trimmed_mean", "f": 1}


def test_white_box_attackers_know_the_aggregate() -> None:
    """Also what the rule remembers: centered clipping goes on from the last aggregate."""
    promised: list[Tensor] = []

    def foretelling() -> Attack:
        def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
            assert known.aggregate is not None
            promised.append(known.aggregate(updates))
            return updates

        return Attack(collude=collude)

    plan = plan_of(**RULES["centered_clipping"], attack=foretelling, attackers={"num": 2})
    result = run(plan)
    moved_D = result.params_D - build_job(plan).first_D
    assert torch.allclose(sum(promised, torch.zeros_like(moved_D)), moved_D, atol=1e-5)
    assert not torch.allclose(promised[0], promised[1], atol=1e-3)


def test_momentum_sends_a_running_mean() -> None:
    step = Part("momentum", beta=0.75).build("transforms")
    memory, expected = step.init(3), torch.zeros(3)
    for number in range(4):
        vector = torch.tensor([1.0, -2.0, float(number)])
        carrier, side, memory = step.encode(vector, memory, None)
        expected = 0.75 * expected + 0.25 * vector
        assert torch.equal(step.decode(carrier, side), expected)
    with pytest.raises(PlanError, match="put it earlier in uplink"):
        step.encode(torch.zeros(2), memory, None)
    with pytest.raises(PlanError, match="beta must be in"):
        Part("momentum", beta=1.0).build("transforms")


@pytest.mark.parametrize(
    "attack", [{"name": "sign_flip", "scale": 10.0}, "large_norm", {"name": "gaussian", "sigma": 5.0}]
)
def test_robust_rules_resist_what_the_mean_does_not(attack: Any) -> None:
    changes = {"attack": attack, "attackers": {"num": 2}, "rounds": 12}
    assert run(plan_of(**changes)).accuracy < 0.7
    for name in set(RULES) - {"mean", "majority", "norm_clipping", "centered_clipping", "bulyan"}:
        assert run(plan_of(**changes, **RULES[name])).accuracy > 0.8, name
    assert run(plan_of(**changes, aggregator={"name": "bulyan", "f": 2})).accuracy > 0.8
