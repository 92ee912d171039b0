"""The forms in which metrics take scores and targets. Shapes: N samples, K classes, L labels or outputs.

A member names the forms that it takes in `TAKES` beside it, so that a refusal can name the metrics that fit.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.parts import members

CLASSES, BINARY, LABELS, NUMBERS, RISKS = "classes", "binary", "labels", "numbers", "risks"
IN_WORDS = {
    CLASSES: "(N, K) logits with (N,) classes",
    BINARY: "(N,) logits with (N,) zeros and ones",
    LABELS: "(N, L) logits with (N, L) zeros and ones",
    NUMBERS: "numbers with numbers of the same shape, (N,) or (N, L)",
    RISKS: "(N,) risks with (N, 2) times and events",
}
"""Form -> what it is, in error texts and docs."""


class Rows(NamedTuple):
    """Samples of one form, without those of weight 0."""

    form: str
    scores: Tensor
    targets: Tensor
    weight_N: Tensor
    """float64."""

    @property
    def columns(self) -> Tensor:
        """The scores as (N, L), L = 1 for one number a sample."""
        return as_columns(self.scores)

    @property
    def target_columns(self) -> Tensor:
        """The targets as (N, L)."""
        return as_columns(self.targets)


def as_columns(values: Tensor) -> Tensor:
    """Return (N,) as (N, 1), and (N, L) as it is."""
    return values[:, None] if values.dim() == 1 else values


def rows(name: str, takes: tuple[str, ...], scores: Tensor, targets: Tensor, weight_N: Tensor) -> Rows:
    """Return the samples that count, in the form that a metric takes; PlanError if it takes no such form.

    >>> import torch
    >>> rows("top_k", (CLASSES,), torch.zeros(3), torch.zeros(3, 2), torch.ones(3))
    Traceback (most recent call last):
    atoll.core.errors.PlanError: top_k takes (N, K) logits with (N,) classes: got scores of shape (3,) with float32 \
targets of shape (3, 2); choose one of concordance, kaplan_meier
    """
    possible = possible_forms(scores, targets)
    form = next((each for each in takes if each in possible), "")
    if not form or weight_N.shape != (len(scores),):
        raise PlanError(
            f"{name} takes {' or '.join(IN_WORDS[each] for each in takes)}: got scores of shape {tuple(scores.shape)} "
            f"with {str(targets.dtype).removeprefix('torch.')} targets of shape {tuple(targets.shape)}; "
            f"{_advice(possible, weight_N)}"
        )
    scores, weight_N = scores.detach(), weight_N.detach()
    counts_N = weight_N != 0
    if not bool(counts_N.all()):
        scores, targets, weight_N = scores[counts_N], targets[counts_N], weight_N[counts_N]
    _check_values(name, form, scores, targets)
    return Rows(form, scores, targets, weight_N.double())


def possible_forms(scores: Tensor, targets: Tensor) -> tuple[str, ...]:
    """Return the forms that scores and targets can be by their shapes and types."""
    if len(scores.shape) not in (1, 2) or scores.shape[:1] != targets.shape[:1]:
        return ()
    if scores.shape == targets.shape:
        return (BINARY, NUMBERS) if scores.dim() == 1 else (LABELS, NUMBERS)
    if scores.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
        return (CLASSES,)
    return (RISKS,) if scores.dim() == 1 and targets.shape[1:] == (2,) else ()


def _advice(possible: tuple[str, ...], weight_N: Tensor) -> str:
    fitting = [name for name in members("metrics") if set(possible) & set(_takes(name))]
    if fitting:
        return f"choose one of {', '.join(fitting)}"
    return f"no metric takes these with {tuple(weight_N.shape)} weights: let `scored` of the problem reshape them"


def _takes(name: str) -> tuple[str, ...]:
    return getattr(importlib.import_module(f"atoll.metrics.{name}"), "TAKES", ())


def _check_values(name: str, form: str, scores: Tensor, targets: Tensor) -> None:
    """Refuse classes that the scores have no column for, and other values than 0 and 1 where only these make sense."""
    if form == CLASSES and len(targets):
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= scores.shape[1]:
            raise PlanError(
                f"{name}: classes must be in 0..{scores.shape[1] - 1}, as there are {scores.shape[1]} scores a sample: "
                f"got {low if low < 0 else high}; give weight 0 to what does not count, or the model more outputs"
            )
    if form in (CLASSES, NUMBERS):
        return
    switches = targets[:, 1] if form == RISKS else targets
    wrong = switches[(switches != 0) & (switches != 1)]
    if len(wrong):
        what = "events" if form == RISKS else "targets"
        raise PlanError(
            f"{name}: {what} must be 0 or 1: got {float(wrong[0]):g}; recode them, or choose a metric of "
            "numbers such as mae, rmse or r2"
        )
