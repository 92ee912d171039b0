"""Every metric against scikit-learn, lifelines or a plain computation, for any slices and with weights.

Shapes: N samples, K classes, L labels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn import metrics as oracle
from sklearn.calibration import calibration_curve
from torch import Tensor

from atoll.core.metric import Figures, Metric
from atoll.core.parts import Part

FORMS = ("classes", "binary", "labels", "numbers", "outputs")
LIFELINES = json.loads(Path(__file__).with_name("lifelines.json").read_text())


def build(name: str, **options: Any) -> Metric:
    metric: Metric = Part(name, **options).build("metrics")
    return metric


def samples(form: str, seed: int = 0, num_samples: int = 300, *, ties: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Draw scores, targets and weights, a quarter of them 0; scores of halves have many ties."""
    rng = np.random.default_rng(seed)
    columns = {"classes": (5,), "labels": (3,), "outputs": (2,)}.get(form, ())
    noise = 2 * rng.standard_normal((num_samples, *columns))
    scores = np.round(2 * noise) / 2 if ties else noise
    if form == "classes":
        targets: Any = rng.choice(5, num_samples, p=[0.3, 0.3, 0.2, 0.1, 0.1])
        scores = scores + 1.5 * (np.arange(5) == targets[:, None])
    elif form in ("binary", "labels"):
        targets = (scores + 2 * rng.standard_normal(scores.shape) > 0.5).astype(np.float32)
    else:
        targets = (10 + scores + rng.standard_normal(scores.shape)).astype(np.float32)
        scores = scores + 10
    weight = rng.choice([0.0, 0.5, 1.0, 2.5], num_samples)
    return torch.tensor(scores, dtype=torch.float32), torch.from_numpy(targets), torch.from_numpy(weight)


def measured(metric: Metric, data: tuple[Tensor, Tensor, Tensor], slices: int = 1) -> Figures:
    """Add slices one by one, and merge them from the last on."""
    parts = [metric.add(*piece) for piece in zip(*(each.tensor_split(slices) for each in data), strict=True)]
    return metric.finish(reduce(metric.merge, parts[::-1]))


def averages(function: Callable[..., Any]) -> dict[str, Callable[..., float]]:
    return {
        average: lambda y, s, w, average=average: function(
            y, labels_of(y, s), sample_weight=w, zero_division=0, average=average if s.ndim == 2 else "binary"
        )
        for average in ("macro", "weighted", "micro")
    }


def labels_of(y: Any, s: Any) -> Any:
    return s.argmax(1) if s.ndim == 2 and y.ndim == 1 else (s > 0).astype(int)


def chances(y: Any, s: Any) -> Any:
    return softmax(s.astype(float), axis=1) if s.ndim == 2 and y.ndim == 1 else expit(s.astype(float))


def auroc(y: Any, s: Any, w: Any) -> float:
    return oracle.roc_auc_score(y, chances(y, s), sample_weight=w, multi_class="ovr")


def brier(y: Any, s: Any, w: Any) -> float:
    if y.ndim == 2:
        return np.mean([oracle.brier_score_loss(y[:, n], expit(s[:, n]), sample_weight=w) for n in range(y.shape[1])])
    return oracle.brier_score_loss(y, chances(y, s), sample_weight=w)


CLASSES, ONE, ALL = ("classes",), ("classes", "binary"), ("classes", "binary", "labels")
NUMBERS = ("numbers", "outputs")
ORACLES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], Callable[..., Any]]] = {
    "accuracy": ("accuracy", {}, ALL, lambda y, s, w: oracle.accuracy_score(y, labels_of(y, s), sample_weight=w)),
    "top_5": (
        "top_k",
        {},
        CLASSES,
        lambda y, s, w: oracle.top_k_accuracy_score(y, s, k=5, sample_weight=w),
    ),
    "top_2": ("top_k", {"k": 2}, CLASSES, lambda y, s, w: oracle.top_k_accuracy_score(y, s, k=2, sample_weight=w)),
    "balanced_accuracy": (
        "balanced_accuracy",
        {},
        ONE,
        lambda y, s, w: oracle.balanced_accuracy_score(y, labels_of(y, s), sample_weight=w),
    ),
    "mcc": ("mcc", {}, ONE, lambda y, s, w: oracle.matthews_corrcoef(y, labels_of(y, s), sample_weight=w)),
    "auroc": ("auroc", {}, ALL, auroc),
    "average_precision": (
        "average_precision",
        {},
        ALL,
        lambda y, s, w: oracle.average_precision_score(y, chances(y, s), sample_weight=w),
    ),
    "brier": ("brier", {}, ALL, brier),
    "perplexity": (
        "perplexity",
        {},
        CLASSES,
        lambda y, s, w: math.exp(oracle.log_loss(y, chances(y, s), sample_weight=w)),
    ),
    "mae": ("mae", {}, NUMBERS, lambda y, s, w: oracle.mean_absolute_error(y, s, sample_weight=w)),
    "rmse": ("rmse", {}, NUMBERS, lambda y, s, w: oracle.root_mean_squared_error(y, s, sample_weight=w)),
    "r2": ("r2", {}, NUMBERS, lambda y, s, w: oracle.r2_score(y, s, sample_weight=w)),
}
for name, function in (
    ("precision", oracle.precision_score),
    ("recall", oracle.recall_score),
    ("f1", oracle.f1_score),
):
    for average, each in averages(function).items():
        figure = name if average == "macro" else f"{name}_{average}"
        ORACLES[figure] = (name, {"average": average}, ALL, each)


