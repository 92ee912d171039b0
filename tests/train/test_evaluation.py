"""What is measured, against scikit-learn and against plain computation, and how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch.nn import functional

from atoll import Dataset, Plan, run
from atoll.core.messages import Task
from atoll.core.parts import Part
from atoll.engine.base import Engine
from atoll.engine.inline import inline
from atoll.engine.processes import processes
from atoll.engine.vectorised import vectorised
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.federation import build_federation


def scores(model: torch.nn.Module, x: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(x).float() / 16)


@pytest.mark.parametrize("rounds", [1, 5])
def test_test_metrics_equal_those_of_scikit_learn(digits_plan: Plan, rounds: int, tmp_path: Path) -> None:
    """After one round some classes are never predicted, which is where definitions differ."""
    result = run(digits_plan.replace({"rounds": rounds}), out=tmp_path / "run", report=False)
    dataset = build_federation(digits_plan).dataset
    outputs = scores(result.model, dataset.test_x)
    truth, predicted = dataset.test_y, outputs.argmax(1).numpy()
    assert rounds > 1 or len(set(predicted)) < 10
    macro = {"average": "macro", "zero_division": 0}
    assert result.test == {
        "accuracy": pytest.approx(metrics.accuracy_score(truth, predicted), abs=1e-12),
        "precision": pytest.approx(metrics.precision_score(truth, predicted, **macro), abs=1e-12),
        "recall": pytest.approx(metrics.recall_score(truth, predicted, **macro), abs=1e-12),
        "f1": pytest.approx(metrics.f1_score(truth, predicted, **macro), abs=1e-12),
        "loss": pytest.approx(float(functional.cross_entropy(outputs, torch.from_numpy(truth))), abs=1e-6),
    }
    written = json.loads((tmp_path / "run" / "confusion.json").read_text())
    assert written["round"] == rounds
    assert np.array_equal(written["matrix"], metrics.confusion_matrix(truth, predicted))


def many() -> Dataset:
    """2,300 test samples, which do not fill whole slices."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2600, 3)).astype(np.float32)
    y = (x @ np.array([[1.0, -1, 0], [0, 1, -1], [1, 0, 1]])).argmax(1)
    return Dataset(name="many", train_x=x[:300], train_y=y[:300], test_x=x[300:], test_y=y[300:], num_classes=3)


