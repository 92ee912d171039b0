"""A plan's model cut into the clients' layers and the server's. Shapes: M values of a model, N samples.

The clients' first layers are the `head`, the server's are the `body`, and where labels stay with clients, their last
layers are the `tail`. What crosses a cut for one sample are q values, its width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError
from atoll.core.params import ParamSpec, Slot
from atoll.core.split import Split
from atoll.split.graph import Place, Traced, trace
from atoll.train.attributes import as_before
from atoll.train.job import Job
from atoll.train.seeded import seeded

CLIENT, SERVER = "client", "server"
PROBED = 4
"""Samples on which the parts of a model are compared with the whole."""
CLOSE = 1e-6
"""Largest difference between the two, beside the largest of the values that are compared."""


class Side(NamedTuple):
    """The layers of one side: a module with its stages, and where their values lie in the model's vector."""

    stages: nn.ModuleDict
    slots: tuple[Slot, ...]
    """Slots of the model's vector, in their order there."""
    spec: ParamSpec
    """Layout of this side's own vector; its names begin with the name of the stage."""
    frozen: bool = False
    """Whether its first layers, the head, stay as they are."""

    @property
    def num_params(self) -> int:
        """The number of parameters that this side trains."""
        return self.spec.num_trainable

    @property
    def num_bytes(self) -> int:
        """Bytes of this side's vector: parameters and statistics."""
        return self.spec.num_params * self.spec.dtype.itemsize

    def take(self, model_M: Tensor) -> Tensor:
        """Return this side's part of a model's vector."""
        return torch.cat([model_M[slot.offset : slot.offset + slot.size] for slot in self.slots])

    def put(self, model_M: Tensor, values: Tensor) -> None:
        """Write this side's vector to its places in a model's vector."""
        for slot, part in zip(self.slots, torch.split(values, [slot.size for slot in self.slots]), strict=True):
            model_M[slot.offset : slot.offset + slot.size] = part

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Return this side's vector as tensors by the model's own names."""
        parts = torch.split(values, [slot.size for slot in self.slots])
        return {slot.name: part.view(slot.shape) for slot, part in zip(self.slots, parts, strict=True)}


class Traffic(NamedTuple):
    """Bytes that cross the cut, without headers and labels: 2 * 4 * q * N an epoch for float32."""

    batch: int
    epoch: int


class Cut(NamedTuple):
    """Where a model is cut, and what lies on each side."""

    client: Side
    server: Side
    after: str
    """Name of the last layer of the head."""
    shape: tuple[int, ...]
    """Shape of the activations of one sample at the cut."""
    tail: str | None = None
    """Name of the first layer of the tail; None where the server has the labels."""
    tail_shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Values of one sample that cross the cut, or both cuts, one way: q."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def num_params(self) -> int:
        """The number of parameters of the whole model."""
        return self.client.num_params + self.server.num_params

    @property
    def break_even(self) -> float:
        """Samples of a client at which an epoch takes as many bytes as federated learning: parameters / q.

        With fewer samples split learning takes fewer bytes; layers that are handed on or averaged are not counted.
        """
        return self.num_params / self.width

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what crosses each cut, for one sample."""
        return (self.shape,) if self.tail is None else (self.shape, self.tail_shape)

    def describe(self) -> dict[str, Any]:
        """Return what a run directory and a command say of the cut."""
        return {
            "after": self.after,
            "tail": self.tail,
            "shapes": [list(shape) for shape in self.shapes],
            "width": self.width,
            "sample_bytes": self.cost(1, 1).epoch,
            "client_params": self.client.num_params,
            "client_bytes": self.client.num_bytes,
            "server_params": self.server.num_params,
            "server_bytes": self.server.num_bytes,
            "break_even": self.break_even,
        }

    def cost(self, num_samples: int, batch: int) -> Traffic:
        """Return the bytes of a batch and of an epoch of so many samples, activations up and gradients down."""
        each = 2 * self.client.spec.dtype.itemsize * self.width
        return Traffic(each * batch, each * num_samples)


def cut_model(job: Job, split: Split) -> Cut:
    """Cut a job's model as a plan says, and check that the parts are the whole; refuse what cannot be cut."""
    model = copy.deepcopy(job.model).train()
    x = _probe(job)
    with as_before(model), seeded(0):
        traced = trace(model, x)
    head = traced.after(split.cut, "split.cut")
    tail = None if split.tail is None else traced.before(split.tail, "split.tail")
    if tail is not None and tail.last <= head.last:
        raise PlanError(
            f"split.tail is '{tail.name}', which does not lie behind split.cut '{head.name}' with layers of the server "
            "between them: name a later layer"
        )
    stages = _stages(traced, head, tail)
    _must_compose(model, stages, x)
    _must_not_share(stages)
    client = {name: stage for name, stage in stages.items() if name != "body"}
    cut = Cut(
        client=side_of(job, client)._replace(frozen=split.frozen),
        server=side_of(job, {"body": stages["body"]}),
        after=head.name,
        shape=head.shape,
        tail=None if tail is None else tail.name,
        tail_shape=() if tail is None else tail.shape,
    )
    _must_train(job, cut, stages)
    return cut


