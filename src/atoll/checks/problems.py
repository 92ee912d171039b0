"""Rules on what is learnt: parts that count classes go with targets that are classes."""

from __future__ import annotations

from atoll.checks.rule import Rule
from atoll.checks.views import Parts

REGRESSION = {"problem": "regression"}
COUNT_RIGHT = ("confusion", "accuracy")
"""Metrics whose figures hold the accuracy."""


def _has_no_accuracy(view: Parts) -> bool:
    named = view.plan.evaluation.metrics
    if named is not None:
        return not any(part.name in COUNT_RIGHT for part in named)
    return not view.classes and view.kind not in ("binary", "multi_label")


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="attack-has-classes",
        parts=("attack",),
        reason="{attack|an attack on labels} changes classes, and the targets are none",
        way_out="use an attack on updates or features, or a problem of classes",
        finding=lambda view: not view.classes and view.attack is not None and view.attack.needs_classes,
        refused=[{**REGRESSION, "attack": "label_flip", "attackers.num": 1}],
        mended={"attack": "feature_noise"},
    ),
    Rule(
        name="distillation-has-classes",
        parts=("algorithm",),
        reason="{algorithm|an algorithm that distils} learns the shares of classes, and the targets are none",
        way_out="use another algorithm, or a problem of classes",
        finding=lambda view: not view.classes and view.algorithm.needs_public,
        refused=[{**REGRESSION, "algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}}],
        mended={"algorithm": "fedavg", "public": None},
    ),
    Rule(
        name="contribution-is-measured",
        parts=("contribution",),
        reason="contribution by accuracy needs classes, and the targets are none",
        way_out='set contribution.utility = "loss"',
        finding=lambda view: (
            not view.classes and view.contribution is not None and view.contribution.utility == "accuracy"
        ),
        refused=[
            {**REGRESSION, "contribution": {"name": "leave_one_out", "utility": "accuracy"}, "server.samples": 20}
        ],
        mended={"contribution": {"name": "leave_one_out", "utility": "loss"}},
    ),
    Rule(
        name="accuracy-is-measured",
        parts=("stop.accuracy",),
        reason="stop.accuracy would never be reached, since no accuracy is measured",
        way_out="leave stop.accuracy out, or name accuracy among evaluation.metrics",
        finding=_has_no_accuracy,
        refused=[{**REGRESSION, "stop.accuracy": 0.9}],
        mended={"stop.accuracy": None},
    ),
)
