"""Detection: bad clients are found, honest ones stay, and a resumed run ends the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_end, timeless
from members import every

from atoll.api import run
from atoll.commit.detection import judged
from atoll.core.detection import Comparison, RoundView
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part, examples
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.train.build import build_job

BASE: dict[str, Any] = {
    "rounds": 8,
    "partition": {"name": "iid", "num_clients": 12},
    "policy": {"size": 8},
    "local": {"lr": 0.1, "epochs": 1},
    "attack": {"name": "sign_flip", "scale": 3.0},
    "attackers": {"clients": [2, 5, 7]},
    "aggregator": "median",
    "engine": "inline",
}


def plan_with(name: str, **changes: Any) -> Plan:
    part = Part(name, **examples("detection", name)[0])
    samples = {"server": {"samples": 100}} if part.build("detection").needs_loss else {}
    return Plan(**{**BASE, "detection": part, **samples, **changes})


@pytest.mark.parametrize("name", every("detection"))
def test_flipped_signs_are_found_and_nobody_else(name: str) -> None:
    history = run(plan_with(name)).history
    last = history[-1]["detection"]
    assert last["quarantined"] == [2, 5, 7]
    assert last["precision"] == last["recall"] == 1.0
    found = next(place for place, row in enumerate(history) if row["detection"]["quarantined"] == [2, 5, 7])
    for row in history[found + 1 :]:
        assert not {"2", "5", "7"} & row["detection"]["clients"].keys()  # not asked any more
        assert row["clients"] == 8


@pytest.mark.parametrize("name", every("detection"))
def test_without_an_attack_nobody_is_shut_out(name: str) -> None:
    last = run(plan_with(name, attack=None, attackers={})).history[-1]["detection"]
    assert last["quarantined"] == [] and "precision" not in last and "recall" not in last


def test_a_detected_client_does_not_count_in_that_round() -> None:
    strict = {"name": "cosine", "decay": 0.0}
    settings: dict[str, Any] = {"policy": {"size": 12}, "rounds": 1, "attack": {"name": "sign_flip", "scale": 1.0}}
    found = run(Plan(**{**BASE, **settings, "aggregator": "mean", "detection": strict}))
    assert found.history[0]["detection"]["quarantined"] == [2, 5, 7] and found.history[0]["clients"] == 9
    job = build_job(Plan(**{**BASE, **settings, "attack": None, "attackers": {}, "aggregator": "mean"}))
    tasks = [Task(client, 0, 0) for client in range(12) if client not in (2, 5, 7)]
    honest = inline(job).train(tasks, {0: Broadcast(job.first_D, {})}, {})
    mean_D = job.aggregator.finish(honest.folded, {})[0].delta_D
    assert torch.allclose(found.params_D, job.first_D + mean_D, atol=1e-6)


def test_as_many_stay_as_the_rule_needs() -> None:
    rule = {"name": "krum", "f": 3}
    result = run(plan_with("distance", policy={"size": 10}, partition={"num_clients": 10}, aggregator=rule, rounds=4))
    assert len(result.history) == 4  # nine must stay of ten
    assert len(result.history[-1]["detection"]["quarantined"]) <= 1


def test_trust_decays_by_hand() -> None:
    detector = Part("cosine", decay=0.5, threshold=0.4).build("detection")
    rows_CD = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0]])
    view = RoundView(rows_CD, Comparison.of(rows_CD, torch.tensor([2.0, 0.0])), lambda delta: 0.0)
    assert detector.trust(view).tolist() == [1.0, 0.0, 0.5]
    assert view.comparison.distance_C.tolist() == pytest.approx([1.0, 3.0, 8**0.5])
    first = judged(detector, [4, 5, 6], view, {}, (), most=3)
    assert first.trust == {4: 1.0, 5: 0.5, 6: 0.75} and first.quarantined == ()
    second = judged(detector, [4, 5, 6], view, first.trust, (), most=3)
    assert second.trust == {4: 1.0, 5: 0.25, 6: 0.625} and second.quarantined == (5,)
    assert judged(detector, [4, 5, 6], view, first.trust, (), most=0).quarantined == ()


@pytest.mark.parametrize("name", every("detection"))
def test_resume_and_workers_change_nothing(name: str, tmp_path: Path) -> None:
    plan = plan_with(name, evaluation={"clients_every": 1})
    whole = run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 2}), out=tmp_path / "stopped", report=False)
    run(plan, out=tmp_path / "stopped", report=False, resume=True)
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")
    entry = json.loads((tmp_path / "whole/result.json").read_text())["detection"]
    assert entry == {"quarantined": [2, 5, 7], "precision": 1.0, "recall": 1.0}
    farmed = [
        run(plan.replace({"engine": {"name": "processes", "workers": n, "stack": 2}})).history for n in (1, 2)
    ]  # fmt: skip
    assert timeless(farmed[0]) == timeless(farmed[1])
    assert whole.history[-1]["detection"]["quarantined"] == farmed[0][-1]["detection"]["quarantined"]


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"set server.samples"):
        build_job(Plan(**{**BASE, "detection": "loss"}))
    with pytest.raises(PlanError, match='use policy = "cohort"'):
        build_job(Plan(**{**BASE, "detection": "cosine", "policy": "buffered"}))
    with pytest.raises(PlanError, match=r"server.samples is 9, but median does not use them"):
        build_job(Plan(**{**BASE, "detection": "cosine", "server": {"samples": 9}}))
    with pytest.raises(PlanError, match="threshold must be in"):
        Part("cosine", threshold=1.0).build("detection")