@pytest.mark.parametrize("engine", ["inline", "vectorised", "processes"])
def test_a_test_set_of_several_slices_counts_every_sample_once(engine: str) -> None:
    result = run(Plan(data=many, rounds=3, engine=engine))
    dataset = many()
    with torch.no_grad():
        outputs = result.model(torch.from_numpy(dataset.test_x))
    assert result.accuracy == pytest.approx((outputs.argmax(1).numpy() == dataset.test_y).mean(), abs=1e-12)
    loss = float(functional.cross_entropy(outputs.double(), torch.from_numpy(dataset.test_y)))
    assert result.test["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("holdout", [0.0, 0.3])
@pytest.mark.parametrize("build", [inline, vectorised, processes])
def test_client_scores_equal_a_direct_computation(digits_plan: Plan, build: Any, holdout: float) -> None:
    job = build_job(digits_plan.replace({"evaluation.holdout": holdout}))
    engine: Engine = build(job)
    try:
        found_C2 = engine.evaluate_clients(job.first_D, [7, 0, 3])
    finally:
        engine.close()
    model, federation = build_job(digits_plan).model.eval(), job.federation
    for row, client in zip(found_C2, [7, 0, 3], strict=True):
        held = federation.evaluation_indices(client)
        outputs = scores(model, federation.dataset.train_x[held])
        truth = federation.train_y[held]
        assert row[0] == pytest.approx(float((outputs.argmax(1) == truth).double().mean()), abs=1e-12)
        assert row[1] == pytest.approx(float(functional.cross_entropy(outputs, truth)), abs=1e-5)


def test_the_spread_of_clients_is_that_of_their_scores(digits_plan: Plan, tmp_path: Path) -> None:
    result = run(digits_plan.replace({"evaluation.clients_every": 1}), out=tmp_path / "run", report=False)
    written = json.loads((tmp_path / "run" / "clients.json").read_text())
    accuracy_C = np.array(written["accuracy"])
    assert written["clients"] == list(range(12))
    assert written["round"] == 3
    last = result.history[-1]["clients_test"]
    assert last["num_clients"] == 12
    assert last["mean"] == pytest.approx(accuracy_C.mean(), abs=1e-6)
    assert last["std"] == pytest.approx(accuracy_C.std(), abs=1e-6)
    assert last["worst_decile"] == pytest.approx(accuracy_C.min(), abs=1e-6)  # a tenth of 12 is one client
    assert last["loss"] == pytest.approx(np.mean(written["loss"]), abs=1e-6)


@pytest.mark.parametrize("holdout", [0.2, 0.5, 0.99])
def test_nobody_trains_on_what_is_held_out(digits_plan: Plan, holdout: float) -> None:
    job = build_job(digits_plan.replace({"evaluation.holdout": holdout, "local.epochs": 2}))
    federation = job.federation
    for client in range(12):
        train, held = federation.train_indices(client), federation.evaluation_indices(client)
        whole = federation.partition.indices(client)
        assert len(train) == federation.num_samples(client) == len(whole) - int(holdout * len(whole))
        assert set(train).isdisjoint(held)
        assert set(train) | set(held) == set(whole)
        seen = np.concatenate(client_batches(job, Task(client, 3, 3)))
        assert set(seen) == set(train)


def test_a_client_too_small_to_hold_anything_out_is_scored_on_what_it_has() -> None:
    federation = build_federation(Plan(partition={"num_clients": 1437}, evaluation={"holdout": 0.5}))
    assert federation.num_samples(4) == 1
    assert np.array_equal(federation.train_indices(4), federation.evaluation_indices(4))


@pytest.mark.parametrize(
    ("every", "clients_every", "tested", "scored"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7], []),
        (3, 2, [3, 6, 7], [2, 4, 6, 7]),
        (7, 7, [7], [7]),
        (0, 0, [7], []),
        (100, 100, [7], [7]),
    ],
)
def test_evaluation_happens_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, every: int, clients_every: int, tested: list[int], scored: list[int]
) -> None:
    asked: list[str] = []
    for name in ("evaluate", "evaluate_clients"):
        real = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *args, real=real, name=name: (asked.append(name), real(*args))[1])
    evaluation = {"every": every, "clients_every": clients_every}
    history = run(Plan(rounds=7, policy={"size": 2}, evaluation=evaluation, engine="inline")).history
    assert [row["round"] for row in history if "test" in row] == tested
    assert [row["round"] for row in history if "clients_test" in row] == scored
    assert (asked.count("evaluate"), asked.count("evaluate_clients")) == (len(tested), len(scored))


def test_the_same_few_of_many_clients_are_scored(tmp_path: Path) -> None:
    evaluation = {"clients_every": 1, "max_clients": 6}
    plan = Plan(partition={"num_clients": 40}, policy={"size": 3}, evaluation=evaluation, rounds=1, engine="inline")
    chosen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(plan.replace({"seed": seed}), out=tmp_path / name, report=False)
        chosen.append(json.loads((tmp_path / name / "clients.json").read_text())["clients"])
    assert len(set(chosen[0])) == 6
    assert chosen[0] == chosen[1] == sorted(chosen[0])
    assert chosen[0] != chosen[2]


def test_a_run_stops_at_its_target() -> None:
    plan = Plan(rounds=50, stop={"accuracy": 0.8}, evaluation={"every": 2}, engine="inline")
    result = run(plan)
    assert result.reason == "target reached"
    measured = [row["test"]["accuracy"] for row in result.history if "test" in row]
    assert measured[-1] >= 0.8 > max(measured[:-1])
    assert len(result.history) % 2 == 0


def test_attack_success_counts_triggered_samples_of_other_classes() -> None:
    attack = {"name": "backdoor", "target": 3, "share": 0.5}
    plan = Plan(rounds=3, partition={"num_clients": 6}, attack=attack, attackers={"num": 1}, engine="inline")
    result = run(plan)
    x, y = Part("digits").build("data.catalog").test_x, Part("digits").build("data.catalog").test_y
    features = build_federation(plan).features(torch.from_numpy(x[y != 3]))
    features[..., -3:, -3:] = 1.0
    with torch.no_grad():
        hits = result.model(features).argmax(1) == 3
    assert result.test["attack_success"] == pytest.approx(float(hits.float().mean()))
    assert 0.3 < result.test["attack_success"] < 0.9
    honest = plan.replace({"attack": None, "attackers": {}})
    assert "attack_success" not in run(honest).test
    assert run(plan.replace({"engine": {"name": "processes", "workers": 2, "stack": 2}})).test == pytest.approx(
        result.test, abs=4e-3
    )
