"""The guard of a private run: it charges every attempt, tells the price, and stops before the budget is spent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from atoll.checks.table import check
from atoll.checks.views import Budget
from atoll.commit.server_step import aggregated
from atoll.core.coordinator import Coordinator
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import Aggregate, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.privacy import IN_TURN, RELATION, Exposure, Mechanism, ReleaseContext
from atoll.core.sampler import Pick, Population, Sampler
from atoll.privacy.accounting import Spent, spent
from atoll.privacy.draws import secret_generator
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import derived
from atoll.train.build import build_job
from atoll.train.exchange import sent_by
from atoll.train.job import Job, empty_update
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
        at_client = (self.mechanism.at_client, self.mechanism.steps, self.mechanism.at_cut)
        return any(each is not None for each in at_client)

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
        context = ReleaseContext(self.exposure(attempt + 1), self.job.secret, self.job.spec.dtype)
        return self.mechanism.release(folded, memory, context)

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
    """Make a run private: its job, its coordinator and its guard; a budget that pays for no round is refused."""
    mechanism, exposure = protection(job)
    check(Budget(mechanism, exposure))
    policy = coordinator.policy
    if mechanism.min_reports is not None:
        policy = policy._replace(min_reports=mechanism.min_reports(policy.goal(coordinator.num_clients)))
    guard = Guard(job, mechanism, exposure, ledger)
    sampler = in_strict_turn() if coordinator.sampler.scheme == IN_TURN else coordinator.sampler
    coordinator = replace(
        coordinator, policy=policy, sampler=sampler, secret_rng=lambda attempt: guard.rng("cohort", attempt)
    )
    return job, coordinator, guard


def in_strict_turn() -> Sampler:
    """Ask clients in turn, and nobody in place of one who is not free: a stand-in is asked more often than counted."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        start, all_of_them = population.attempt * num, population.num_clients
        turn = ((start + step) % all_of_them for step in range(min(num, all_of_them)))
        return [Pick(client) for client in turn if population.free(client)]

    return Sampler(sample, scheme=IN_TURN)


def protection(job: Job) -> tuple[Mechanism, Exposure]:
    """Return what protects a job and what it is exposed to, of no attempt yet."""
    if job.mechanism is None or job.exposure is None:
        raise PlanError(NO_PRIVACY)
    return job.mechanism, job.exposure


def planned(plan: Plan) -> tuple[Mechanism, Exposure]:
    """What protects the run of a plan, and what all of its rounds expose it to."""
    mechanism, exposure = protection(build_job(plan))
    return mechanism, exposure._replace(attempts=plan.rounds)


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
