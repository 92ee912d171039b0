"""The guard of a private run: it refuses what cannot be private, charges every attempt, and tells the price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from atoll.commit.coordinator import build_coordinator
from atoll.commit.server_step import aggregated
from atoll.core.coordinator import Coordinator, CoordinatorState
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import Aggregate, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.privacy import IN_TURN, RELATION, Exposure, Mechanism, Release
from atoll.core.sampler import Pick, Population, Sampler
from atoll.core.secagg import Secagg
from atoll.privacy.accounting import Spent, spent
from atoll.privacy.draws import secret_generator
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import derived
from atoll.train.exchange import sent_by
from atoll.train.federation import build_federation
from atoll.train.job import Job, build_job, exposed
from atoll.train.layout import empty_update
from atoll.train.trainer import fold_of

ALWAYS = ("round", "round_seconds", "seconds", "test")
"""What is told of a round whatever protects it: the model that was released, on the central test set, and time."""
COUNTS = ("clients", "bytes_up", "bytes_down", "failed", "rejected", "abandoned")
"""What is told if who takes part is no secret."""
NOT_PRIVATE = "NOT PRIVATE: noise from the plan's seed"
NO_PRIVACY = (
    "the plan has no privacy: set it, e.g. with --set sampler=poisson "
    "--set 'privacy={name=\"central\", clip=0.5, sigma=1.0, delta=1e-5}'"
)


class Guard:
    """What a driver asks in a private run; make one with `guarded`."""

    def __init__(self, job: Job, mechanism: Mechanism, exposure: Exposure, ledger: Ledger) -> None:
        self.job, self.mechanism, self.ledger = job, mechanism, ledger
        self._exposure = exposure

    def exposure(self, attempts: int) -> Exposure:
        """What so many attempts expose."""
        return self._exposure._replace(attempts=attempts)

    def spent(self, attempts: int) -> Spent:
        """What so many attempts cost."""
        return spent(self.mechanism, self.exposure(attempts))

    def allows(self, attempt: int) -> bool:
        """Whether the budget pays for this attempt too."""
        return self.mechanism.epsilon is None or self.spent(attempt + 1).epsilon <= self.mechanism.epsilon

    def init(self) -> State:
        """What is remembered from round to round in place of the rule's memory."""
        return self.mechanism.init() if self.mechanism.release is not None else self.job.aggregator.init()

    def rng(self, purpose: str, attempt: int) -> np.random.Generator:
        """What is drawn from where nobody may foresee it: who is asked, and what becomes of them."""
        return secret_generator(derived(self.job.secret, purpose, attempt))

    def orders(self, tasks: list[Task], memory: State) -> list[Task]:
        """The tasks with the clip of this round, where it changes."""
        if self.mechanism.clip_of is None:
            return tasks
        return [task._replace(clip=self.mechanism.clip_of(memory)) for task in tasks]

    def charge(self, attempt: int) -> None:
        """Charge an attempt of which something is seen whatever becomes of it, or nothing ever."""
        self.ledger.charge(attempt)

    @property
    def trusts_nobody(self) -> bool:
        """Whether clients protect themselves, so that what they send counts as released."""
        return self.mechanism.at_client is not None or self.mechanism.steps is not None

    @property
    def seals_updates(self) -> bool:
        """Whether records may not name updates: the server sees them before anything protects them.

        A hash of an update, or how many samples it is of, would tell others what the noise is to hide.
        """
        return self.mechanism.hides_cohort or (self.mechanism.on_grid is not None and self.job.secure is None)

    def aggregated(self, folded: State, memory: State, attempt: int, own: Update | None) -> tuple[Aggregate, State]:
        """Charge an attempt, and make of its updates what may be seen."""
        if self.mechanism.release is None:
            self.ledger.charge(attempt, _parts(folded))
            return aggregated(self.job, folded, memory, own)
        if not folded:
            assert self.mechanism.on_grid is not None
            nobody = self.mechanism.on_grid(empty_update(self.job), sent_by(self.job, [Task(0, 0, attempt)]))
            folded = fold_of(self.job).add({}, nobody)
        self.ledger.charge(attempt, _parts(folded))
        order = Release(self.exposure(attempt + 1), self.job.secret, self.job.spec.dtype)
        return self.mechanism.release(folded, memory, order)

    def public_row(self, row: Mapping[str, Any], attempts: int) -> dict[str, Any]:
        """What may be told of a round, and what has been spent."""
        known = ALWAYS if self.mechanism.hides_cohort else ALWAYS + COUNTS
        cost = self.spent(attempts)
        price: dict[str, Any] = {
            "epsilon": _upwards(cost.epsilon),
            "delta": cost.delta,
            "unit": cost.unit,
            "relation": RELATION,
            "accountant": cost.accountant,
        }
        if cost.largest is not None and len(self._exposure.groups) > 1:
            price["client"] = cost.largest.client
        if self.mechanism.test_noise:
            price["warning"] = NOT_PRIVATE
        return {**{name: row[name] for name in known if name in row}, "privacy": price}

    def statement(self) -> dict[str, Any]:
        """What the guarantee means, as plain data for the run's description, and how to know its ledger again."""
        return {**statement_of(self.mechanism), "ledger": self.ledger.fingerprint}


