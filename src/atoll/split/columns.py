"""What is built once of a plan whose parties hold columns: the sides, their codecs, and what crosses each cut.

Each party has a cut of its own, behind its bottom model; the server has the top model, or what of it lies before the
tail, which the party that holds the labels has. Shapes: q values of one sample of a party.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError
from atoll.core.parts import find
from atoll.core.plan import Plan
from atoll.core.split import Split
from atoll.split.cut import Cut, Side, Traffic, side_of
from atoll.split.graph import Place, trace
from atoll.split.messages import Codec
from atoll.split.parties import Parties, build_parties, codec_of, must_not_cut_masks
from atoll.split.shield import OPEN, Shield, build_shield
from atoll.split.way import Way
from atoll.train.attributes import as_before
from atoll.train.job import Job
from atoll.train.seeded import seeded
from atoll.train.vertical import VerticalModel, joined


class Bottom(nn.Module):
    """A party's model, with the names that its parameters have in the whole model."""

    def __init__(self, number: int, bottom: nn.Module) -> None:
        super().__init__()
        self.bottoms = nn.ModuleDict({str(number): bottom})

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of a party's columns."""
        [bottom] = self.bottoms.values()
        activations: Tensor = bottom(x)
        return activations


class Top(nn.Module):
    """The top model or a part of it, with the names that its parameters have in the whole model."""

    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.top = top

    def forward(self, x: Tensor) -> Tensor:
        """Return what it makes of activations."""
        outputs: Tensor = self.top(x)
        return outputs


class Holder(NamedTuple):
    """A party: what it is called, which features it holds, and its side of the model."""

    name: str
    places: Tensor
    """Places of its features in a flattened sample."""
    cut: Cut
    codec: Codec


class VerticalParties(NamedTuple):
    """What is built once of a plan whose parties hold columns."""

    job: Job
    split: Split
    way: Way
    holders: tuple[Holder, ...]
    labels: int
    """The number of the party that holds the labels."""
    shield: Shield = OPEN
    """Defences, with the secret of the run."""

    @property
    def server(self) -> Side:
        """The server's layers."""
        return self.holders[self.labels].cut.server

    @property
    def width(self) -> int:
        """Values of one sample that cross the cuts of all parties one way: q."""
        return sum(holder.cut.width for holder in self.holders)

    def of(self, client: int) -> Parties:
        """Return the cut of one party."""
        holder = self.holders[client]
        return Parties(self.job, self.split, holder.cut, self.way, holder.codec, self.shield)

    def states_loss(self, client: int) -> bool:
        """Return whether a party alone knows the loss."""
        return client == self.labels and self.holders[client].cut.tail is not None

    def cost(self, num_samples: int, batch: int) -> Traffic:
        """Return the bytes of a batch and of an epoch of so many samples over all cuts, up and down."""
        costs = [holder.cut.cost(num_samples, batch) for holder in self.holders]
        return Traffic(sum(cost.batch for cost in costs), sum(cost.epoch for cost in costs))

    def describe(self) -> dict[str, Any]:
        """Return what a run directory and a command say of the parties."""
        owner = self.holders[self.labels]
        return {
            "parties": [
                {
                    "name": holder.name,
                    "columns": len(holder.places),
                    "width": holder.cut.width,
                    "params": holder.cut.client.num_params,
                    "bytes": holder.cut.client.num_bytes,
                    "sample_bytes": holder.cut.cost(1, 1).epoch,
                }
                for holder in self.holders
            ],
            "labels": owner.name,
            "rows": self.job.federation.num_samples(self.labels),
            "tail": owner.cut.tail,
            "width": self.width,
            "sample_bytes": self.cost(1, 1).epoch,
            "server_params": self.server.num_params,
            "server_bytes": self.server.num_bytes,
        }

    def assembled(self, start_M: Tensor, sides: dict[int, Tensor], server: Tensor) -> Tensor:
        """Return the whole model's vector of the vectors of all sides."""
        model_M = start_M.clone()
        for number, values in sides.items():
            self.holders[number].cut.client.put(model_M, values)
        self.server.put(model_M, server)
        return model_M


def build_cut(plan: Plan, job: Job) -> Parties | VerticalParties:
    """Cut a plan's model between clients, or between parties, and the server; refuse what does not fit."""
    assert plan.split is not None
    return build_vertical(plan, job) if plan.split.parties else build_parties(plan, job)


def build_vertical(plan: Plan, job: Job) -> VerticalParties:
    """Cut a plan's model between parties and server; refuse what does not fit."""
    split, model = plan.split, copy.deepcopy(job.model).train()
    assert split is not None and split.parties and isinstance(model, VerticalModel)
    must_not_cut_masks(split, job)
    x = job.inputs(job.federation.first(4)[0])
    with as_before(model), seeded(0), torch.no_grad():
        parts = [bottom(x.flatten(1)[:, places]) for bottom, places in zip(model.bottoms, model.columns, strict=True)]
    body, tail, place = _top_parts(model.top, split, joined(parts))
    server = side_of(job, {"body": Top(body)})
    holders = []
    for number, (party, places) in enumerate(zip(split.parties, model.columns, strict=True)):
        stages: dict[str, nn.Module] = {"head": Bottom(number, model.bottoms[number])}
        has_tail = tail is not None and number == split.label_holder
        if has_tail:
            assert tail is not None
            stages["tail"] = Top(tail)
        cut = Cut(
            client=side_of(job, stages)._replace(frozen=split.frozen),
            server=server,
            after=f"bottoms.{number}",
            shape=(party.width,),
            tail=place.name if place is not None and has_tail else None,
            tail_shape=place.shape if place is not None and has_tail else (),
        )
        holders.append(Holder(party.name, places, cut, codec_of(job, split, cut)))
    way: Way = find("split.ways", split.way)()
    shield = build_shield(plan, job)
    parties = VerticalParties(job, split, way, tuple(holders), split.label_holder, shield)
    _must_be_whole(parties)
    return parties


def _top_parts(top: nn.Module, split: Split, inputs: Tensor) -> tuple[nn.Module, nn.Module | None, Place | None]:
    """Return the server's part of the top model, and where labels stay with their holder, the part behind it."""
    if split.tail is None:
        return top, None, None
    with as_before(top), seeded(0):
        traced = trace(top, inputs)
    place = traced.before(split.tail, "split.tail")
    return traced.stage(0, place.last), traced.stage(place.last, len(traced.steps) - 1), place


def _must_be_whole(parties: VerticalParties) -> None:
    """Refuse a side without parameters to train, and parameters of no side or of two."""
    sides = {holder.name: holder.cut.client for holder in parties.holders} | {"the server": parties.server}
    for name, side in sides.items():
        if not side.num_params:
            raise PlanError(
                f"split: {name} has no parameters to train: give each party a model of its own, and let split.tail "
                "leave layers of the top model with the server"
            )
    named = [slot.name for side in sides.values() for slot in side.slots]
    lost = [slot.name for slot in parties.job.spec.slots if named.count(slot.name) != 1]
    if lost:
        raise PlanError(
            f"split: '{lost[0]}' belongs to {'several sides' if lost[0] in named else 'no side'}: let the models of "
            "parties and server share no weights, and use all of theirs"
        )
