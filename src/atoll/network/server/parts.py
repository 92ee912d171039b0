"""A plan as a network server builds it: clients state their numbers of samples, and updates are delivered.

Shapes: C clients, V packed values of an update.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll.checks.table import check
from atoll.checks.views import Served
from atoll.commit.parts import RunParts, build_parts
from atoll.core.coordinator import Coordinator
from atoll.core.errors import AtollError, PlanError, RunError
from atoll.core.messages import Broadcast, Payload, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.wire import packed_size, unpack_parts
from atoll.data.index import Array, Partition
from atoll.engine.base import InProcess
from atoll.network.protocol.agreement import plan_for_clients
from atoll.network.protocol.objects import ObjectError
from atoll.privacy.ledger import Ledger
from atoll.split.columns import VerticalParties, build_cut
from atoll.split.parties import Parties
from atoll.train.exchange import Told, Work, acceptable, encoded, received
from atoll.train.federation import Federation, load_dataset
from atoll.train.job import Job, layout_of
from atoll.train.loop import Workspace, workspace
from atoll.train.trainer import Trainer

MAX_OVERHEAD = 1 << 20
"""Bytes that a delivered update may be longer than the plain vector: names, shapes, and what codecs keep beside it."""


Kinds = list[list[tuple[str, torch.dtype]]]


class BadUpdate(AtollError):
    """An invalid update: it is left out, and counts as an offence of its sender."""


@final
@dataclass(frozen=True, eq=False)
class DeclaredPartition(Partition):
    """A partition whose samples lie with the clients; the server knows their numbers only."""

    sizes_C: Array

    def indices(self, client: int) -> Array:
        """Raise PlanError: a server has no samples of clients."""
        raise PlanError(f"the samples of client {client} are not here: over a network only the client sees them")

    def size(self, client: int) -> int:
        """Return the number of samples with which a client is credited."""
        self._check(client)
        return int(self.sizes_C[client])

    def sizes(self) -> Array:
        """Return the number of samples with which each client is credited."""
        return self.sizes_C


class DeliveredUpdate(NamedTuple):
    """A delivered update, and what its client states of its training."""

    update: Update
    told: Told


class DeliveryEngine(InProcess):
    """The engine of a network server: reads delivered updates instead of training clients."""

    holds_clients = False

    def __init__(self, job: Job, space: Workspace | None) -> None:
        super().__init__(job, Trainer(job, space=space))
        self.read: Callable[[Task], DeliveredUpdate | Work] = _nothing
        """Returns what a client delivered, or what came of its session."""

    def describe(self) -> dict[str, object]:
        """Return the engine's name, for `run.json`."""
        return {"name": "network"}

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Fold delivered updates one at a time, so that memory does not grow with the cohort."""
        yield from (self._received(task) for [task] in groups)

    def _received(self, task: Task) -> Work:
        delivered = self.read(task)
        if isinstance(delivered, Work):
            return delivered
        return received(self.job, self.trainer.fold, [task], delivered.update.alone(), [delivered.told])


def _nothing(task: Task) -> DeliveredUpdate:
    raise AtollError(f"nothing was delivered for {task}; this is a bug")


@dataclass(frozen=True, kw_only=True)
class ServerParts(RunParts):
    """The parts of a run on a server."""

    engine: DeliveryEngine
    layout: Update
    """The shape of an update, without values."""
    max_bytes: int
    """Maximum bytes of a delivered update."""
    kinds: Kinds
    """Names and types of the tensors of an encoded update."""
    parties: Parties | VerticalParties | None = None
    """What its sessions need, where the model is cut."""

    def decode_update(self, chunks: Iterable[bytes], num_bytes: int, weight: float) -> tuple[Update, int]:
        """Decode an update, and count its bytes without compression; raise BadUpdate if it is not one of the plan."""
        try:
            payload = unpack_parts(chunks, num_bytes, max_bytes=self.max_bytes)
            if _kinds(payload) != self.kinds:
                raise BadUpdate("the update's tensors have other names or types than the plan's uplink makes")
            size = packed_size(payload)
            payload, exact = payload.split(self.layout.exact())
            vector_V = self.job.uplink.decode(payload)
        except (BadUpdate, ObjectError, OSError, RunError):
            raise
        except Exception as error:  # whatever a codec makes of rubbish
            raise BadUpdate(f"the update cannot be read: {' '.join(str(error).split())[:200]}") from error
        due_V = self.layout.vector()
        if vector_V.shape != due_V.shape or vector_V.dtype != due_V.dtype:
            raise BadUpdate(
                f"the update has {tuple(vector_V.shape)} values of {vector_V.dtype}, {tuple(due_V.shape)} of "
                f"{due_V.dtype} are due: check the client's model"
            )
        for values in (vector_V, *exact.values()):
            if not (bool(values.sum().isfinite()) or bool(values.isfinite().all())):  # a finite sum is enough
                raise BadUpdate("the update holds NaN or Inf: check the client's data and learning rate")
        update = self.layout.rebuilt(vector_V, exact)
        return update._replace(weight=torch.tensor(weight, dtype=self.layout.weight.dtype)), size

    def check_acceptable(self, task: Task, update: Update) -> None:
        """Raise BadUpdate for an update that would be left out of its version."""
        if not bool(acceptable(self.job, [task], update.alone())[0]) or not float(update.weight) > 0:
            raise BadUpdate(
                f"the update has an L2 norm of {float(update.delta_D.double().norm()):.3g}, server.max_norm is "
                f"{self.job.max_norm:g}; its weight is {float(update.weight):g}; if both are right, its extra vectors "
                f"are not what the algorithm sends for the {self.job.federation.num_samples(task.client):,} samples "
                "that the server believes in: check the client's data and learning rate, or let the operator agree to "
                "more (atoll clients approve NAME --samples N)"
            )

    def max_weight(self, num_samples: float) -> float:
        """Return the maximum weight of an update that was trained on so many samples."""
        mechanism = self.job.mechanism
        alike = mechanism is not None and mechanism.at_client is not None
        return 1.0 if alike else self.job.algorithm.max_weight(num_samples)


def build_server_parts(plan: Plan, sizes: Sequence[int], ledger: Ledger | None) -> tuple[ServerParts, Tensor]:
    """Build a plan for clients that have so many samples, and the model that a run of it starts from.

    `ledger` is the privacy ledger of a run that has begun. Only a run that begins needs the first model: the job that
    is kept for weeks has its shape, and no memory for it.
    """
    federation = Federation(
        load_dataset(plan),
        DeclaredPartition(len(sizes), np.array(sizes, dtype=np.int64)),
        seed=plan.seed,
        holdout=plan.evaluation.holdout,
        validation=plan.evaluation.validation or 0.0,
        server_samples=plan.server.samples or 0,
    )
    kept: list[tuple[Tensor, Workspace | None]] = []

    def lighten(job: Job) -> Job:
        if not job.work.sends_models:
            raise PlanError("work: clients would keep models of their own, which a server cannot measure: leave it out")
        check(Served(plan, job.shares_model))
        kept.append((job.first_D, workspace(job) if job.work.uses_algorithm else None))
        return replace(job, first_D=job.first_D.new_zeros(()).expand(job.first_D.shape))

    def engine(job: Job, coordinator: Coordinator) -> DeliveryEngine:
        return DeliveryEngine(job, kept[0][1])

    built = build_parts(plan, federation, ledger, engine, lighten=lighten)
    assert isinstance(built.engine, DeliveryEngine)
    layout = layout_of(built.job)
    like, _ = encoded(built.job, Task(0, 0, 0), layout, {})
    parts = ServerParts(
        plan=plan,
        job=built.job,
        coordinator=built.coordinator,
        guard=built.guard,
        engine=built.engine,
        layout=_without_values(layout),
        max_bytes=2 * packed_size(layout.plain()) + MAX_OVERHEAD,
        kinds=_kinds(like),
        parties=None if plan.split is None else build_cut(plan, built.job),
    )
    return parts, kept[0][0]


def dry_run_for(plan: Plan, num_clients: int, model: Path | None = None) -> None:
    """Build a plan for so many clients and rehearse a round; raise a PlanError for what does not fit."""
    plan_for_clients(plan)
    parts, _ = build_server_parts(plan, [1000] * num_clients, None)
    if model is not None:
        given_params(model, parts.job)
    del parts
    gc.collect()  # parts refer to each other: the model would be there twice when the run is built


def given_params(path: Path, job: Job) -> Tensor:
    """Return the flat vector of a model that a run is to start from, from a file of its named tensors."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read as a model ({error}): give a model.safetensors of a run") from error
    spec, own = job.spec, job.model.state_dict()
    for slot in spec.slots:
        shape = tuple(tensors[slot.name].shape) if slot.name in tensors else None
        if shape != slot.shape:
            found = "nothing" if shape is None else f"shape {shape}"
            raise PlanError(f"{path} has {found} for {slot.name}, the plan's model {slot.shape}: name the same model")
    stays = {slot.name for slot in (*spec.slots, *spec.kept)} | set(job.local_buffers)
    for name, tensor in tensors.items():
        if (
            name not in stays
            and tensor.dtype.is_floating_point
            and not (name in own and torch.equal(tensor, own[name]))
        ):
            raise PlanError(
                f"{path} has another {name} than the plan's model, and it is not trained, so that it would not travel: "
                "train it, or let the plan build the model with it"
            )
    return torch.cat([tensors[slot.name].reshape(-1).to(spec.dtype) for slot in spec.slots])


def _without_values(update: Update) -> Update:
    aux = {name: value.to("meta") for name, value in update.aux.items()}
    return Update(update.delta_D.to("meta"), update.weight.to("meta"), aux)


def _kinds(payload: Payload) -> Kinds:
    """Return the names and types of a payload's tensors."""
    sides = [[(name, side[name].dtype) for name in sorted(side)] for side in payload.sides]
    return [[("", payload.carrier.dtype)], *sides]
