"""Audit of a private plan: measure how well canaries are detected in what the plan's own mechanism releases.

Where clients are protected, every client is a canary: it sends a vector with one non-zero entry, a thousand clips long,
with a thousand times the usual weight. A coin decides whether it takes part. No client trains, because the guarantee
must not depend on the updates of others. Each trial is one round of the plan, with its own coordinator, sampler,
mechanism and guard, and a fresh secret. The audit looks at what the mechanism releases: the sum, or each client's
update if clients add their own noise. Where samples are protected, they are the canaries: see `audit_samples`.

The auditor knows the cohort, which an adversary does not: the audit tests the Gaussian of a round and the sampling
rate, from which the accountant computes epsilon. Shapes: C clients of a group, D parameters, M canaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import guarded, protection
from atoll.commit.parts import RunParts
from atoll.core.algorithm import ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure, Mechanism, SendContext
from atoll.core.transform import chain
from atoll.engine.base import InProcess
from atoll.privacy.accounting import spent
from atoll.privacy.auditing import (
    Counts,
    count_detections,
    detectable_share,
    mu_lower_bound,
    num_canaries_for,
    rate_upper_bound,
)
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import coins, fresh_secret
from atoll.simulation.audit_samples import LOUD, Trial, sample_trials
from atoll.simulation.driver import Simulation
from atoll.train.build import build_job
from atoll.train.exchange import Work
from atoll.train.federation import build_federation
from atoll.train.job import Job, empty_update
from atoll.train.trainer import Trainer

HALF = Fraction(1, 2)
GROUP = 64
"""Number of clients whose canaries are computed together."""
MAX_TRIALS = 1 << 14


class Claim(NamedTuple):
    """The privacy that a mechanism claims for one round."""

    mu: float
    """Gaussian privacy of a client, or sample, that is drawn."""
    rate: float
    """Probability to be drawn; 1 if the mechanism claims no amplification by sampling."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Measured lower bounds, and the claims that they are compared with."""

    counts: Counts
    claim: Claim
    mu: float
    """Lower bound on the mu of a round, for a client, or sample, that is drawn."""
    rate: float
    """Lower bound on the probability to be drawn."""
    epsilon: float
    """Epsilon of all rounds of the plan that follows from both bounds."""
    claimed: float
    """Epsilon of all rounds of the plan by the accountant."""
    delta: float
    rounds: int
    detects: float
    """Share of the claimed noise below which the audit would have failed, with probability CHANCE."""
    confidence: float

    @property
    def passed(self) -> bool:
        """Whether both lower bounds are within the claim."""
        return self.mu <= self.claim.mu and self.rate <= self.claim.rate


class CanaryTrainer(Trainer):
    """A trainer that sends canaries instead of training, and records the cohort."""

    def __init__(self, job: Job, inside_C: np.ndarray, entry_C: np.ndarray) -> None:
        super().__init__(job)
        self.stack, self.inside_C, self.entry_C = GROUP, inside_C, entry_C
        self.layout = empty_update(job)
        self.asked: list[int] = []

    def train(self, tasks: list[Task], sent: Mapping[int, Broadcast], states: Mapping[int, State]) -> Work:
        """Return the canary of each client that takes part, and zeros for the others."""
        assert self.job.mechanism is not None
        self.asked += [task.client for task in tasks]
        num, layout = len(tasks), self.layout
        delta_CD = layout.delta_D.new_zeros(num, *layout.delta_D.shape[1:])
        for row, task in enumerate(tasks):
            if self.inside_C[task.client]:
                delta_CD[row, self.entry_C[task.client]] = LOUD * self.job.mechanism.clip
        aux = {name: value.new_zeros(num, *value.shape[1:]) for name, value in layout.aux.items()}
        updates = Update(delta_CD, layout.weight.new_full((num,), LOUD), aux)
        broadcasts = [sent[task.version] for task in tasks]
        empty_states: list[State] = [{} for _ in tasks]
        return self._send(tasks, broadcasts, empty_states, updates, [0.0] * num, [{} for _ in tasks])


def audit_plan(plan: Plan, num_canaries: int | None = None, confidence: float = 0.999) -> Audit:
    """Audit the mechanism of a plan: compare how well canaries are detected with the privacy that it claims.

    By default there are as many canaries as it takes to detect noise of half the claimed size.
    """
    plan = plan.replace({"evaluation.every": 0, "stop": {}, "secagg": None})  # masks do not change the sum
    federation = build_federation(plan)
    job = build_job(plan, federation)
    mechanism, exposure = protection(job)
    job = replace(job, attack=None, uplink=chain())  # the guarantee must not rest on what clients or codecs do
    if mechanism.steps is not None and mechanism.steps.share:
        raise PlanError(
            "an audit needs a mechanism that hides single samples or clients, which proportional does not claim: "
            'set privacy.name = "sample" to audit private steps'
        )
    rounds = max(1, plan.rounds)
    accounted = spent(mechanism, exposure._replace(attempts=rounds))
    if accounted.largest is not None:
        largest = accounted.largest
        exposure = exposure._replace(sample_rate=largest.rate, steps=largest.steps, groups=(largest,))
    claim, seen = claim_of(mechanism, exposure), seen_of(plan, job)
    trials = client_trials(plan, job, seen) if mechanism.unit == "client" else sample_trials(plan, job, exposure)
    if num_canaries is None:
        num_canaries = num_canaries_for(claim.mu, 0.5, 1.0, confidence, seen)
    total = Trial(counts=Counts(), drawn=0, drawable=0)
    for _, trial in zip(range(MAX_TRIALS), trials, strict=False):
        total = total.plus(trial)
        if total.counts.inside >= num_canaries:
            break
    counts = total.counts
    mu = mu_lower_bound(counts, confidence)
    rate = 1 - rate_upper_bound(total.drawable - total.drawn, total.drawable, confidence) if claim.rate < 1 else 0.0
    measured = mechanism._replace(event=lambda exposure: rescaled(mechanism.event(exposure), claim, mu, rate))
    return Audit(
        counts=counts,
        claim=claim,
        mu=mu,
        rate=rate,
        epsilon=spent(measured, exposure._replace(attempts=rounds)).epsilon if mu > 0 else 0.0,
        claimed=accounted.epsilon,
        delta=mechanism.delta,
        rounds=rounds,
        detects=detectable_share(claim.mu, counts.inside, counts.outside, confidence, seen),
        confidence=confidence,
    )


