"""An audit of a private plan: canary clients try to be seen in what its own mechanism releases.

Every client is a canary: it sends a Dirac, a thousand clips long, in an entry of its own, with a thousand times the
weight of others. A coin says whether it is in. Nobody trains, since what others do is nothing that protects. The rounds
are those of the plan: its coordinator, sampler, mechanism and guard. The adversary adds up what is released in each
entry.

Shapes: C clients of a group, D parameters, M canaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.algorithm import ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure, Mechanism
from atoll.engine.base import InProcess
from atoll.engine.build import build_coordinator
from atoll.engine.guarding import guarded, private_parts
from atoll.engine.simulation import Simulation
from atoll.privacy.accounting import spent
from atoll.privacy.auditing import Found, audited, most_shown
from atoll.privacy.ledger import Ledger
from atoll.privacy.noise import coins, fresh_secret
from atoll.train.exchange import Report, Work
from atoll.train.federation import build_federation
from atoll.train.job import Job, build_job
from atoll.train.server import empty_update
from atoll.train.trainer import Trainer

HALF = Fraction(1, 2)
LOUD = 1000.0
"""How many clips long a canary is, and how many times as heavy as others."""
GROUP = 64
SMALLER = (1e-6, 1e-7, 1e-8)
"""Deltas to try beside the plan's: with many canaries a large one spoils the bound."""
MOST_ROUNDS = 10
"""More rounds show little more, and take their time."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit has found, and what was claimed for the same rounds."""

    found: Found
    claimed: float
    delta: float
    """Both are for this delta."""
    rounds: int
    num_canaries: int
    most_shown: float
    """What it would have shown if nothing were hidden."""

    @property
    def passed(self) -> bool:
        """Whether what was found is within what is claimed."""
        return self.found.epsilon <= self.claimed


class CanaryTrainer(Trainer):
    """Sends canaries instead of training."""

    def __init__(self, job: Job, inside_M: np.ndarray, entry_M: np.ndarray) -> None:
        super().__init__(job)
        self.stack, self.inside_M, self.entry_M = GROUP, inside_M, entry_M
        self.layout = empty_update(job)

    def train(self, tasks: list[Task], sent: Mapping[int, Broadcast], states: Mapping[int, State]) -> Work:
        """Let canaries that are in send their Dirac; those that are out send nothing, or zeros if that is the claim."""
        mechanism = self.job.mechanism
        assert mechanism is not None
        sending = list(tasks)
        silent = [Report(task.client, 0, 0, 0.0, 0.0, 0, True) for task in tasks if task not in set(sending)]
        if not sending:
            return Work({}, silent, {})
        num, layout = len(sending), self.layout
        delta_CD = layout.delta_D.new_zeros(num, *layout.delta_D.shape[1:])
        for row, task in enumerate(sending):
            if self.inside_M[task.client]:
                delta_CD[row, self.entry_M[task.client]] = LOUD * mechanism.clip
        aux = {name: value.new_zeros(num, *value.shape[1:]) for name, value in layout.aux.items()}
        updates = Update(delta_CD, layout.weight.new_full((num,), LOUD), aux)
        broadcasts = [sent[task.version] for task in sending]
        blank: list[State] = [{} for _ in sending]
        work = self._send(sending, broadcasts, blank, updates, [0.0] * num, [{} for _ in sending])
        return work._replace(reports=work.reports + silent)


def audit_plan(plan: Plan, num_canaries: int = 5000, confidence: float = 0.95) -> Audit:
    """Put the mechanism of a plan to the test: what can be told of canaries, against what is claimed."""
    plan = plan.replace({"evaluation.every": 0, "stop": {}})
    federation = build_federation(plan)
    job, coordinator = build_job(plan, federation), build_coordinator(plan, federation)
    mechanism, exposure = private_parts(plan, job, coordinator)
    if mechanism.unit != "client":
        raise PlanError(f"an audit looks for clients, but this plan protects each {mechanism.unit}: it cannot tell")
    num_each = min(federation.num_clients, job.spec.num_params)
    repeats = max(1, math.ceil(num_canaries / num_each))
    best = _best_setting(mechanism, exposure, min(plan.rounds, MOST_ROUNDS), repeats * num_each, confidence)
    tries = [_one_run(plan.replace({"rounds": best.rounds}), job, num_each) for _ in range(repeats)]
    score_M, inside_M = (np.concatenate(parts) for parts in zip(*tries, strict=True))
    claimed = spent(mechanism._replace(delta=best.delta), exposure._replace(attempts=best.rounds)).epsilon
    return Audit(
        found=audited(score_M, inside_M, best.delta, confidence),
        claimed=claimed,
        delta=best.delta,
        rounds=best.rounds,
        num_canaries=len(score_M),
        most_shown=best.shown,
    )


class Setting(NamedTuple):
    """Where a mechanism that hides nothing would show most beyond its claim."""

    beyond: float
    shown: float
    rounds: int
    delta: float


def _best_setting(mechanism: Mechanism, exposure: Exposure, most: int, num_canaries: int, confidence: float) -> Setting:
    """Choose the rounds, and the delta of the claim, which holds for every delta at its own epsilon.

    A canary can be seen if it was asked at least once.
    """
    found = []
    for rounds in range(1, most + 1):
        asked = 1 - (1 - exposure.rate) ** rounds
        for delta in (mechanism.delta, *(each for each in SMALLER if each < mechanism.delta)):
            shown = most_shown(num_canaries, 0.9 * asked * num_canaries / 2, delta, confidence)
            claimed = spent(mechanism._replace(delta=delta), exposure._replace(attempts=rounds)).epsilon
            found.append(Setting(shown - claimed, shown, rounds, delta))
    best = max(found)
    if best.beyond <= 0:
        raise PlanError(
            f"{num_canaries:,} canaries cannot show as much as one round of this plan is said to give away: "
            "ask for more with --canaries, or audit the plan with a larger privacy.sigma"
        )
    return best


def _one_run(plan: Plan, job: Job, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The score of each canary, and whether it was in, (M,) each."""
    total_D = torch.zeros(job.spec.num_params, dtype=torch.float64)

    def watch(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        total_D.add_(aggregate.delta_D)
        return params_D, server

    job = replace(job, secret=fresh_secret(), algorithm=job.algorithm._replace(server_step=watch))
    job, coordinator, guard = guarded(plan, job, build_coordinator(plan, job.federation), Ledger(job.secret))
    inside_M = np.zeros(job.federation.num_clients, dtype=bool)
    inside_M[:num] = coins(fresh_secret(), HALF, num)
    entry_M = np.linspace(0, job.spec.num_params - 1, num).astype(int)
    everyone = np.resize(entry_M, job.federation.num_clients)
    engine = InProcess(job, CanaryTrainer(job, inside_M, everyone))
    try:
        for _ in Simulation(plan, engine, coordinator, guard=guard).rounds():
            pass
    finally:
        engine.close()
    return total_D.numpy()[entry_M], inside_M[:num]