@pytest.mark.parametrize("slices", [1, 7])
@pytest.mark.parametrize(
    ("figure", "form"), [(figure, form) for figure, (_, _, forms, _) in ORACLES.items() for form in forms]
)
@pytest.mark.filterwarnings("ignore:'k'")
def test_a_figure_equals_that_of_scikit_learn(figure: str, form: str, slices: int) -> None:
    name, options, _, function = ORACLES[figure]
    for seed in range(3):
        # Classes are ranked by probabilities, whose rounding decides between scores that are tied but for it.
        data = samples(form, seed, ties=form != "classes" or name == "top_k")
        kept = data[2] > 0
        expected = function(*(each[kept].double().numpy() for each in (data[1], data[0], data[2])))
        assert measured(build(name, **options), data, slices) == {figure: pytest.approx(expected, abs=1e-9, rel=1e-9)}


def test_two_classes_as_two_logits_or_as_one_give_the_same() -> None:
    scores, targets, weight = samples("binary", 4)
    both = torch.stack([torch.zeros_like(scores), scores], 1), targets.long(), weight
    for name in ("accuracy", "auroc", "brier", "balanced_accuracy", "mcc", "confusion"):
        one, two = measured(build(name), (scores, targets, weight)), measured(build(name), both)
        assert one == pytest.approx(two, abs=1e-9), name


@pytest.mark.parametrize("num_classes", [3, 40])
def test_confusion_gives_the_figures_of_earlier_releases_to_the_bit(num_classes: int) -> None:
    rng = torch.Generator().manual_seed(num_classes)
    scores = torch.randn(500, num_classes, generator=rng)
    targets = torch.randint(max(2, num_classes - 3), (500,), generator=rng)
    matrix = oracle.confusion_matrix(targets, scores.argmax(1), labels=range(num_classes))
    hits_K, true_K, predicted_K = np.diag(matrix).astype(float), matrix.sum(1), matrix.sum(0)
    occurs_K = (true_K + predicted_K) > 0
    expected = {  # by the formulas that runs of earlier releases used
        "accuracy": float(hits_K.sum() / matrix.sum()),
        "precision": float((hits_K / np.maximum(predicted_K, 1))[occurs_K].mean()),
        "recall": float((hits_K / np.maximum(true_K, 1))[occurs_K].mean()),
        "f1": float((2 * hits_K / np.maximum(true_K + predicted_K, 1))[occurs_K].mean()),
    }
    weight = torch.ones(500)
    for limit in (2, 256):
        metric = build("confusion", max_classes=limit)
        part = metric.add(scores, targets, weight)
        assert metric.finish(part) == expected
        assert metric.chart is not None
        assert metric.chart(part) == ({} if limit < num_classes else {"matrix": matrix.tolist()})
        assert max(value.numel() for value in part.values()) <= max(limit**2, num_classes)


def test_the_reliability_curve_equals_that_of_scikit_learn() -> None:
    scores, targets, _ = samples("binary", 2)
    metric = build("calibration_error", bins=10)
    part = metric.add(scores, targets, torch.ones(len(scores)))
    frequency, confidence = calibration_curve(targets, expit(scores.double().numpy()), n_bins=10)
    assert metric.chart is not None
    chart = metric.chart(part)
    assert chart["frequency"] == pytest.approx(frequency) and chart["confidence"] == pytest.approx(confidence)
    expected = np.abs(frequency - confidence) @ np.array(chart["weight"]) / sum(chart["weight"])
    assert metric.finish(part)["calibration_error"] == pytest.approx(expected)
    assert sum(chart["weight"]) == len(scores)


def test_the_calibration_of_classes_goes_by_the_most_likely_one() -> None:
    scores, targets, weight = samples("classes", 3)
    p, y, w = softmax(scores.double().numpy(), axis=1), targets.numpy(), weight.numpy()
    confidence, right = p.max(1), p.argmax(1) == y
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        expected += abs(np.sum(w[inside] * (right[inside] - confidence[inside]))) / w.sum()
    assert measured(build("calibration_error"), (scores, targets, weight), 4) == {
        "calibration_error": pytest.approx(expected, abs=1e-12)
    }