def claim_of(mechanism: Mechanism, exposure: Exposure) -> Claim:
    """Return the claim of a mechanism for one round, from the event that it gives to the accountant."""
    import dp_accounting as dp

    event, rate = mechanism.event(exposure._replace(attempts=1, steps=1)), 1.0
    while not isinstance(event, dp.GaussianDpEvent | dp.SingleEpochTreeAggregationDpEvent):
        match event:
            case dp.SelfComposedDpEvent(event=inner, count=1):
                event = inner
            case dp.ComposedDpEvent(events=[inner]):
                event = inner
            case dp.PoissonSampledDpEvent(sampling_probability=probability, event=inner):
                event, rate = inner, probability
            case _:
                raise PlanError(
                    f"an audit needs rounds that release one Gaussian, but this plan's event is {event}: use a "
                    "mechanism of Atoll, or one with such an event"
                )
    return Claim(1 / event.noise_multiplier, rate)


def rescaled(event: Any, claim: Claim, mu: float, rate: float) -> Any:
    """Return the event with the noise of `mu` instead of the claimed one, and with `rate` where that is larger."""
    import dp_accounting as dp

    match event:
        case dp.SelfComposedDpEvent():
            return dp.SelfComposedDpEvent(rescaled(event.event, claim, mu, rate), event.count)
        case dp.ComposedDpEvent():
            return dp.ComposedDpEvent([rescaled(inner, claim, mu, rate) for inner in event.events])
        case dp.PoissonSampledDpEvent():
            inner = rescaled(event.event, claim, mu, rate)
            return dp.PoissonSampledDpEvent(max(rate, event.sampling_probability), inner)
        case dp.SingleEpochTreeAggregationDpEvent():
            return dp.SingleEpochTreeAggregationDpEvent(event.noise_multiplier * claim.mu / mu, event.step_counts)
        case _:
            return dp.GaussianDpEvent(event.noise_multiplier * claim.mu / mu)


def seen_of(plan: Plan, job: Job) -> float:
    """Return the share of a clip by which a canary moves the sum: 1, or 1 / sqrt(L) if L layers are clipped apart."""
    assert plan.privacy is not None
    return 1 / math.sqrt(len(job.spec.slots)) if plan.privacy.options.get("per_layer") else 1.0


def client_trials(plan: Plan, job: Job, seen: float) -> Iterator[Trial]:
    """Run rounds of a plan whose clients are canaries, and yield the result of each."""
    plan = plan.replace({"rounds": 1})
    if plan.privacy is not None and plan.privacy.options.get("epsilon") is not None:
        plan = plan.replace({"privacy.epsilon": None})
    while True:
        yield _one_round(plan, job, seen)


def _one_round(plan: Plan, job: Job, seen: float) -> Trial:
    """Run one round with canaries, and count the detected ones in what it releases."""
    sums: list[Tensor] = []
    sent: list[Tensor] = []

    def record_sum(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        sums.append(aggregate.delta_D)
        return params_D, server

    mechanism, num_clients = job.mechanism, job.federation.num_clients
    assert mechanism is not None
    job = replace(job, secret=fresh_secret(), algorithm=job.algorithm._replace(server_step=record_sum))
    if mechanism.at_client is not None:
        job = replace(job, mechanism=mechanism._replace(at_client=_recording(mechanism.at_client, sent)))
    job, coordinator, guard = guarded(plan, job, build_coordinator(plan, job.federation), Ledger(job.secret))
    num = min(num_clients, job.spec.num_params)
    entry_C = np.resize(np.linspace(0, job.spec.num_params - 1, num).astype(int), num_clients)
    inside_C = np.zeros(num_clients, dtype=bool)
    inside_C[:num] = coins(fresh_secret(), HALF, num)
    trainer = CanaryTrainer(job, inside_C, entry_C)
    engine = InProcess(job, trainer)
    try:
        parts = RunParts(plan=plan, job=job, coordinator=coordinator, guard=guard, engine=engine)
        for _ in Simulation(parts).rounds():
            pass
    finally:
        engine.close()
    asked, counts = np.array(trainer.asked, dtype=int), Counts()
    if mechanism.at_client is None:
        expected = guard.exposure(1).rate * num_clients
        counts = count_detections(sums[0] * (expected / mechanism.clip), entry_C[asked[inside_C[asked]]], seen)
    else:
        for row_D, client in zip(torch.cat(sent), asked.tolist(), strict=True):
            counts += count_detections(row_D / mechanism.clip, entry_C[[client] if inside_C[client] else []])
    return Trial(counts=counts, drawn=len(asked), drawable=num_clients)


def _recording(
    at_client: Callable[[Update, SendContext], Update], sent: list[Tensor]
) -> Callable[[Update, SendContext], Update]:
    """Wrap `at_client` so that the updates that leave the clients are appended to `sent`."""

    def recorded(update: Update, context: SendContext) -> Update:
        noisy = at_client(update, context)
        sent.append(noisy.delta_D)
        return noisy

    return recorded
