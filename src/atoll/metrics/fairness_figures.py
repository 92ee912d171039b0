"""How unequally groups fare: sums by group that add up over slices and places, and what they say.

Shapes: N samples, G groups, K classes or labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.metric import Figures
from atoll.core.problem import Scored
from atoll.metrics.accuracy import right_answers
from atoll.metrics.counts import Array, arrays, tally
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows, rows
from atoll.metrics.probabilities import as_classes, one_hot, predicted_labels

TAKES = (CLASSES, BINARY, LABELS)
MAX_CLASSES = 256
"""With more classes or labels only right answers are counted: a table of each group would be large."""


class Fairness(NamedTuple):
    """What the sums of groups say; NaN where fewer than two groups have samples to compare."""

    accuracy: Figures
    """Name of a group -> its accuracy; NaN without samples."""
    worst_group: str
    worst_accuracy: float
    demographic_parity_difference: float
    equalised_odds_difference: float
    jain: float

    @property
    def figures(self) -> Figures:
        """All numbers by name; those of groups as `accuracy_<group>`."""
        own = {name: value for name, value in self._asdict().items() if isinstance(value, float)}
        return {f"accuracy_{name}": value for name, value in self.accuracy.items()} | own


def fairness_sums(scored: Scored, group_N: Tensor, num_groups: int) -> State:
    """Return sums by group: weight, right answers, and of each class how often it is true, predicted, and both.

    They are float64 and add up; those of classes, (G, K), are there up to MAX_CLASSES of them.
    """
    if group_N.shape != scored.weight_N.shape or _outside(group_N, num_groups):
        raise PlanError(
            f"each of {len(scored.weight_N)} samples needs a group in 0..{num_groups - 1}: got groups of shape "
            f"{tuple(group_N.shape)}{_outside(group_N, num_groups)}; number the groups, one for each sample"
        )
    samples = rows("fairness by groups", TAKES, *scored)
    group_N = group_N[scored.weight_N != 0].long()
    right_N = right_answers(samples).double()
    sums = {
        "count": tally(group_N, samples.weight_N, num_groups),
        "right": tally(group_N, samples.weight_N * right_N, num_groups),
    }
    if samples.columns.shape[1] > MAX_CLASSES:
        return sums
    predicted_NK, true_NK = _answers(samples)
    tables = {"hits": predicted_NK * true_NK, "true": true_NK, "predicted": predicted_NK}
    zeros_GK = true_NK.new_zeros(num_groups, true_NK.shape[1])
    weight_N1 = samples.weight_N[:, None]
    return sums | {name: zeros_GK.index_add(0, group_N, weight_N1 * value_NK) for name, value_NK in tables.items()}


def fairness(sums: State, names: Sequence[str]) -> Fairness:
    """Return what the sums of all samples say of the groups with these names.

    Demographic parity difference: the largest gap between groups in the share that is predicted as a class. Equalised
    odds difference (Hardt et al. 2016, arXiv:1610.02413): the largest gap in the share of a class that is found, or of
    the others that are taken for it. Both are over all classes; of two they are the usual ones, and of labels each is
    a class. A group without such samples is not compared.
    """
    table = arrays(sums)
    count_G = table["count"]
    accuracy_G = _rates(table["right"], count_G)
    by_name = dict(zip(names, accuracy_G.tolist(), strict=True))
    parity = odds = math.nan
    if "hits" in table:
        hits_GK, true_GK, predicted_GK = table["hits"], table["true"], table["predicted"]
        others_GK = count_G[:, None] - true_GK
        parity = _largest_gap(_rates(predicted_GK, np.broadcast_to(count_G[:, None], hits_GK.shape)))
        found, mistaken = _rates(hits_GK, true_GK), _rates(predicted_GK - hits_GK, others_GK)
        odds = _largest_gap(np.concatenate([found, mistaken], 1))
    worst_group, worst_accuracy = worst(by_name)
    return Fairness(
        accuracy=by_name,
        worst_group=worst_group,
        worst_accuracy=worst_accuracy,
        demographic_parity_difference=parity,
        equalised_odds_difference=odds,
        jain=jain(by_name.values()),
    )


def jain(values: Iterable[float]) -> float:
    """Return Jain's index (sum x)^2 / (n sum x^2): 1 if all are equal, 1 / n if one has all; NaN values do not count.

    (Jain et al. 1984, DEC-TR-301.)

    >>> jain([0.8, 0.8]), jain([1.0, 0.0, 0.0, 0.0])
    (1.0, 0.25)
    """
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return math.nan
    squares = float(len(known) * (known @ known))
    return float(known.sum() ** 2 / squares) if squares else 1.0


def worst(values: Mapping[str, float], *, larger_is_better: bool = True) -> tuple[str, float]:
    """Return the group or site that fares worst and its value; ("", NaN) if none has a value.

    >>> worst({"Basel": 0.9, "Lugano": 0.7, "Zug": float("nan")})
    ('Lugano', 0.7)
    """
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return "", math.nan
    name = (min if larger_is_better else max)(known, key=lambda each: known[each])
    return name, known[name]


def _answers(samples: Rows) -> tuple[Tensor, Tensor]:
    """Return which classes or labels are predicted and which are true, as zeros and ones in float64."""
    if samples.form != CLASSES:
        return predicted_labels(samples.columns).double(), samples.target_columns.double()
    predicted_N, true_N, num_classes = as_classes(samples)
    return one_hot(predicted_N, num_classes), one_hot(true_N, num_classes)


def _outside(group_N: Tensor, num_groups: int) -> str:
    """Return the end of a sentence that names a group that is not there; empty if all are."""
    wrong = group_N[(group_N < 0) | (group_N >= num_groups)]
    return f" with group {int(wrong[0])}" if len(wrong) else ""


def _rates(part: Array, whole: Array) -> Array:
    """Divide; NaN where there is nothing to divide by."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), math.nan)


def _largest_gap(rates_GK: Array) -> float:
    """Return the largest distance between two groups, over columns in which at least two are known."""
    gaps = [column[~np.isnan(column)] for column in rates_GK.T]
    return max((float(np.ptp(known)) for known in gaps if len(known) > 1), default=math.nan)
