"""The seat of a curious server of split learning: run a plan, and write down what its server sees of each task.

Shapes: N samples that were sent in a task, one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.commit.parts import build_parts, open_ledger
from atoll.core.coordinator import Coordinator
from atoll.core.errors import PlanError
from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.core.probe import CutKnown, CutSight, Samples
from atoll.core.split import VERTICAL
from atoll.engine.base import Engine
from atoll.privacy.noise import fresh_secret
from atoll.simulation.devices import build_devices
from atoll.simulation.driver import Simulation
from atoll.split.cut import Side, side_job
from atoll.split.driver import SplitEngine
from atoll.split.messages import TARGETS, Kind, Message
from atoll.split.parties import Parties
from atoll.split.rehearsal import rehearse_split
from atoll.split.shield import Place, Shield
from atoll.split.targets import read_targets
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.federation import build_federation
from atoll.train.job import Job
from atoll.train.loop import load_batch, workspace

CALLS = 1 << 20
"""Where the places of an attacker's own draws begin, which no client's task has."""


class CutWatched(NamedTuple):
    """What a server saw of a run whose model is cut, what it knows, and what a judge needs."""

    known: CutKnown
    sights: list[CutSight]
    truths: list[Samples]
    """Of each sight the samples behind it, in the order in which they were sent."""
    parties: Parties
    clients: list[Tensor]
    """Of each sight the client's layers at the start, which the server may not have seen."""
    ends: list[Tensor]
    """Of each sight the client's layers at the end."""
    num_rounds: int
    final_M: Tensor


class _Heard(NamedTuple):
    """The messages of one task: direction, message."""

    attempt: int
    client: int
    messages: list[tuple[str, Message]]


