"""Job: everything that a client's training needs, built once from a plan, and what travels of it.

Shapes: D parameters, K kept parameters, M values of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm, LocalTask, Optimizer
from atoll.core.attack import Attack
from atoll.core.client_work import ClientWork
from atoll.core.contribution import Contribution
from atoll.core.detection import Detector
from atoll.core.downlink import Downlink
from atoll.core.errors import PlanError
from atoll.core.messages import STATISTICS, Broadcast, State, Task, Update
from atoll.core.params import ParamSpec
from atoll.core.plan import Local
from atoll.core.privacy import Exposure, Mechanism, SampleSteps
from atoll.core.problem import Loss, Problem
from atoll.core.transform import Chain
from atoll.train.clipping import Layer
from atoll.train.federation import Federation
from atoll.train.metrics import Measures
from atoll.train.secure import Secure

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The built parts of a plan that turn a task into an update."""

    seed: int
    federation: Federation
    model: nn.Module
    spec: ParamSpec
    first_D: Tensor
    """The parameters that the run starts from."""
    first_kept_K: Tensor
    """The parameters that a client starts from and keeps."""
    problem: Problem
    loss: Loss
    measures: Measures
    """What is measured of a model."""
    algorithm: Algorithm
    work: ClientWork
    """What clients do with a task."""
    local: Local
    optimizer: Optimizer
    schedule: Callable[[int], float]
    """Version -> what the clients' learning rate is multiplied by."""
    uplink: Chain
    downlink: Downlink
    aggregator: Aggregator
    server_lr: float
    max_norm: float
    """The largest L2 norm of an update that counts."""
    keeps_rows: bool
    """Whether updates may be late by different amounts, so that each counts differently."""
    attack: Attack | None
    attackers: frozenset[int]
    attack_rounds: range
    detector: Detector | None
    secure: Secure | None
    contribution: Contribution | None
    mechanism: Mechanism | None
    secret: bytes
    """What privacy noise and private batches derive from."""
    layers: tuple[Layer, ...]
    """Where steps are private: the layers whose per-sample gradients need not be made; none if all must be."""
    dropout_seeds: list[str]
    local_buffers: list[str]
    """Buffers that each client keeps for itself."""
    layout: torch.memory_format = torch.contiguous_format
    """How the model gets images that are not stacked over clients."""
    device: torch.device = CPU
    """Where clients' work is computed: the model, the first parameters and the batches lie there."""
    loss_scale: float = 1.0
    """What a loss is multiplied by before the backward pass, and gradients divided by after it."""
    exposure: Exposure | None = None
    """How clients and samples are drawn, where a mechanism protects them; of no attempt yet."""
    architectures: tuple[Job, ...] = ()
    """A job for each of the plan's models, or of its copies, where what travels is not one model."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What updates hold beside the values that travel, of zeros, where clients' work says so."""

    def lr_of(self, version: int) -> float:
        """Return the clients' learning rate for work on a version."""
        return self.local.lr * self.schedule(version)

    def trainable(self, model: Tensor) -> Tensor:
        """Return the parameters of a model's flat vector, or of a stack of them, as a view."""
        return model[..., : self.spec.num_trainable] if self.spec.buffers else model

    def broadcast(self, model: Tensor, aux: State) -> Broadcast:
        """Return what is sent of a model's flat vector and of an algorithm's extras."""
        if not self.spec.buffers:
            return Broadcast(model, aux)
        return Broadcast(self.trainable(model), {**aux, STATISTICS: model[self.spec.num_trainable :]})

    def model_of(self, sent: Broadcast) -> Tensor:
        """Return the flat vector of the model that was sent, or of a stack of them."""
        return torch.cat([sent.params_D, sent.aux[STATISTICS]], dim=-1) if self.spec.buffers else sent.params_D

    def number(self, value: float) -> Tensor:
        """Return a number as the slots of algorithms get it."""
        return torch.tensor(value, dtype=self.spec.dtype, device=self.device)

    def inputs(self, x: Tensor) -> Tensor:
        """Features as the model computes with them: in its dtype, and images in its layout."""
        x = x.to(self.spec.dtype) if x.dtype.is_floating_point else x
        return x.to(memory_format=self.layout) if x.dim() == 4 else x

    @property
    def personal(self) -> bool:
        """Whether each client has a model of its own."""
        return not self.shares_model or self.algorithm.personal is not None or self.algorithm.adapt is not None

    @property
    def shares_model(self) -> bool:
        """Whether what all share is a whole model, which can be measured without a client."""
        return self.work.own_model is None and not self.spec.kept

    @property
    def private(self) -> SampleSteps | None:
        """How private steps are taken, if they are."""
        return self.mechanism.steps if self.mechanism is not None else None

    @property
    def wants_rows(self) -> bool:
        """Whether updates come back one by one, not folded: somebody must see them before the rule does."""
        colludes = self.attack is not None and self.attack.collude is not None
        seen = self.detector is not None or self.contribution is not None or self.secure is not None
        return self.keeps_rows or self.sees_updates or colludes or seen

    @property
    def measures_steps(self) -> bool:
        """Whether the algorithm measures its steps: by each update, so only where these may be seen."""
        hidden = self.mechanism is not None or self.secure is not None or self.keeps_rows
        return self.algorithm.measure is not None and not hidden

    @property
    def sees_updates(self) -> bool:
        """Whether the algorithm is shown each update."""
        return self.algorithm.needs_updates or self.measures_steps

    @property
    def batch_size(self) -> int:
        """Samples a step; no client can fill more than the largest has."""
        wanted = self.local.batch_size
        return min(wanted, self.federation.max_samples) if isinstance(wanted, int) else self.federation.max_samples

    def num_steps(self, client: int, work: float = 1.0) -> int:
        """How many steps a client takes for a task, if it has time for this share of them."""
        steps = self.local.steps
        if steps is None:
            num_samples = self.federation.num_samples(client)
            steps = (self.local.epochs or 1) * -(-num_samples // min(self.batch_size, num_samples))
        return steps if work == 1 else max(1, round(work * steps))

    def num_passes(self, task: Task, *, first: bool = False) -> int:
        """Return how many samples a client trains on for a task, its first or another, every pass counted."""
        return self.local_passes(task) if self.work.num_passes is None else self.work.num_passes(self, task, first)

    def local_passes(self, task: Task) -> int:
        """Return how many samples the local loop trains on for a task, every pass counted."""
        num_samples = self.federation.num_samples(task.client)
        if self.local.steps is None:
            return max(1, round(task.work * (self.local.epochs or 1) * num_samples))
        return self.num_steps(task.client, task.work) * min(self.batch_size, num_samples)

    @property
    def num_public(self) -> int:
        """How many public samples there are."""
        return 0 if self.federation.public is None else len(self.federation.public.x)

    def attacks(self, client: int, version: int) -> bool:
        """Whether this client misbehaves in this round."""
        return self.attack is not None and client in self.attackers and version in self.attack_rounds


def first_server(job: Job, model_M: Tensor) -> State:
    """Return what the algorithm's server remembers before the first round, which starts from this model."""
    return job.algorithm.init_server(job.trainable(model_M))


def broadcast_of(job: Job, model_M: Tensor, server: State) -> Broadcast:
    """Return what clients are sent of a model."""
    return job.broadcast(model_M, job.algorithm.broadcast(job.trainable(model_M), server))


def empty_update(job: Job) -> Update:
    """The stacked update of no client: it has the layout of what the algorithm sends, and no rows."""
    first_D, one = job.trainable(job.first_D), torch.ones((), dtype=job.spec.dtype)

    def unknown(*args: Any) -> Tensor:
        raise PlanError(
            "what this algorithm sends cannot be laid out without data, which a private round of nobody needs: "
            "let its finish look at the delta, the task's numbers and its state only"
        )

    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    state = job.algorithm.init_client(first_D)
    order = LocalTask(
        broadcast=sent,
        state=state,
        lr=one,
        num_steps=one,
        num_samples=one,
        outputs=unknown,
        grad_at=unknown,
        features=unknown,
        first_loss=one,
        step=one,
        end_D=first_D,
    )
    update, _ = job.algorithm.finish(torch.zeros_like(first_D), order)
    update = with_statistics(job, update, torch.zeros_like(job.first_D))
    update = update._replace(aux={**update.aux, **job.extras})
    return Update(
        update.delta_D.new_zeros(0, *update.delta_D.shape),
        update.weight.new_zeros(0),
        {name: value.new_zeros(0, *value.shape) for name, value in update.aux.items()},
    )


def layout_of(job: Job) -> Update:
    """An update of zeros: the shape of every update that is due."""
    empty = empty_update(job)
    return Update(
        empty.delta_D.new_zeros(empty.delta_D.shape[1:]),
        empty.weight.new_zeros(()),
        {name: rows.new_zeros(rows.shape[1:]) for name, rows in empty.aux.items()},
    )


def with_statistics(job: Job, update: Update, delta_M: Tensor) -> Update:
    """Add to an update, or to a stack of them, by how much its model's statistics changed."""
    if not job.spec.num_statistics:
        return update
    changes = delta_M[..., job.spec.num_trainable :][..., : job.spec.num_statistics]
    return update._replace(aux={**update.aux, STATISTICS: changes})
