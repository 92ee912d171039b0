"""What metrics take, what they refuse and with which words, and how they treat what is no number."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from docs.reading import blocks
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.parts import Part, members
from atoll.metrics import forms
from atoll.testing import check

ROOT = Path(__file__).parents[2]
DATA: dict[str, tuple[Tensor, Tensor]] = {
    forms.CLASSES: (torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])),
    forms.BINARY: (torch.randn(6), torch.tensor([0.0, 1, 0, 1, 0, 1])),
    forms.LABELS: (torch.randn(6, 2), torch.eye(2).repeat(3, 1)),
    forms.NUMBERS: (torch.randn(6), torch.arange(6.0) / 7),
    forms.RISKS: (torch.randn(6), torch.stack([torch.arange(6.0), torch.ones(6)], 1)),
}


def takes(name: str) -> tuple[str, ...]:
    found: tuple[str, ...] = importlib.import_module(f"atoll.metrics.{name}").TAKES
    return found


@pytest.mark.parametrize("form", DATA)
@pytest.mark.parametrize("name", members("metrics"))
def test_a_form_is_taken_or_refused_with_the_metrics_that_fit(name: str, form: str) -> None:
    scores, targets = DATA[form]
    metric = Part(name).build("metrics")
    zeros_and_ones_are_numbers = form in (forms.BINARY, forms.LABELS) and forms.NUMBERS in takes(name)
    if form in takes(name) or zeros_and_ones_are_numbers:
        metric.finish(metric.add(scores, targets, torch.ones(6)))
        return
    with pytest.raises(PlanError, match=f"^{name}") as refused:
        metric.add(scores, targets, torch.ones(6))
    if form == forms.NUMBERS and set(takes(name)) & {forms.BINARY}:
        assert "targets must be 0 or 1" in str(refused.value) and "mae" in str(refused.value)
        return
    fitting = str(refused.value).rpartition("choose one of ")[2].split(", ")
    possible = set(forms.possible_forms(scores, targets))
    assert fitting == [each for each in members("metrics") if possible & set(takes(each))] and name not in fitting


@pytest.mark.parametrize(
    ("scores", "targets", "weight", "words"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), torch.ones(2), r"classes must be in 0..2, .*: got 3; give weight 0"),
        (torch.zeros(2, 3), torch.tensor([0, -100]), torch.ones(2), r"0..2, .*: got -100"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), torch.ones(2), r"float32 targets of shape \(2,\); no metric"),
        (torch.zeros(2, 3), torch.tensor([0]), torch.ones(2), "no metric takes these"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), torch.ones(2), "no metric takes these"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2, 1), "choose one of accuracy"),
        (torch.zeros(2), torch.tensor([0.0, 2.0]), torch.ones(2), "targets must be 0 or 1: got 2; recode them"),
    ],
)
def test_refusals_say_what_is_wrong(scores: Tensor, targets: Tensor, weight: Tensor, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Part("accuracy").build("metrics").add(scores, targets, weight)


def test_ranks_of_too_many_classes_and_events_that_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match=r"auroc takes at most 1024 classes or labels, .*: got 1025; choose accuracy"):
        Part("auroc").build("metrics").add(torch.zeros(1, 1025), torch.zeros(1).long(), torch.ones(1))
    with pytest.raises(PlanError, match="concordance: events must be 0 or 1: got 3"):
        Part("concordance").build("metrics").add(torch.zeros(1), torch.tensor([[1.0, 3.0]]), torch.ones(1))


@pytest.mark.parametrize("name", [name for name in members("metrics") if name not in ("predicted", "kaplan_meier")])
def test_nan_scores_never_look_good(name: str) -> None:
    """Classes and labels of NaN are answers like others, right by chance; everything else is NaN."""
    scores, targets = DATA[takes(name)[0]]
    metric = Part(name).build("metrics")
    figures = metric.finish(metric.add(torch.full_like(scores, math.nan), targets, torch.ones(6)))
    counted = {"accuracy", "balanced_accuracy", "confusion", "f1", "mcc", "precision", "recall", "top_k"}
    value = next(iter(figures.values()))
    assert value <= 0.5 if name in counted else math.isnan(value)
    if metric.condense is not None:
        part = metric.add(torch.full_like(scores, math.nan), targets, torch.ones(6))
        assert math.isnan(next(iter(metric.finish_sums(metric.condense(part)).values())))


def test_the_page_has_a_row_for_every_metric() -> None:
    """Name, what it takes and which side is better are those of the code."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|.*?\| ([\w, ]+) \| (larger|smaller|chart) \|", page, re.MULTILINE)
    expected = []
    for name in members("metrics"):
        metric = Part(name).build("metrics")
        scores, targets = DATA[takes(name)[0]]
        figures = metric.finish(metric.add(scores, targets, torch.ones(6)))
        side = "chart" if not figures else "larger" if metric.larger_is_better else "smaller"
        expected.append((name, ", ".join(takes(name)), side))
    assert sorted(rows) == sorted(expected)


def test_the_metric_of_the_page_keeps_the_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block.text for block in blocks(ROOT / "docs" / "metrics.md") if block.language == "python"]
    (tmp_path / "my_metrics.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert check("metrics", "my_metrics:within") >= 12
    metric = Part("my_metrics:within", distance=0.5).build("metrics")
    data = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 3.0]), torch.tensor([1.0, 1.0, 2.0])
    assert metric.finish(metric.add(*data)) == {"within": 0.5}
