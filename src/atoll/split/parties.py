"""What is built once of a plan whose model is cut: the cut, the way, and the bytes of messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from atoll.core.errors import PlanError
from atoll.core.parts import find
from atoll.core.plan import Plan
from atoll.core.split import Split
from atoll.core.transform import chain, no_memory
from atoll.split.cut import Cut, cut_model
from atoll.split.messages import VALUES, Codec, Kind, Message
from atoll.split.shield import OPEN, Shield, build_shield
from atoll.split.way import Way
from atoll.train.job import Job

HEADER = 4096
"""Bytes that a message may take beside its values."""


class Parties(NamedTuple):
    """What is built once of a plan that is cut."""

    job: Job
    split: Split
    cut: Cut
    way: Way
    codec: Codec
    shield: Shield = OPEN
    """Defences, with the secret of the party that builds them."""
    heard: Callable[[str, Message, int], None] | None = None
    """Told of every message of a simulation as it arrives: direction, message, attempt."""

    def of(self, client: int) -> Parties:
        """Return the cut of a client, which is that of all."""
        return self

    def states_loss(self, client: int) -> bool:
        """Return whether a client alone knows the loss."""
        return self.cut.tail is not None

    def describe(self) -> dict[str, Any]:
        """Return what a run directory and a command say of the cut."""
        return self.cut.describe()


def build_parties(plan: Plan, job: Job) -> Parties:
    """Cut a plan's model and build what its rounds need; refuse what does not fit."""
    split = plan.split
    assert split is not None
    must_not_cut_masks(split, job)
    cut = cut_model(job, split)
    way: Way = find("split.ways", split.way)()
    return Parties(job, split, cut, way, codec_of(job, split, cut), build_shield(plan, job))


def must_not_cut_masks(split: Split, job: Job) -> None:
    """Refuse pieces of batches where dropout draws masks for whole ones."""
    if split.micro_batches > 1 and job.dropout_seeds:
        raise PlanError(
            f"split.micro_batches is {split.micro_batches}, but the masks of dropout go by the place in a batch, and "
            "pieces would get others: set split.micro_batches = 1, or leave dropout out"
        )


def codec_of(job: Job, split: Split, cut: Cut) -> Codec:
    """Return what turns the messages over a cut into bytes; refuse codecs that remember or do not fit."""
    transforms = [part.build("transforms", error_feedback=False) for part in split.codecs]
    for part, transform in zip(split.codecs, transforms, strict=True):
        if transform.init is not no_memory or transform.against_known:
            raise PlanError(
                f"split.codecs: {part.name} remembers what it sent before, and batches have nothing in common: use "
                "quantise, half or another that remembers nothing"
            )
    ends = {Kind.ACTIVATIONS: cut.shape, Kind.GRADIENTS: cut.shape}
    ends |= {} if cut.tail is None else {Kind.OUTPUTS: cut.tail_shape, Kind.OUTPUT_GRADIENTS: cut.tail_shape}
    size = 2 * job.spec.dtype.itemsize
    values = max(job.batch_size * max(math.prod(shape) for shape in ends.values()), cut.client.spec.num_params)
    targets = job.batch_size * max(1, job.federation.train_y[:1].numel()) * 8
    codec = Codec(chain(*transforms), job.seed, job.spec.dtype, ends, HEADER + size * values + targets)
    _rehearse_codec(codec, cut)
    return codec


def _rehearse_codec(codec: Codec, cut: Cut) -> None:
    """Send made-up activations of one and of three samples; refuse codecs that do not give them back."""
    for num in (1, 3):
        values = torch.randn((num, *cut.shape), generator=torch.Generator().manual_seed(num), dtype=codec.dtype)
        message = Message(Kind.ACTIVATIONS, 0, 0, 0, 1, num, {VALUES: values})
        try:
            shape = tuple(codec.decode(codec.encode(message, 0)).values.shape)
        except PlanError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise PlanError(f"split.codecs do not fit activations ({text}): leave a step out") from error
        if shape != tuple(values.shape):
            raise PlanError(f"split.codecs make {shape} of activations of {tuple(values.shape)}: leave a step out")
