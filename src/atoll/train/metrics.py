"""What is measured: the metrics of a plan side by side, and how clients fare. Shapes: B samples, C clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.metric import Figures, Metric, add_up
from atoll.core.parts import Part
from atoll.core.problem import Problem
from atoll.data.targets import BINARY, CLASSIFICATION, MULTI_LABEL
from atoll.metrics.fairness_figures import Fairness, fairness, fairness_sums

Metrics = dict[str, float]
GROUPS = "groups"
"""Before this label stand the sums of groups among the parts."""
HAVE_ANSWERS = (CLASSIFICATION, BINARY, MULTI_LABEL)
"""Kinds of problems whose answers are right or wrong, sample by sample."""
RIGHT = "right"
"""The sum of right answers, by which work of a user's own may say its accuracy."""


class Measures(NamedTuple):
    """The metrics of a plan as one: the parts of all, with the sum of losses and the number of samples."""

    problem: Problem
    metrics: Mapping[str, Metric]
    groups: tuple[str, ...] = ()
    """The groups for which it is compared how well a model does."""

    def add(self, outputs: Tensor, targets: Tensor, loss_B: Tensor, group_B: np.ndarray | None = None) -> State:
        """Return the part of some samples, and of their groups if these are given."""
        scored = self.problem.scored(outputs, targets)
        parts: State = {"loss": loss_B.double().sum(), "count": torch.tensor(len(loss_B))}
        for label, metric in self.metrics.items():
            parts |= {f"{label}/{name}": value for name, value in metric.add(*scored).items()}
        if self.groups and group_B is not None:
            sums = fairness_sums(scored, torch.from_numpy(group_B).to(outputs.device), len(self.groups))
            parts |= {f"{GROUPS}/{name}": value for name, value in sums.items()}
        return parts

    def merge(self, parts: Sequence[State]) -> State:
        """Return the part of all samples from those of some, in their order."""
        whole = parts[0]
        for part in parts[1:]:
            plain = {name: value + part[name] for name, value in whole.items() if "/" not in name}
            merges = {label: metric.merge for label, metric in self._of(whole).items()} | {GROUPS: add_up}
            for label, merge in merges.items():
                merged = merge(_of(label, whole), _of(label, part))
                plain |= {f"{label}/{name}": value for name, value in merged.items()}
            whole = plain
        return whole

    def finish(self, whole: State) -> Figures:
        """Return the figures of all samples; a sum that belongs to no metric is divided by the number of samples."""
        figures: Figures = {}
        for label, metric in self._of(whole).items():
            figures |= metric.finish(_of(label, whole))
        sums = {name: value for name, value in whole.items() if "/" not in name and name != "count"}
        means = {name: float(value / whole["count"]) for name, value in sums.items()}
        means = {"accuracy": means.pop(RIGHT), **means} if RIGHT in means else means
        first, rest = dict(list(figures.items())[:1]), dict(list(figures.items())[1:])
        return {**first, **means, **rest}

    def fairness(self, whole: State) -> Fairness | None:
        """Return how unequally groups fare, if that was measured."""
        sums = _of(GROUPS, whole)
        return fairness(sums, self.groups) if sums else None

    def condense(self, whole: State) -> State:
        """Return float64 sums of one place's samples that add up over places."""
        sums = {name: value for name, value in whole.items() if "/" not in name}
        for label, metric in self._of(whole).items():
            part = _of(label, whole)
            part = part if metric.condense is None else metric.condense(part)
            sums |= {f"{label}/{name}": value for name, value in part.items()}
        return {name: value.to(torch.float64) for name, value in sums.items()}

    def finish_sums(self, sums: State) -> Figures:
        """Return the figures of condensed sums, of one place or of several added up."""
        summed = {
            label: metric._replace(finish=metric.finish_sums or metric.finish) for label, metric in self.metrics.items()
        }
        return self._replace(metrics=summed).finish(sums)

    def countable(self, sums: State) -> tuple[State, float]:
        """Return those condensed sums that are counts, and by how much one sample moves them all, as an L2 distance."""
        known = {label: metric for label, metric in self._of(sums).items() if metric.sensitivity is not None}
        kept = {name: value for name, value in sums.items() if "/" in name and name.partition("/")[0] in known}
        moves = [metric.sensitivity(_of(label, sums)) for label, metric in known.items() if metric.sensitivity]
        return kept, math.hypot(*moves)

    def why_implausible(self, sums: State, least: float, most: float) -> str:
        """Return which metric's sums no samples of such a weight can have; "" if all are plausible."""
        for label, metric in self._of(sums).items():
            if metric.plausible is not None and not metric.plausible(_of(label, sums), least, most):
                return label
        return ""

    def charts(self, whole: State) -> dict[str, Any]:
        """Return what the report draws, by the metric that it belongs to."""
        found = {label: m.chart(_of(label, whole)) for label, m in self._of(whole).items() if m.chart is not None}
        return {label: chart for label, chart in found.items() if chart}

    def main_and_loss(self, whole: State) -> tuple[float, float]:
        """Return the main figure and the mean loss; NaN for what was not measured."""
        figures = self.finish(whole)
        main = next((value for name, value in figures.items() if name != "loss"), float("nan"))
        return main, figures.get("loss", float("nan"))

    @property
    def main(self) -> str:
        """The name of the main figure."""
        label, metric = next(iter(self.metrics.items()))
        return metric.main or label

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger main figure is better."""
        return next(iter(self.metrics.values())).larger_is_better

    def _of(self, parts: State) -> dict[str, Metric]:
        """Return the metrics that have a part; work of a user's own gives sums alone."""
        labels = {name.partition("/")[0] for name in parts if "/" in name}
        return {label: metric for label, metric in self.metrics.items() if label in labels}


def _of(label: str, parts: State) -> State:
    return {name.partition("/")[2]: value for name, value in parts.items() if name.partition("/")[0] == label}


def build_measures(problem: Problem, chosen: Sequence[Part] | None, groups: tuple[str, ...] = ()) -> Measures:
    """Build the metrics that a plan names, or those of its problem; answers are compared by groups if there are any."""
    metrics: dict[str, Metric] = {}
    for part in chosen or problem.metrics:
        metric = part.build("metrics")
        if not isinstance(metric, Metric):
            raise PlanError(f"metric '{part.name}' gave {type(metric).__name__}: return an atoll.core.metric.Metric")
        label = part.name.rpartition(":")[2]
        metrics[label if label not in metrics else f"{label}-{len(metrics)}"] = metric
    return Measures(problem, metrics, groups if problem.kind in HAVE_ANSWERS else ())


def spread(main_C: np.ndarray, loss_C: np.ndarray, *, larger_is_better: bool = True) -> Metrics:
    """How unequal clients fare: mean, standard deviation and the mean of the worst tenth.

    A client for which the figure is not defined, such as a concordance without pairs, has no share in these.
    """
    known_C = main_C[~np.isnan(main_C)] if bool(np.isnan(main_C).any()) else main_C
    if not len(known_C):
        known_C = np.array([np.nan])
    tenth = max(1, len(known_C) // 10)
    ordered_C = np.sort(known_C) if larger_is_better else np.sort(known_C)[::-1]
    return {
        "num_clients": float(len(main_C)),
        "mean": float(known_C.mean()),
        "std": float(known_C.std()),
        "worst_decile": float(ordered_C[:tenth].mean()),
        "loss": float(loss_C.mean()),
    }
