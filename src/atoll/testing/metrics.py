"""What every metric must satisfy. Shapes: N samples, K classes.

A metric is tried with every form of scores and targets that `atoll.core.metric` names: it takes some of them, and
refuses the others with PlanError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.metric import Figures, Metric, add_up
from atoll.testing.law import Member, crossed, law, must, must_be_equal, must_be_state, written

CONTRACT = Metric
N, K = 60, 7
ROUNDING = 1e-9
Data = tuple[Tensor, Tensor, Tensor]
"""Scores, targets and weights."""
FORMS = ("classes", "binary", "labels", "numbers", "outputs", "risks")


def _data(form: str, seed: int, num_samples: int = N) -> Data:
    """Draw samples of a form, a fifth of them of weight 0; scores have something to do with targets, and some tie."""
    rng = np.random.default_rng(seed)
    columns = {"classes": (K,), "labels": (3,), "outputs": (2,)}.get(form, ())
    scores = np.round(4 * rng.standard_normal((num_samples, *columns))) / 4
    noisy = scores + rng.standard_normal(scores.shape)
    targets: Any
    if form == "classes":
        targets = noisy.argmax(1)
    elif form in ("binary", "labels"):
        targets = (noisy > 0).astype(np.float32)
    elif form == "risks":
        targets = np.stack([np.round(8 * np.exp(-noisy)), rng.random(num_samples) < 0.6], 1).astype(np.float32)
    else:
        targets = noisy.astype(np.float32)
    weight_N = rng.choice([0.0, 0.5, 1.0, 1.0, 2.0], num_samples)
    return torch.tensor(scores, dtype=torch.float32), torch.from_numpy(targets), torch.from_numpy(weight_N)


def _perfect(form: str, targets: Tensor) -> Tensor:
    """Return the scores of a model that is right and sure."""
    if form == "classes":
        return 20 * torch.nn.functional.one_hot(targets, K).float()
    if form in ("binary", "labels"):
        return 40 * targets - 20
    return -targets[:, 0] if form == "risks" else targets


def _taken(metric: Metric) -> list[str]:
    """Return the forms that a metric does not refuse."""
    taken = []
    for form in FORMS:
        try:
            metric.add(*_data(form, 0))
        except PlanError:
            continue
        taken.append(form)
    return taken


def _tries(metric: Metric) -> Iterator[tuple[str, int, Data]]:
    for form in _taken(metric):
        for seed in range(3):
            yield form, seed, _data(form, seed)


def _slices(data: Data, borders: list[int]) -> list[Data]:
    ends = [0, *sorted(borders), len(data[2])]
    cut = pairwise(ends)
    return [(data[0][low:high], data[1][low:high], data[2][low:high]) for low, high in cut]


def _merged(metric: Metric, parts: list[State], rng: np.random.Generator) -> State:
    """Merge parts pair by pair, in an order and with brackets by chance."""
    parts = [parts[index] for index in rng.permutation(len(parts))]
    while len(parts) > 1:
        index = int(rng.integers(len(parts) - 1))
        parts[index : index + 2] = [metric.merge(parts[index], parts[index + 1])]
    return parts[0]


def _whole(metric: Metric, data: Data) -> Any:
    """Return figures and chart of some samples."""
    return _results(metric, metric.add(*data))


def _results(metric: Metric, part: State) -> Any:
    return {"figures": metric.finish(part), "chart": metric.chart(part) if metric.chart else None}


def _must_agree(found: Any, expected: Any, why: str, tolerance: float = ROUNDING) -> None:
    """Raise LawError unless plain data are equal, numbers up to a tolerance relative to 1 or to themselves."""
    if isinstance(expected, dict) and isinstance(found, dict):
        must(found.keys() == expected.keys(), f"{why} (names are {list(found)} and {list(expected)})")
        for name, value in expected.items():
            _must_agree(found[name], value, f"{why}: {name}", tolerance)
    elif isinstance(expected, list) and isinstance(found, list):
        must(len(found) == len(expected), f"{why} (got {len(found)} values, and not {len(expected)})")
        for one, other in zip(found, expected, strict=True):
            _must_agree(one, other, why, tolerance)
    elif isinstance(expected, float) and isinstance(found, float):
        same = math.isnan(found) and math.isnan(expected)
        same = same or abs(found - expected) <= tolerance * max(1.0, abs(expected)) or found == expected
        must(same, f"{why} (got {found!r}, and not {expected!r})")
    else:
        must(found == expected, f"{why} (got {found!r}, and not {expected!r})")


@law()
def some_forms_are_taken_and_others_refused(member: Member) -> None:
    """Feed every form; one that is refused is so with PlanError, and at least one is taken."""
    taken = _taken(member.build())
    must(bool(taken), "it takes no form of scores and targets: see atoll.core.metric for those that there are")


@law()
def figures_are_numbers_and_charts_plain_data(member: Member) -> None:
    """Look at the types: figures go to files and tables, and charts to reports."""
    metric: Metric = member.build()
    for form, _, data in _tries(metric):
        part = metric.add(*data)
        must_be_state(part, f"the part of {form}")
        figures = metric.finish(part)
        plain = all(type(name) is str and type(value) is float for name, value in figures.items())
        must(plain, f"finish gives {figures!r} of {form}: return floats by name")
        must(bool(figures) or metric.chart is not None, "it gives neither figures nor a chart")
        if metric.chart is not None:
            json.dumps(metric.chart(part), allow_nan=False)


@law()
def slices_and_their_order_change_nothing(member: Member) -> None:
    """Cut samples into slices, some of them empty or of one sample, and merge them in any order."""
    metric: Metric = member.build()
    for form, seed, data in _tries(metric):
        rng = np.random.default_rng(seed)
        borders = [0, 1, *(int(each) for each in rng.integers(0, N, int(rng.integers(0, 6)))), N]
        parts = [metric.add(*piece) for piece in _slices(data, borders)]
        _must_agree(
            _results(metric, _merged(metric, parts, rng)),
            _whole(metric, data),
            f"{len(parts)} slices of {form} give something else than all samples at once: let merge be exact",
        )


@law()
def a_sample_of_weight_0_has_no_share(member: Member) -> None:
    """Leave such samples out, or put rubbish in their place, also targets that are no class."""
    metric: Metric = member.build()
    for form, _, (scores, targets, weight_N) in _tries(metric):
        counts_N = weight_N > 0
        without = _whole(metric, (scores[counts_N], targets[counts_N], weight_N[counts_N]))
        rubbish, nowhere = scores.clone(), targets.clone()
        rubbish[~counts_N], nowhere[~counts_N] = math.nan, -100
        why = f"samples of weight 0 change what is measured of {form}: drop them first"
        _must_agree(_whole(metric, (scores, targets, weight_N)), without, why)
        _must_agree(_whole(metric, (rubbish, nowhere, weight_N)), without, why)


@law()
def weights_are_those_of_samples(member: Member) -> None:
    """Give a sample twice the weight, or give it twice: the figures are the same."""
    metric: Metric = member.build()
    for form, _, (scores, targets, weight_N) in _tries(metric):
        times_N = torch.where(weight_N > 1, 2, 1)
        more = scores.repeat_interleave(times_N, 0), targets.repeat_interleave(times_N, 0)
        _must_agree(
            metric.finish(metric.add(scores, targets, times_N.double())),
            metric.finish(metric.add(*more, torch.ones(len(more[0])))),
            f"a sample of {form} with weight 2 is not as two samples: multiply by weight_N",
        )


@law()
def nothing_that_comes_in_is_written_to(member: Member) -> None:
    """Add, merge, condense and finish; samples and parts stay as they were, and a part when its samples are gone."""
    metric: Metric = member.build()
    for form, seed, data in _tries(metric):
        every = (*data[:2], torch.ones(N, dtype=torch.float64))  # none is left out, which would be a copy
        parts = [metric.add(*every), metric.add(*_data(form, seed + 10))]
        for one, other in zip(data, _data(form, seed), strict=True):
            must(torch.equal(one, other), f"add writes to the samples of {form}: work on a copy")
        before = [{name: value.clone() for name, value in part.items()} for part in parts]
        metric.merge(*parts)
        _results(metric, parts[0])
        if metric.condense is not None:
            metric.condense(parts[0])
        for part, known in zip(parts, before, strict=True):
            must_be_equal(part, known, f"a part of {form} is written to: return a new one")
        for each in every:
            each.zero_()
        must_be_equal(parts[0], before[0], f"a part of {form} is a view of its samples: clone what it keeps")


@law()
def it_depends_on_its_arguments_alone(member: Member) -> None:
    """Measure twice, and with a metric that was built anew."""
    metric: Metric = member.build()
    for form, _, data in _tries(metric):
        first = _whole(metric, data)
        why = f"the same samples of {form} are measured in two ways: remember and draw nothing"
        _must_agree(_whole(metric, data), first, why, 0.0)
        _must_agree(_whole(member.build(), data), first, why, 0.0)


@law()
def parts_cross_processes_and_files(member: Member) -> None:
    """Send a part through a pipe, and through a file: names, types and values stay, and so do figures."""
    metric: Metric = member.build()
    for form, _, data in _tries(metric):
        part = metric.add(*data)
        must_be_state(part, f"the part of {form}")
        for way in (written, crossed):
            back = way(part)
            must_be_equal(back, part, f"a part of {form} comes back changed")
            _must_agree(_results(metric, back), _results(metric, part), "it gives other figures then")


def _places(metric: Metric, form: str) -> tuple[Data, list[State]]:
    """Return the samples of three places, and the part of each."""
    places = [_data(form, seed) for seed in range(3)]
    joined = torch.cat([p[0] for p in places]), torch.cat([p[1] for p in places]), torch.cat([p[2] for p in places])
    return joined, [metric.add(*place) for place in places]


def _added(sums: list[State], form: str) -> State:
    """Add up the sums of places, as a secure sum would: float64 of one layout."""
    for each in sums:
        must_be_state(each, f"what a place tells of {form}")
        layout = {name: (value.shape, value.dtype) for name, value in sums[0].items()}
        must(
            {name: (value.shape, value.dtype) for name, value in each.items()} == layout
            and all(value.dtype == torch.float64 for value in each.values()),
            f"places tell sums of {form} in several layouts, or not in float64: let shapes depend on columns alone",
        )
    total = sums[0]
    for each in sums[1:]:
        total = add_up(total, each)
    return total


@law(unless="condense")
def sums_over_places_give_the_figures_of_all(member: Member) -> None:
    """Add up the parts of three places name by name, as they are said to be sums."""
    metric: Metric = member.build()
    for form in _taken(metric):
        joined, parts = _places(metric, form)
        why = f"parts of {form} are no sums: give it condense and finish_sums"
        _must_agree(metric.finish(_added(parts, form)), metric.finish(metric.add(*joined)), why)


@law(when="condense")
def condensed_sums_are_within_the_error_that_they_state(member: Member) -> None:
    """Add up what three places tell; one place alone must give its own figures, up to the error that is stated."""
    metric: Metric = member.build()
    for form in _taken(metric):
        joined, parts = _places(metric, form)
        sums = [metric.condense(part) for part in parts] if metric.condense else []
        finish = metric.finish_sums or metric.finish
        for told, part in zip(sums, parts, strict=True):
            _must_be_within(finish(told), metric.finish(part), f"the sums of one place with {form}", always=True)
        _must_be_within(finish(_added(sums, form)), metric.finish(metric.add(*joined)), f"sums of places with {form}")


def _must_be_within(found: Figures, exact: Figures, what: str, *, always: bool = False) -> None:
    """Raise LawError unless figures lie within the error `<name>_error`; without one only if `always`."""
    for name, value in exact.items():
        must(name in found, f"{what} give no figure '{name}': finish_sums must give those of finish")
        error = found.get(f"{name}_error")
        if error is not None or always:
            apart = abs(found[name] - value)
            must(
                not apart > (error or 0.0) + ROUNDING,
                f"{what} give {name} = {found[name]:g}, {apart:g} from {value:g}: state a larger `{name}_error`",
            )


@law()
def few_samples_give_numbers_or_nan(member: Member) -> None:
    """Measure none, one, those of one class, equal scores, and none that counts: NaN or a number, and no exception."""
    metric: Metric = member.build()
    for form in _taken(metric):
        scores, targets, weight_N = _data(form, 5)
        same = targets[:1].expand(targets.shape)
        for case in (
            (scores[:0], targets[:0], weight_N[:0]),
            (scores[:1], targets[:1], torch.ones(1)),
            (scores, same, torch.ones(N)),
            (torch.zeros_like(scores), targets, torch.ones(N)),
            (torch.zeros_like(scores), 0 * targets, torch.ones(N)),
            (scores, targets, torch.zeros(N)),
        ):
            part = metric.add(*case)
            results: list[Callable[[], Any]] = [lambda part=part: _results(metric, part)]  # type: ignore[misc]
            if metric.condense is not None and metric.finish_sums is not None:
                results.append(lambda part=part: metric.finish_sums(metric.condense(part)))  # type: ignore[misc]
            for result in results:
                json.dumps(result())


@law()
def better_scores_give_a_better_figure(member: Member) -> None:
    """Compare a model that is right and sure to one that is as sure of the opposite, by the first figure."""
    metric: Metric = member.build()
    for form, _, (_, targets, _) in _tries(metric):
        if form in ("binary", "labels") and "numbers" in _taken(metric):
            continue  # it takes zeros and ones as numbers, for which there are tries of their own
        best = _perfect(form, targets)
        worst = -best if form in ("classes", "binary", "labels", "risks") else targets.flip(0)
        good, bad = (
            list(metric.finish(metric.add(each, targets, torch.ones(N))).values())[:1] for each in (best, worst)
        )
        side = "larger" if metric.larger_is_better else "smaller"
        for right, wrong in zip(good, bad, strict=True):
            better = right > wrong if metric.larger_is_better else right < wrong
            must(better, f"of {form} all right gives {right:g}, all wrong {wrong:g}, and {side} is said to be better")
