"""An audit of a private plan: canaries try to be seen in what its own mechanism releases.

Where clients are protected, every client is a canary: it sends a Dirac, a thousand clips long, in an entry of its own,
with a thousand times the weight of others. A coin says whether it is in. Nobody trains, since what others do is nothing
that protects. Each try is one round of the plan, with its own coordinator, sampler, mechanism and guard, and a fresh
secret. What is looked at is what the mechanism lets out: the sum, or what each client sends if it trusts nobody. Where
samples are protected, they are the canaries: see `audit_samples`.

The auditor knows who was asked, which no adversary does: what is tested is the Gaussian of a round, and how often it is
drawn, from which the accountant makes epsilon. Shapes: C clients of a group, D parameters, M canaries.
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
from atoll.commit.guard import guarded, private_parts
from atoll.commit.parts import RunParts
from atoll.core.algorithm import ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure, Mechanism, Sent
from atoll.core.transform import chain
from atoll.engine.base import InProcess
from atoll.privacy.accounting import spent
from atoll.privacy.auditing import Counts, canaries_for, count_seen, detectable, least_mu, most_likely
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import coins, fresh_secret
from atoll.simulation.audit_samples import LOUD, Try, sample_tries
from atoll.simulation.driver import Simulation
from atoll.train.exchange import Work
from atoll.train.federation import build_federation
from atoll.train.job import Job, build_job
from atoll.train.layout import empty_update
from atoll.train.trainer import Trainer

HALF = Fraction(1, 2)
GROUP = 64
MOST_TRIES = 1 << 14


class Claim(NamedTuple):
    """What a mechanism says of one round."""

    mu: float
    """Its Gaussian privacy, for those who are drawn."""
    rate: float
    """The chance to be drawn; 1 if nothing is made of it."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit has found, and what was claimed."""

    counts: Counts
    claim: Claim
    mu: float
    """What a round gives away at least of those who are drawn."""
    rate: float
    """How often they are drawn at least."""
    epsilon: float
    """What all rounds of the plan then spend at least."""
    claimed: float
    """What they are said to spend at most."""
    delta: float
    rounds: int
    detects: float
    """Noise below this share of the claimed would have been found out, with a probability of CHANCE."""
    confidence: float

    @property
    def passed(self) -> bool:
        """Whether what was found is within what is claimed."""
        return self.mu <= self.claim.mu and self.rate <= self.claim.rate


class CanaryTrainer(Trainer):
    """Sends canaries instead of training, and knows who was asked."""

    def __init__(self, job: Job, inside_C: np.ndarray, entry_C: np.ndarray) -> None:
        super().__init__(job)
        self.stack, self.inside_C, self.entry_C = GROUP, inside_C, entry_C
        self.layout = empty_update(job)
        self.asked: list[int] = []

    def train(self, tasks: list[Task], sent: Mapping[int, Broadcast], states: Mapping[int, State]) -> Work:
        """Let canaries that are in send their Dirac; those that are out send zeros, which count for nothing."""
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
        blank: list[State] = [{} for _ in tasks]
        return self._send(tasks, broadcasts, blank, updates, [0.0] * num, [{} for _ in tasks])


def audit_plan(plan: Plan, num_canaries: int | None = None, confidence: float = 0.999) -> Audit:
    """Put the mechanism of a plan to the test: what can be told of canaries, against what is claimed.

    Without a number there are as many canaries as it takes to find out noise of half the claimed size.
    """
    plan = plan.replace({"evaluation.every": 0, "stop": {}, "secagg": None})  # masks change nothing of a sum
    federation = build_federation(plan)
    job, coordinator = build_job(plan, federation), build_coordinator(plan, federation)
    mechanism, exposure = private_parts(plan, job, coordinator)
    job = replace(job, attack=None, uplink=chain())  # what clients and codecs do is nothing that protects
    if mechanism.steps is not None and mechanism.steps.share:
        raise PlanError("an audit looks for one who is hidden, but proportional claims to hide nobody: audit sample")
    whole = spent(mechanism, exposure._replace(attempts=max(1, plan.rounds)))
    if whole.largest is not None:
        exposure = exposure._replace(sample_rate=whole.largest.rate, steps=whole.largest.steps, groups=(whole.largest,))
    claim, seen = claim_of(mechanism, exposure), seen_of(plan, job)
    tries = client_tries(plan, job, seen) if mechanism.unit == "client" else sample_tries(plan, job, exposure)
    if num_canaries is None:
        num_canaries = canaries_for(claim.mu, 0.5, 1.0, confidence, seen)
    total = Try(counts=Counts(), drawn=0, drawable=0)
    for _, one in zip(range(MOST_TRIES), tries, strict=False):
        total = total.with_more(one)
        if total.counts.inside >= num_canaries:
            break
    counts = total.counts
    mu = least_mu(counts, confidence)
    rate = 1 - most_likely(total.drawable - total.drawn, total.drawable, confidence) if claim.rate < 1 else 0.0
    found = mechanism._replace(event=lambda exposure: rescaled(mechanism.event(exposure), claim, mu, rate))
    rounds = max(1, plan.rounds)
    return Audit(
        counts=counts,
        claim=claim,
        mu=mu,
        rate=rate,
        epsilon=spent(found, exposure._replace(attempts=rounds)).epsilon if mu > 0 else 0.0,
        claimed=whole.epsilon,
        delta=mechanism.delta,
        rounds=rounds,
        detects=detectable(claim.mu, counts.inside, counts.outside, confidence, seen),
        confidence=confidence,
    )