def statement_of(mechanism: Mechanism) -> dict[str, Any]:
    """What the guarantee of a mechanism means, as plain data."""
    return {
        "unit": mechanism.unit,
        "relation": RELATION,
        "neighbours": mechanism.neighbours,
        "delta": mechanism.delta,
        "budget": mechanism.epsilon,
        "assumptions": list(mechanism.assumptions),
        **({"warning": NOT_PRIVATE} if mechanism.test_noise else {}),
    }


def guarded(plan: Plan, job: Job, coordinator: Coordinator, ledger: Ledger) -> tuple[Job, Coordinator, Guard]:
    """Make a run private: its job, its coordinator and its guard; what cannot be private is refused."""
    mechanism, exposure = private_parts(plan, job, coordinator)
    policy = coordinator.policy
    if mechanism.min_reports is not None:
        policy = policy._replace(min_reports=mechanism.min_reports(policy.goal(coordinator.num_clients)))
    job = replace(job, exposure=exposure)
    guard = Guard(job, mechanism, exposure, ledger)
    sampler = in_strict_turn() if coordinator.sampler.scheme == IN_TURN else coordinator.sampler
    coordinator = replace(
        coordinator, policy=policy, sampler=sampler, secret_rng=lambda attempt: guard.rng("cohort", attempt)
    )
    if not guard.allows(0):
        raise PlanError(
            f"privacy.epsilon of {mechanism.epsilon} does not pay for one round, which takes "
            f"{_upwards(guard.spent(1).epsilon):g}: raise it or privacy.sigma, or ask a smaller share of the clients"
        )
    return job, coordinator, guard