def watch_cut(
    plan: Plan,
    rounds: int,
    *,
    elsewhere: int = 2000,
    since: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> CutWatched:
    """Run some rounds of a plan whose model is cut, and return what its server sees.

    `elsewhere` is how many test samples an attacker has of its own. What is sent before version `since` is not kept. No
    other round begins once time `is_over`.
    """
    split = plan.split
    if split is None:
        raise PlanError("nobody sends activations in this plan, whose model is not cut: set split.cut")
    if split.way == VERTICAL:
        raise PlanError(
            "attacks on a cut look at the samples of one client, and parties that hold columns have rows together: "
            "attack a plan with split.cut instead"
        )
    heard = dict[tuple[int, int], _Heard]()

    def note(way: str, message: Message, attempt: int) -> None:
        if before.coordinator.version >= since:
            task = heard.setdefault((attempt, message.holder), _Heard(attempt, message.holder, []))
            task.messages.append((way, message))

    def engine(job: Job, coordinator: Coordinator) -> Engine:
        return SplitEngine(rehearse_split(plan, job)._replace(heard=note))

    longer = plan if plan.rounds >= rounds else plan.replace({"rounds": rounds})
    federation = build_federation(plan)
    parts = build_parts(longer, federation, open_ledger(plan, None, begun=False), engine)
    assert isinstance(parts.engine, SplitEngine)
    parties, job = parts.engine.parties, parts.job
    simulation = Simulation(parts, devices=build_devices(plan))
    sights, truths, done = list[CutSight](), list[Samples](), 0
    clients, ends = list[Tensor](), list[Tensor]()
    before = simulation.state
    try:
        for _ in simulation.rounds():
            for task in heard.values():
                layers = [message.values for _, message in task.messages if message.kind == Kind.WEIGHTS]
                sight = _sight(parties, task, before.coordinator.version, before.params_D)
                if len(sight.activations_N) and len(layers) == 2:
                    sights.append(sight)
                    truths.append(_truth(job, task, len(sight.activations_N)))
                    clients.append(layers[0].clone())
                    ends.append(layers[1].clone())
            heard.clear()
            before, done = simulation.state, done + 1
            if before.coordinator.version >= rounds or is_over():
                break
    finally:
        parts.engine.close()
    return CutWatched(
        known_at_cut(plan, parties, elsewhere), sights, truths, parties, clients, ends, done, before.params_D
    )


def _sight(parties: Parties, heard: _Heard, version: int, model_M: Tensor) -> CutSight:
    """Return what the server sees of a task."""
    job, told = parties.job, parties.split.handover == "server"
    by_kind: dict[Kind, list[Message]] = {kind: [] for kind in Kind}
    for way, message in heard.messages:
        if message.kind != Kind.WEIGHTS or way == "down":
            by_kind[message.kind].append(message)
    [weights] = by_kind[Kind.WEIGHTS][:1]
    sent = _in_order(by_kind[Kind.ACTIVATIONS])
    values = torch.cat([each.values.detach() for each in sent]) if sent else torch.zeros(0)
    labels = [read_targets(job, each) for each in sent if TARGETS in each.arrays]
    outputs, grads = (_in_order(by_kind[kind]) for kind in (Kind.OUTPUTS, Kind.OUTPUT_GRADIENTS))
    whole = len(outputs) == len(grads) == len(sent) > 0
    return CutSight(
        client=heard.client,
        version=version,
        client_M=weights.values.clone() if told else None,
        server_M=parties.cut.server.take(model_M).clone(),
        activations_N=values,
        batch_N=torch.tensor([each.step for each in sent for _ in range(len(each.values))], dtype=torch.long),
        labels_N=torch.cat(labels) if labels else None,
        outputs_N=torch.cat([each.values.detach() for each in outputs]) if whole else None,
        gradients_N=torch.cat([each.values.detach() for each in grads]) if whole else None,
    )


def _in_order(messages: list[Message]) -> list[Message]:
    return sorted(messages, key=lambda each: (each.step, each.piece))


def _truth(job: Job, heard: _Heard, num: int) -> Samples:
    """Return the first samples of a client's batches, in their order."""
    task, x, y = Task(heard.client, 0, heard.attempt), list[Tensor](), list[Tensor]()
    for step, indices in enumerate(client_batches(job, task)):
        batch = load_batch(job, torch.from_numpy(indices), task, job.first_D[:0], step)
        x.append(batch.x.contiguous())
        y.append(batch.y)
        if sum(map(len, y)) >= num:
            break
    return Samples(torch.cat(x)[:num], torch.cat(y)[:num])


def known_at_cut(plan: Plan, parties: Parties, elsewhere: int) -> CutKnown:
    """Return what everybody knows of a plan whose model is cut."""
    job, dataset = parties.job, parties.job.federation.dataset
    x, y = job.federation.test_samples(0, min(elsewhere, dataset.num_test)).load()
    x = job.inputs(x).contiguous()
    numbers = x.dtype.is_floating_point
    shield, calls = Shield(parties.shield.defences, fresh_secret()), iter(range(CALLS, 2 * CALLS))
    fresh: list[Job] = []

    def client(values: Tensor | None) -> nn.ModuleDict:
        if values is None and not fresh:
            fresh.append(build_job(plan.replace({"seed": plan.seed + 1}), job.federation))
        first_D = job.first_D if values is not None else fresh[0].first_D
        side = parties.cut.client
        return _copy(job, side, side.take(first_D) if values is None else values)

    def as_sent(activations_N: Tensor) -> Tensor:
        shaped = shield.shaped(activations_N)
        with torch.no_grad():
            noise = shield.sent(shaped.detach(), Place(next(calls), 0, 0, 0)) - shaped
        return shaped + noise

    has_labels = y.dim() == 1 and (dataset.has_classes or dataset.problem == "binary")
    return CutKnown(
        client=client,
        server=lambda values: _copy(job, parties.cut.server, values)["body"],
        as_sent=as_sent,
        loss=job.loss,
        labels_K=torch.unique(y) if has_labels else y[:0],
        input_shape=dataset.input_shape,
        low=float(x.min()) if numbers else 0.0,
        high=float(x.max()) if numbers else 0.0,
        lr=job.lr_of,
        elsewhere=Samples(x, y),
    )


def _copy(job: Job, side: Side, values: Tensor) -> nn.ModuleDict:
    """Return a copy of one side's layers with these values, in evaluation mode."""
    space = workspace(side_job(job, side))
    space.restore(values, {})
    stages = copy.deepcopy(space.model).eval()
    assert isinstance(stages, nn.ModuleDict)
    return stages