def claim_of(mechanism: Mechanism, exposure: Exposure) -> Claim:
    """What a mechanism claims of one round, by the event that it gives to the accountant."""
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
                raise PlanError(f"an audit knows rounds of one Gaussian, but this plan's is {event}")
    return Claim(1 / event.noise_multiplier, rate)


def rescaled(event: Any, claim: Claim, mu: float, rate: float) -> Any:
    """The event with the noise of another mu, and drawn as often as was found, where that is more."""
    import dp_accounting as dp

    match event:
        case dp.SelfComposedDpEvent():
            return dp.SelfComposedDpEvent(rescaled(event.event, claim, mu, rate), event.count)
        case dp.ComposedDpEvent():
            return dp.ComposedDpEvent([rescaled(each, claim, mu, rate) for each in event.events])
        case dp.PoissonSampledDpEvent():
            inner = rescaled(event.event, claim, mu, rate)
            return dp.PoissonSampledDpEvent(max(rate, event.sampling_probability), inner)
        case dp.SingleEpochTreeAggregationDpEvent():
            return dp.SingleEpochTreeAggregationDpEvent(event.noise_multiplier * claim.mu / mu, event.step_counts)
        case _:
            return dp.GaussianDpEvent(event.noise_multiplier * claim.mu / mu)


def seen_of(plan: Plan, job: Job) -> float:
    """How much of its length a canary shows: all, or one of L layers' share where each is clipped by itself."""
    assert plan.privacy is not None
    return 1 / math.sqrt(len(job.spec.slots)) if plan.privacy.options.get("per_layer") else 1.0


def client_tries(plan: Plan, job: Job, seen: float) -> Iterator[Try]:
    """Rounds of a plan whose clients are canaries, one after another."""
    plan = plan.replace({"rounds": 1})
    if plan.privacy is not None and plan.privacy.options.get("epsilon") is not None:
        plan = plan.replace({"privacy.epsilon": None})
    while True:
        yield _one_round(plan, job, seen)


def _one_round(plan: Plan, job: Job, seen: float) -> Try:
    """Let canaries take part in one round, and look for them in what comes out of it."""
    sums: list[Tensor] = []
    sent: list[Tensor] = []

    def watch(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        sums.append(aggregate.delta_D)
        return params_D, server

    mechanism, num_clients = job.mechanism, job.federation.num_clients
    assert mechanism is not None
    job = replace(job, secret=fresh_secret(), algorithm=job.algorithm._replace(server_step=watch))
    if mechanism.at_client is not None:
        job = replace(job, mechanism=mechanism._replace(at_client=_overheard(mechanism.at_client, sent)))
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
        counts = count_seen(sums[0] * (expected / mechanism.clip), entry_C[asked[inside_C[asked]]], seen)
    else:
        for row_D, client in zip(torch.cat(sent), asked.tolist(), strict=True):
            counts += count_seen(row_D / mechanism.clip, entry_C[[client] if inside_C[client] else []])
    return Try(counts=counts, drawn=len(asked), drawable=num_clients)


def _overheard(at_client: Callable[[Update, Sent], Update], heard: list[Tensor]) -> Callable[[Update, Sent], Update]:
    """Note what leaves clients that trust nobody."""

    def noted(update: Update, sent: Sent) -> Update:
        found = at_client(update, sent)
        heard.append(found.delta_D)
        return found

    return noted
