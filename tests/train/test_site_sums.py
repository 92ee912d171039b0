"""Sums that places send of metrics: honest ones are plausible, lies are not, and one sample moves counts by a bound."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Metric
from atoll.core.parts import Part, members
from atoll.metrics.forms import BINARY, CLASSES, LABELS, NUMBERS, RISKS

NUM, K = 60, 4
HELPERS = {"probabilities", "ranking"}
"""Modules of the folder that have a function of their own name and are no metric."""
Samples = tuple[Tensor, Tensor]


def samples(form: str, num: int, seed: int) -> Samples:
    """Scores and targets of a form."""
    rng = torch.Generator().manual_seed(seed)
    if form == CLASSES:
        return torch.randn(num, K, generator=rng), torch.randint(K, (num,), generator=rng)
    if form == BINARY:
        return torch.randn(num, generator=rng), torch.randint(2, (num,), generator=rng)
    if form == LABELS:
        return torch.randn(num, K, generator=rng), torch.randint(2, (num, K), generator=rng)
    if form == NUMBERS:
        return torch.randn(num, generator=rng), torch.randn(num, generator=rng) - 1
    time_N = torch.rand(num, generator=rng) * 10
    return torch.randn(num, generator=rng), torch.stack([time_N, torch.randint(2, (num,), generator=rng)], dim=1)


def cases() -> Iterator[tuple[str, str]]:
    for name in sorted(set(members("metrics")) - HELPERS):
        for form in importlib.import_module(f"atoll.metrics.{name}").TAKES:
            yield name, form


CASES = list(cases())


def condensed(metric: Metric, chosen: Samples) -> State:
    part = metric.add(*chosen, torch.ones(len(chosen[0]), dtype=torch.float64))
    return part if metric.condense is None else metric.condense(part)


def test_every_form_has_a_metric() -> None:
    assert {form for _, form in CASES} == {CLASSES, BINARY, LABELS, NUMBERS, RISKS}


@pytest.mark.parametrize(("name", "form"), CASES)
def test_honest_sums_are_plausible_and_of_other_samples_are_not(name: str, form: str) -> None:
    metric: Metric = Part(name).build("metrics")
    for seed in range(20):
        sums = condensed(metric, samples(form, NUM, seed))
        assert metric.plausible is None or metric.plausible(sums, NUM, NUM)
    if metric.plausible is not None:
        for label in sums:
            assert not metric.plausible({**sums, label: sums[label] * -1 - 1}, NUM, NUM) or (name, label) == (
                "r2",
                "sum",
            )
        assert not metric.plausible({key: value * 1e6 for key, value in sums.items()}, NUM, NUM) or name in UNCOUNTED


UNCOUNTED = {"calibration_error"}
"""Metrics whose sums are checked against one another alone."""


@pytest.mark.parametrize(("name", "form"), CASES)
def test_one_sample_moves_counts_by_the_stated_distance(name: str, form: str) -> None:
    metric: Metric = Part(name).build("metrics")
    if metric.sensitivity is None:
        return
    furthest = 0.0
    for seed in range(50):
        scores, targets = samples(form, NUM, seed)
        before, after = condensed(metric, (scores[1:], targets[1:])), condensed(metric, (scores, targets))
        change = torch.cat([(after[label] - before[label]).double().flatten() for label in before])
        assert bool((change == change.round()).all())
        furthest = max(furthest, float(change.norm()))
    bound = metric.sensitivity(after)
    assert furthest <= bound + 1e-9
    assert furthest >= bound / 2  # a bound far too wide would be noise for nothing
