"""Problems other than classes: every engine, resume, measures against scikit-learn, groups, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless
from problem_data import cancer, diabetes, labels, lifetimes, sequences
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score, roc_auc_score

from atoll import Plan, run
from atoll.core.errors import DataError, PlanError
from atoll.train.losses.focal import focal

PROBLEMS: dict[str, tuple[Any, dict[str, Any], str, float]] = {
    "regression": (diabetes, {}, "r2", 0.45),
    "binary": (cancer, {}, "auroc", 0.98),
    "multi_label": (labels, {"model": {"name": "mlp_2nn", "hidden": 16}, "local.lr": 0.5}, "f1", 0.8),
    "tokens": (
        sequences,
        {"model": {"name": "char_lstm", "hidden": 16, "layers": 1}, "local.lr": 1.0},
        "accuracy",
        0.5,
    ),
    "survival": (lifetimes, {"local.batch_size": "all", "local.steps": 5}, "concordance", 0.7),
}
BASE = {"partition": {"num_clients": 5}, "rounds": 8, "local": {"lr": 0.05, "batch_size": 16}, "engine": "inline"}


def plan_of(kind: str, **changes: Any) -> Plan:
    data, settings, _, _ = PROBLEMS[kind]
    return Plan(**{**Plan(**BASE).replace({**settings, **changes}).to_dict(), "data": data})


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])], ids=["class", "each"]
)
def test_focal_has_a_slope_where_a_model_is_sure(gamma: float, targets: torch.Tensor) -> None:
    outputs = torch.tensor([[60.0, -60.0], [60.0, -60.0]], requires_grad=True)  # once right, once wrong
    loss = focal(gamma)(outputs, targets)
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and outputs.grad is not None and bool(outputs.grad.isfinite().all())
    assert float(outputs.grad[0].abs().max()) < 1e-20 < float(outputs.grad[1].abs().min())


@pytest.mark.parametrize("kind", PROBLEMS)
def test_every_problem_is_inferred_and_learnt(kind: str) -> None:
    result = run(plan_of(kind, rounds=20))
    _, _, figure, least = PROBLEMS[kind]
    assert PROBLEMS[kind][0]().problem == kind
    assert result.test[figure] > least, result.test


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("engine", [{"name": "vectorised", "stack": 3}, {"name": "processes", "workers": 2}], ids=str)
def test_engines_agree(kind: str, engine: dict[str, Any]) -> None:
    one, other = run(plan_of(kind, rounds=2)), run(plan_of(kind, rounds=2, engine=engine))
    torch.testing.assert_close(other.params_D, one.params_D, atol=1e-5, rtol=1e-4)
    assert other.test == pytest.approx(one.test, abs=1e-4)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_resumed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = run(plan_of(kind, rounds=3), out=tmp_path / "whole")
    run(plan_of(kind, rounds=1), out=tmp_path / "parts", report=False)
    resumed = run(plan_of(kind, rounds=3), out=tmp_path / "parts", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)
    assert timeless(resumed.history) == timeless(whole.history)
    assert (tmp_path / "whole" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("kind", PROBLEMS)
def test_workers_do_not_change_bits(kind: str) -> None:
    engines = ({"name": "processes", "workers": workers, "stack": 2} for workers in (1, 2))
    one, two = (run(plan_of(kind, rounds=2, engine=engine)) for engine in engines)
    assert torch.equal(one.params_D, two.params_D) and one.test == two.test


def test_regression_comes_close_to_centralised_training() -> None:
    data = diabetes()
    pooled = LinearRegression().fit(data.train_x, data.train_y)
    best = r2_score(data.test_y, pooled.predict(data.test_x))
    result = run(plan_of("regression", rounds=60))
    assert abs(result.test["r2"] - best) < 0.01


def test_figures_are_those_of_scikit_learn() -> None:
    result, data = run(plan_of("binary")), cancer()
    with torch.no_grad():
        scores = result.model(torch.from_numpy(data.test_x)).squeeze(-1).numpy()
    assert result.test["auroc"] == pytest.approx(roc_auc_score(data.test_y, scores), abs=1e-6)
    assert result.test["accuracy"] == pytest.approx(((scores > 0) == data.test_y).mean(), abs=1e-6)


def test_groups_are_compared(tmp_path: Path) -> None:
    result, data = run(plan_of("binary"), out=tmp_path / "run", report=False), cancer()
    with torch.no_grad():
        right = (result.model(torch.from_numpy(data.test_x)).squeeze(-1).numpy() > 0) == data.test_y
    chart = json.loads((tmp_path / "run" / "charts.json").read_text())["fairness"]
    expected = {name: right[data.test_groups == number].mean() for number, name in enumerate(("small", "large"))}
    assert chart["accuracy"] == pytest.approx(expected)
    assert result.history[-1]["fairness"]["worst_accuracy"] == pytest.approx(min(expected.values()))


def test_a_plan_may_say_the_problem_and_the_metrics() -> None:
    plan = Plan(problem="regression", rounds=1, evaluation={"metrics": ["mae", {"name": "rmse"}]}, local={"lr": 0.001})
    assert list(run(plan).test) == ["mae", "loss", "rmse"]


@pytest.mark.parametrize("loss", ["mse", "mae", {"name": "huber", "delta": 0.5}])
def test_losses_of_regression(loss: Any) -> None:
    assert run(plan_of("regression", loss=loss)).test["r2"] > 0.3


def test_class_weights_and_smoothing() -> None:
    plain = run(Plan(rounds=2, engine="inline")).params_D
    for options in ({"weights": [1.0] * 9 + [5.0]}, {"label_smoothing": 0.2}):
        assert not torch.equal(
            run(Plan(rounds=2, engine="inline", loss={"name": "cross_entropy", **options})).params_D, plain
        )
    same = run(Plan(rounds=2, engine="inline", loss={"name": "cross_entropy", "weights": [1.0] * 10})).params_D
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"problem": "survival"}, "(N, 2)"),
        ({"problem": "binary"}, "two classes: got 10"),
        ({"problem": "regresion"}, "did you mean 'regression'"),
        ({"evaluation": {"metrics": ["rmse"]}}, "rmse takes numbers"),
        (
            {"loss": "mse"},
            "loss 'mse' is for regression, binary, multi_label, not for classification: use cross_entropy",
        ),
        ({"loss": "cox"}, "use cross_entropy or focal"),
        ({"loss": {"name": "cross_entropy", "weights": [1.0, 2.0]}}, "2 weights for 10 classes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises((PlanError, DataError)) as refused:
        run(Plan(**change))
    assert why in str(refused.value)


def test_a_loss_that_mixes_samples_is_not_private_by_sample() -> None:
    noise = {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}
    with pytest.raises(PlanError, match="the loss"):
        run(plan_of("survival", **{"privacy": noise, "sampler": "poisson", "local.batch_size": 16}))
    assert run(plan_of("regression", **{"privacy": noise, "sampler": "poisson"})).reason == "all rounds done"


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize(
    "change",
    [
        {"uplink": [{"name": "top_k", "fraction": 0.5}]},
        {"secagg": {}},
        {"aggregator": "median", "attack": "sign_flip", "attackers": {"num": 1}},
        {"detection": "loss", "server.samples": 20},
        {"contribution": "leave_one_out", "server.samples": 20},
        {"policy": {"name": "buffered", "size": 2, "concurrency": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_parts_take_every_problem(kind: str, change: dict[str, Any]) -> None:
    result = run(plan_of(kind, rounds=2, **change))
    assert bool(result.params_D.isfinite().all()) and result.test["loss"] < 100