def in_strict_turn() -> Sampler:
    """Ask clients in turn, and nobody in place of one who is not free: a stand-in is asked more often than counted."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        start, all_of_them = population.attempt * num, population.num_clients
        turn = ((start + step) % all_of_them for step in range(min(num, all_of_them)))
        return [Pick(client) for client in turn if population.free(client)]

    return Sampler(sample, scheme=IN_TURN)


def private_parts(plan: Plan, job: Job, coordinator: Coordinator) -> tuple[Mechanism, Exposure]:
    """The mechanism of a plan and what it is exposed to, of no attempt yet; refuses parts that do not fit."""
    mechanism = job.mechanism
    if plan.privacy is None or mechanism is None:
        raise PlanError(NO_PRIVACY)
    exposure = exposure_of(plan, job, coordinator)
    check_delta(mechanism, exposure)
    mechanism.event(exposure._replace(attempts=1))
    _check_parts(plan, job, mechanism, exposure.cohort)
    _check_rounds(plan, coordinator, mechanism)
    _check_released(plan, mechanism)
    return mechanism, exposure


def planned(plan: Plan) -> tuple[Mechanism, Exposure]:
    """What protects the run of a plan, and what all of its rounds expose it to."""
    federation = build_federation(plan)
    mechanism, exposure = private_parts(plan, build_job(plan, federation), build_coordinator(plan, federation))
    return mechanism, exposure._replace(attempts=plan.rounds)


def exposure_of(plan: Plan, job: Job, coordinator: Coordinator) -> Exposure:
    """How clients and samples are drawn, from the parts that draw them."""
    num_clients, sampler = coordinator.num_clients, coordinator.sampler
    wanted = coordinator.policy.num_wanted(CoordinatorState(), num_clients)
    rate = min(1.0, wanted / num_clients) if sampler.rate is None else sampler.rate
    return exposed(plan, job.local, job.federation)._replace(scheme=sampler.scheme, rate=rate, attempts=0)


def check_delta(mechanism: Mechanism, exposure: Exposure) -> None:
    """Refuse a delta with which one of those who are hidden could be given away outright."""
    num = exposure.num_clients if mechanism.unit == "client" else exposure.num_samples
    if mechanism.delta * num >= 1:
        raise PlanError(
            f"privacy.delta is {mechanism.delta:g}, but {num:,} {mechanism.unit}s are to be hidden: a delta of one "
            f"over their number allows to give one of them away; set it below {1 / num:.2g}"
        )


def _check_parts(plan: Plan, job: Job, mechanism: Mechanism, cohort: int) -> None:
    """Refuse algorithms and rules that look at more than the mechanism protects."""
    name, algorithm = f"privacy {plan.privacy.name if plan.privacy else ''}", plan.algorithm.name
    if plan.server.samples is not None and plan.server.source != "public":
        raise PlanError(
            f"{name} does not cover server.samples, which are copies of clients' samples that the server looks at "
            'without noise: take them from samples that no client holds, with server.source = "public" and '
            'public = {name = "held_out", fraction = 0.05}, or leave them out'
        )
    if job.algorithm.needs_loss:
        raise PlanError(
            f"{name}: {algorithm} weighs clients by the loss on their data, which is not protected: use fedavg"
        )
    if job.algorithm.scores is not None:
        raise PlanError(
            f"{name} protects what is shared, but clients of {algorithm} keep models of their own, which are measured "
            "and written down with the result: use fedavg"
        )
    if mechanism.on_grid is None:
        return
    if job.secure is not None:
        _check_masks(name, job.secure.settings, mechanism, cohort)
    if job.algorithm.needs_updates:
        raise PlanError(
            f"{name} releases a sum alone, but {algorithm} looks at each update: use fedavg, or privacy local"
        )
    if plan.aggregator.name != "mean":
        raise PlanError(
            f"{name} adds noise to a sum, but {plan.aggregator.name} is none: leave it out, or use privacy local"
        )
    if plan.detection is not None:
        raise PlanError(f"{name} releases a sum alone, but detection looks at each update: leave it out")
    if job.wants_rows and job.secure is None:
        raise PlanError(f"{name} releases a sum alone, but the attack or the policy needs each update: use another")


def _check_masks(name: str, masks: Secagg, mechanism: Mechanism, cohort: int) -> None:
    """Refuse to add up in secret what has no noise yet, too little of it, or no room."""
    if mechanism.sum_bound is None:
        raise PlanError(
            f"{name} lets a server that sees each update add the noise, which secure aggregation hides from it: "
            "leave secagg out, or let clients add the noise: use privacy distributed"
        )
    if masks.groups > 1:
        raise PlanError(f"{name} has its noise in the sum of all clients, not of a group: leave secagg.groups out")
    if mechanism.sum_bound(cohort) >= 1 << masks.modulus_bits - 1:
        raise PlanError(
            f"{name}: the sum of {cohort} clients with its noise does not fit {masks.modulus_bits} bits: "
            "lower privacy.bits, or set secagg.modulus_bits = 64"
        )


def _check_rounds(plan: Plan, coordinator: Coordinator, mechanism: Mechanism) -> None:
    """Refuse policies and samplers whose clients are not drawn as the accountant thinks."""
    policy, sampler, num_clients = coordinator.policy, coordinator.sampler, coordinator.num_clients
    if policy.overlaps_rounds:
        raise PlanError(
            f"privacy is accounted for by rounds of one cohort, but {plan.policy.name} overlaps them: "
            'use policy = "cohort"'
        )
    if sampler.score:
        raise PlanError(
            f"{plan.sampler.name} prefers clients by their {sampler.score}, which is not protected: "
            'use sampler = "poisson" or "round_robin"'
        )
    if "by size" in sampler.scheme:
        raise PlanError(
            f"{plan.sampler.name} prefers clients by how many samples they have, which is not protected: "
            'use sampler = "poisson" or "round_robin"'
        )
    if policy.num_wanted(CoordinatorState(), num_clients) != policy.goal(num_clients):
        raise PlanError(
            "with policy.over_selection it depends on others who counts, which no accountant knows: leave it out"
        )
    if mechanism.min_reports is not None and policy.min_reports > 1:
        raise PlanError(
            f"policy.min_reports is {policy.min_reports}, but the mechanism says how many must answer: leave it out"
        )
    if sampler.scheme == IN_TURN and plan.devices is not None:
        raise PlanError(
            f"{plan.sampler.name} skips devices that cannot be reached, so that others come up too often for privacy: "
            "leave devices out"
        )


def _check_released(plan: Plan, mechanism: Mechanism) -> None:
    """Refuse to measure, or to stop by, what is not protected."""
    if plan.evaluation.clients_every:
        raise PlanError(
            "evaluation.clients_every measures the model on clients' own data, which is not charged: leave it out; "
            "the central test set tells how good the model is"
        )
    for stop in ("samples", "simulated_seconds", *(["bytes"] if mechanism.hides_cohort else [])):
        if getattr(plan.stop, stop) is not None:
            raise PlanError(
                f"stop.{stop} tells of clients' data or of who was asked, which is not charged: leave it out"
            )


def _parts(folded: State) -> Iterator[bytes]:
    """The tensors of a sum, for the ledger's hash."""
    for name in sorted(folded):
        value: Tensor = folded[name]
        yield name.encode()
        yield value.contiguous().numpy().tobytes()


def _upwards(epsilon: float) -> float:
    """Six digits after the point, never less than it is."""
    return math.ceil(epsilon * 1e6) / 1e6 if math.isfinite(epsilon) else epsilon


def must_fit(job: Job, guard: Guard | None) -> None:
    """A job that protects is never run without its guard."""
    if (job.mechanism is None) != (guard is None):
        raise AtollError("a private job needs its guard, and no other has one; this is a bug")