@pytest.mark.parametrize("case", LIFELINES, ids=range(len(LIFELINES)))
def test_survival_equals_that_of_lifelines(case: dict[str, Any]) -> None:
    """The values are those of lifelines 0.30.3; see lifelines_values.py."""
    risk, targets = torch.tensor(case["risk"]), torch.tensor([case["time"], case["event"]]).T
    data = risk, targets, torch.ones(len(risk))
    for slices in (1, 5):
        assert measured(build("concordance"), data, slices)["concordance"] == pytest.approx(case["concordance"], 1e-12)
    metric = build("kaplan_meier")
    assert metric.chart is not None
    curves = metric.chart(metric.add(*data))["groups"]
    for name, expected in case["curves"].items():
        known = dict(zip(expected["time"], expected["survival"], strict=True))
        for time, survival in zip(curves[name]["time"], curves[name]["survival"], strict=True):
            assert time == 0.0 or survival == pytest.approx(known[time], abs=1e-9)
        assert curves[name]["survival"][-1] == pytest.approx(expected["survival"][-1], abs=1e-9)


def test_concordance_equals_a_count_of_all_pairs_by_weight() -> None:
    rng = np.random.default_rng(5)
    risk, time, event = rng.integers(0, 9, 80), rng.integers(0, 30, 80), rng.integers(0, 2, 80)
    weight = rng.choice([0.0, 0.5, 2.0], 80)
    good = total = 0.0
    for i in range(80):
        for j in range(80):
            if event[i] and (time[j] > time[i] or (time[j] == time[i] and not event[j])):
                total += weight[i] * weight[j]
                good += weight[i] * weight[j] * (1.0 * (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j]))
    data = torch.from_numpy(risk).float(), torch.from_numpy(np.stack([time, event], 1)), torch.from_numpy(weight)
    assert measured(build("concordance"), data, 3)["concordance"] == pytest.approx(good / total, 1e-12)


def test_kaplan_meier_draws_a_bounded_number_of_points() -> None:
    metric = build("kaplan_meier", max_points=10)
    risk, time = torch.arange(1000.0) % 7, torch.arange(1000.0)
    assert metric.chart is not None
    curves = metric.chart(metric.add(risk, torch.stack([time, torch.ones(1000)], 1), torch.ones(1000)))["groups"]
    assert {len(curve["time"]) for curve in curves.values()} == {12}
    assert curves["low risk"]["survival"][-1] == pytest.approx(0.0, abs=1e-12)


def test_predicted_values_are_drawn_by_a_sample_of_them() -> None:
    scores, targets, _ = samples("numbers", 1, 2000, ties=False)
    metric = build("predicted", max_points=100)
    assert metric.chart is not None
    chart = metric.chart(metric.add(scores, targets, torch.ones(2000)))
    pairs = set(zip(targets.tolist(), scores.tolist(), strict=True))
    assert len(chart["true"]) == 100 and set(zip(chart["true"], chart["predicted"], strict=True)) <= pairs
    assert abs(np.mean(chart["true"]) - float(targets.mean())) < 5 * float(targets.std()) / 10
    assert metric.finish(metric.add(scores, targets, torch.ones(2000))) == {}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("name", ["auroc", "average_precision"])
def test_histograms_of_places_give_the_figure_within_a_small_stated_error(name: str, form: str) -> None:
    """Also where log-odds lie close together or far out, and the bound is small enough to be of use.

    Of probabilities that are 1 in float64 the order is unknown: there it is honest, and larger.
    """
    for scale, limit in ((1.0, 0.004), (0.1, 0.01), (5.0 if form == "classes" else 30.0, 0.01)):
        scores, targets, weight = samples(form, 6, 4000, ties=False)
        data = scale * scores, targets, weight
        metric = build(name)
        assert metric.condense is not None and metric.finish_sums is not None
        places = [metric.condense(metric.add(*each)) for each in zip(*(d.split(500) for d in data), strict=True)]
        sums = {key: torch.stack([place[key] for place in places]).sum(0) for key in places[0]}
        found, exact = metric.finish_sums(sums), measured(metric, data)[name]
        assert abs(found[name] - exact) <= found[f"{name}_error"] < limit, (scale, found, exact)


def test_an_error_bound_holds_for_the_worst_order_within_a_bin() -> None:
    """Log-odds that differ by less than a bin: best and worst orders, in one bin."""
    for order in ([1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [1, 0, 1, 0, 0]):
        data = torch.tensor([5.0 + n * 1e-5 for n in range(5)]), torch.tensor(order), torch.ones(5)
        for name in ("auroc", "average_precision"):
            metric = build(name)
            assert metric.condense is not None and metric.finish_sums is not None
            found, exact = metric.finish_sums(metric.condense(metric.add(*data))), measured(metric, data)[name]
            assert abs(found[name] - exact) <= found[f"{name}_error"] + 1e-12
            assert found[f"{name}_error"] > 0.1


def test_r2_keeps_its_digits_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    targets = (1e4 + rng.standard_normal(500)).astype(np.float32)
    scores = (targets + 0.3 * rng.standard_normal(500)).astype(np.float32)
    data = torch.from_numpy(scores), torch.from_numpy(targets), torch.ones(500)
    expected = oracle.r2_score(targets.astype(float), scores.astype(float))
    assert measured(build("r2"), data, 9)["r2"] == pytest.approx(expected, abs=1e-6)
    assert math.isnan(measured(build("r2"), (data[0], torch.full((500,), 0.1), data[2]))["r2"])
