"""Measures of how the clients of a plan differ, and their text. Shapes: C clients, K classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.data.heterogeneity import earth_movers_distance, js_divergence, label_counts, weighted_mean
from atoll.train.build import build_job
from atoll.train.losses.cross_entropy import plain_cross_entropy
from atoll.train.measure import (
    Array,
    Dissimilarity,
    Drift,
    Gamma,
    Progress,
    dissimilarity,
    drift,
    first_order,
    gamma,
    is_convex,
    ratio,
    silent,
)

STEPS = 5
"""Number of full gradient steps of each client for its drift."""
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Step sizes for the drift, as shares of the plan's own."""
DRIFT_TITLES = ("step size", "measured", "predicted", "between clients", "missed by prediction", "measured / gradient")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Result of `measure_plan`, at the first parameters of a plan."""

    title: str
    num_clients: int
    """Number of all clients."""
    clients: list[int]
    """The measured clients: all, or a sample."""
    num_samples: int
    """Number of training samples of the measured clients."""
    num_bytes: int
    """Size of the parameters, in bytes."""
    loss_unit: str
    counts_CK: Array
    """Numbers of samples of the measured clients, by class."""
    dissimilarity: Dissimilarity
    gamma: Gamma
    drifts: tuple[Drift, ...]
    """One drift for each step size, the plan's own last."""


def measure_plan(plan: Plan, *, clients: int = 100, budget: int = 500, progress: Progress = silent) -> Measures:
    """Measure how far the clients of a plan differ in labels, and in gradients at the model's first parameters.

    Of more than `clients` clients that many are drawn by the seed. `budget` is the maximum number of L-BFGS steps for
    one minimum.
    """
    if clients < 1 or budget < 1:
        raise PlanError(f"clients and budget must be at least 1, got {clients} and {budget}: raise them")
    job = build_job(plan)
    if not job.shares_model:
        raise PlanError(
            f"clients are measured by one shared model, and {plan.algorithm.name} has none: set algorithm to fedavg"
        )
    federation, dataset, first_D = job.federation, job.federation.dataset, job.first_D
    if not dataset.has_classes:
        raise PlanError(f"clients are compared by their labels, and the targets of {dataset.name} are no classes")
    chosen = _chosen(plan.seed, federation.num_clients, clients)
    first = first_order(job, first_D, chosen, progress)
    return Measures(
        title=f"{dataset.name} by {plan.partition.name}, {plan.model.name} ({job.spec.num_trainable:,} parameters)",
        num_clients=federation.num_clients,
        clients=chosen,
        num_samples=sum(federation.num_samples(client) for client in chosen),
        num_bytes=first_D.nbytes,
        loss_unit="nats" if job.loss is plain_cross_entropy else "units of the loss",
        counts_CK=label_counts(federation.partition, dataset.train_y, dataset.num_classes, chosen),
        dissimilarity=dissimilarity(job, first_D, chosen, progress),
        gamma=gamma(job, first_D, chosen, convex=is_convex(job), budget=budget, progress=progress),
        drifts=tuple(
            drift(job, first_D, chosen, first, lr=factor * job.lr_of(0), steps=STEPS, progress=progress)
            for factor in FACTORS
        ),
    )


def _chosen(seed: int, num_clients: int, most: int) -> list[int]:
    if num_clients <= most:
        return list(range(num_clients))
    sample: list[int] = generator(seed, "measured clients").choice(num_clients, size=most, replace=False).tolist()
    return sorted(sample)


def as_text(measures: Measures) -> str:
    """Return the measures as lines of text, each number with its unit."""
    C, total = len(measures.clients), measures.num_clients
    clients = f"all {C:,} clients" if total == C else f"{C:,} of {total:,} clients, by seed,"
    return "\n".join(
        [
            f"{measures.title}, at its first parameters",
            f"{clients} with {measures.num_samples:,} training samples; parameters have no unit",
            "",
            *_aligned(_rows(measures), "<><"),
            "",
            _trust(measures.gamma),
            "",
            f"Drift: the bias of the mean of {STEPS} full gradient steps of each client against the gradient of F.",
            f"Measured, predicted and between clients are norms in {measures.loss_unit}; the step size has no unit.",
            "",
            *_aligned([DRIFT_TITLES, *(_drift_row(drift) for drift in measures.drifts)], ">>>>>>"),
        ]
    )


def _rows(measures: Measures) -> list[tuple[str, ...]]:
    gradients, gamma, unit, counts_CK = measures.dissimilarity, measures.gamma, measures.loss_unit, measures.counts_CK
    js, emd = (weighted_mean(rule(counts_CK), counts_CK) for rule in (js_divergence, earth_movers_distance))
    solved = f"{gamma.num_solved:,} of {gamma.num_solves:,}"
    return [
        ("measure", "value", "unit"),
        ("labels, Jensen-Shannon divergence (0 to 1), mean", f"{js:.4g}", "bits"),
        ("labels, earth mover's distance (0 to 2), mean", f"{emd:.4g}", "none"),
        ("loss F, mean over the samples", f"{gradients.loss:.4g}", unit),
        ("gradient norm of F", f"{gradients.norm:.4g}", unit),
        ("gradient norm of a client, median", f"{np.median(gradients.norm_C):.4g}", unit),
        ("dissimilarity B (1 where gradients agree)", f"{gradients.b:.4g}", "none"),
        (f"gradient diversity ({1 / len(counts_CK):.3g} where they agree)", f"{gradients.diversity:.4g}", "none"),
        (f"Gamma, {gamma.kind}", f"{gamma.value:.4g}", unit),
        ("largest gradient norm left at a minimum", f"{gamma.norm:.2g}", unit),
        (f"minima whose gradient norm is at most {gamma.tolerance:g} {unit}", solved, "minima"),
    ]


def _drift_row(drift: Drift) -> tuple[str, ...]:
    norms = (f"{value:.4g}" for value in (drift.lr, drift.measured, drift.predicted, drift.between))
    return (*norms, f"{100 * drift.gap:.3g} %", f"{100 * ratio(drift.measured, drift.gradient):.3g} %")


def _aligned(rows: Sequence[tuple[str, ...]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in rows]


def _trust(gamma: Gamma) -> str:
    """Return how reliable Gamma is, and why."""
    if gamma.kind == "solved":
        return (
            "Gamma is solved: the loss is convex and every solve met the tolerance. Where no minimum exists, as for\n"
            "data that can be separated or a client that lacks a class, the infimum was approached from above."
        )
    why = "the budget ended first, so raise it" if gamma.convex else "the loss is not known to be convex"
    return (
        f"Gamma is an estimate and no bound: {why}; {gamma.num_solved} of {gamma.num_solves} solves met the tolerance."
    )
