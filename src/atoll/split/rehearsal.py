"""Rehearse a step of split learning before the first client trains: it must be that of the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from atoll.core.errors import PlanError
from atoll.core.messages import STATISTICS, Task
from atoll.core.plan import Plan
from atoll.core.transform import chain
from atoll.split.clock import Moment
from atoll.split.columns import VerticalParties
from atoll.split.cut import is_close
from atoll.split.exchange import Exchange
from atoll.split.half import Half
from atoll.split.parties import Parties, build_parties
from atoll.split.shield import OPEN
from atoll.split.vertical import rehearse_vertical
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.trainer import Trainer


def rehearse_cut(plan: Plan, job: Job) -> Parties | VerticalParties:
    """Cut a plan's model between clients or parties and the server; refuse one that would train otherwise."""
    assert plan.split is not None
    return rehearse_vertical(plan, job) if plan.split.parties else rehearse_split(plan, job)


def rehearse_split(plan: Plan, job: Job) -> Parties:
    """Cut a plan's model, and refuse it if a step of the parts differs from one of the whole model."""
    parties = build_parties(plan, job)
    client = int(job.federation.partition.sizes().argmax())
    local = replace(job.local, epochs=None, steps=1)
    one_step = replace(job, model=copy.deepcopy(job.model), local=local)
    task, sent = Task(client, 0, 0), broadcast_of(job, job.first_D, first_server(job, job.first_D))
    expected = Trainer(one_step).train_one(task, sent, {}).update
    cut = parties.cut._replace(client=parties.cut.client._replace(frozen=False))
    exact = parties._replace(job=one_step, cut=cut, codec=parties.codec._replace(chain=chain()), shield=OPEN)
    server = Half(one_step, cut.server)
    server.restore(cut.server.take(job.first_D))
    exchange = Exchange(exact, task, Half(one_step, cut.client), server, Moment())
    exchange.start(cut.client.take(job.first_D))
    while not exchange.is_done:
        exchange.advance(Moment())
    if exchange.weights is None:
        return parties  # a first step that diverges is for training to report
    end_M = job.first_D.clone()
    cut.client.put(end_M, exchange.weights)
    cut.server.put(end_M, server.vector)
    whole_M = torch.cat([expected.delta_D, *([expected.aux[STATISTICS]] if STATISTICS in expected.aux else [])])
    found_M = (end_M - job.first_D)[: len(whole_M)]
    if not is_close(whole_M, found_M):
        raise PlanError(
            f"split: a step of the parts moves the model by up to {float((whole_M - found_M).abs().max()):.3g} "
            "otherwise than a step of the whole model: use a loss and an optimiser that see each sample and each "
            "parameter by itself, or set split.micro_batches = 1"
        )
    return parties