def places(job: Job) -> tuple[Place, ...]:
    """Return the layers after which a job's model can be cut."""
    model = copy.deepcopy(job.model).train()
    with as_before(model), seeded(0):
        return trace(model, _probe(job)).places


def side_job(job: Job, side: Side) -> Job:
    """Return a job whose model is a copy of one side, for its working model."""
    stages = copy.deepcopy(side.stages)
    seeds = [f"{stage}.{name}" for stage in stages for name in job.dropout_seeds if _has(stages[stage], name)]
    return replace(
        job, model=stages, spec=side.spec, first_D=side.take(job.first_D), dropout_seeds=seeds, local_buffers=[]
    )


def _probe(job: Job) -> Tensor:
    x, _ = job.federation.first(PROBED)
    return job.inputs(x)


def _has(stage: nn.Module, name: str) -> bool:
    return name in dict(stage.named_buffers())


def _stages(traced: Traced, head: Place, tail: Place | None) -> dict[str, nn.Module]:
    end = len(traced.steps) - 1
    if tail is None:
        return {"head": traced.stage(0, head.last), "body": traced.stage(head.last, end)}
    return {
        "head": traced.stage(0, head.last),
        "body": traced.stage(head.last, tail.last),
        "tail": traced.stage(tail.last, end),
    }


def _must_compose(model: nn.Module, stages: Mapping[str, nn.Module], x: Tensor) -> None:
    """Refuse a model whose parts, one after another, are not the whole, or that draws random numbers of its own."""

    def outputs(parts: Sequence[nn.Module], seed: int) -> Tensor:
        value = x
        with as_before(model), torch.no_grad(), seeded(seed):
            for part in parts:
                value = part(value)
        return value

    whole, composed = outputs([model], 0), outputs(list(stages.values()), 0)
    if not is_close(whole, composed):
        raise PlanError(
            f"split: the parts of {type(model).__name__} one after another give other outputs than the whole model, by "
            f"{float((whole - composed).abs().max()):.3g}: use an nn.Sequential, or a module that calls its parts in "
            "order"
        )
    if not is_close(whole, outputs([model], 1)):
        raise PlanError(
            f"split: the forward pass of {type(model).__name__} draws random numbers, which client and server would "
            "draw differently: use nn.Dropout for dropout, or leave it out"
        )


def is_close(expected: Tensor, found: Tensor) -> bool:
    """Return whether values differ by at most CLOSE of the largest, or of 1."""
    if expected.shape != found.shape:
        return False
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((expected - found).abs() <= CLOSE * largest).all())


def _must_not_share(stages: Mapping[str, nn.Module]) -> None:
    """Refuse weights that are used on both sides."""
    owners: dict[int, tuple[str, str]] = {}
    for stage, module in stages.items():
        side = SERVER if stage == "body" else CLIENT
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            other, first = owners.setdefault(id(tensor), (side, name))
            if other != side:
                raise PlanError(
                    f"split: '{first}' is used by layers of the clients and, as '{name}', by layers of the server: cut "
                    "where no weights are shared"
                )


def side_of(job: Job, stages: Mapping[str, nn.Module]) -> Side:
    """Return the side that has these stages, whose parameters are named as in the model."""
    own = {name: stage for stage, module in stages.items() for name in _names(module)}
    slots = tuple(slot for slot in job.spec.slots if slot.name in own)
    return Side(
        stages=nn.ModuleDict(stages),
        slots=slots,
        spec=ParamSpec(
            slots=tuple(_moved(slots, own)),
            num_trainable=sum(slot.size for slot in slots if slot.offset < job.spec.num_trainable),
            dtype=job.spec.dtype,
        ),
    )


def _names(module: nn.Module) -> Iterator[str]:
    """Yield the names of a stage's parameters and buffers, which are those of the model."""
    yield from (name for name, _ in module.named_parameters())
    yield from (name for name, _ in module.named_buffers())


def _moved(slots: Sequence[Slot], stage_of: Mapping[str, str]) -> Iterator[Slot]:
    offset = 0
    for slot in slots:
        yield slot._replace(name=f"{stage_of[slot.name]}.{slot.name}", offset=offset)
        offset += slot.size


def _must_train(job: Job, cut: Cut, stages: Mapping[str, nn.Module]) -> None:
    """Refuse a side without parameters, and parameters of no side."""
    known = {slot.name for side in (cut.client, cut.server) for slot in side.slots}
    for slot in job.spec.slots:
        if slot.name not in known:
            raise PlanError(
                f"split: '{slot.name}' is not used by the forward pass, or is tied to weights of another name, so that "
                "it has no side: remove it from the model"
            )
    head = sum(p.numel() for p in stages["head"].parameters() if p.requires_grad)
    for whose, num in (("clients'", head), ("server's", cut.server.num_params)):
        if not num:
            raise PlanError(
                f"split.cut '{cut.after}' leaves no trained parameter on the {whose} side of the cut: choose another "
                "layer"
            )
