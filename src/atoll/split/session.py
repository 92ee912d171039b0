"""What both sides of a session know, and what they check alike. Shapes: B samples of a batch or of a piece."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.messages import Task
from atoll.core.seeds import derive
from atoll.split.messages import Kind, Message, NotFinite, SplitError, piece_sizes
from atoll.train.job import Job

Grads = tuple[Tensor, ...]


class Phase(StrEnum):
    """Phase of either side in a session."""

    WAITING = "waiting for weights"
    TRAINING = "exchanging batches"
    CLOSING = "waiting for weights at the end"
    DONE = "done"


class Session(NamedTuple):
    """One client's task: the same on both sides."""

    task: Task
    num_steps: int
    max_samples: int
    """Samples of the largest batch."""
    pieces: int
    """Pieces of a batch that has samples enough."""
    lr: Tensor
    dropout: int
    """Seed of the first batch's dropout masks."""

    def dropout_seed(self, step: int) -> int:
        """Return the seed of a batch's dropout masks, that of the unsplit loop."""
        return self.dropout + step


def session_of(job: Job, task: Task, num_steps: int, pieces: int) -> Session:
    """Return the session of a task: learning rate and seeds are those of the ordinary client loop."""
    return Session(
        task=task,
        num_steps=num_steps,
        max_samples=job.batch_size,
        pieces=pieces,
        lr=torch.tensor(job.lr_of(task.version), dtype=job.spec.dtype),
        dropout=derive(job.seed, "dropout", task.attempt, task.client) >> 2,
    )


def must_be_due(message: Message, phase: Phase, due: Sequence[Kind], step: int) -> None:
    """Refuse a message of a kind or of a batch that is not due."""
    if message.kind not in due:
        wanted = " or ".join(kind.name.lower() for kind in due) or "nothing"
        raise SplitError(f"got {message.kind.name.lower()} while {phase}, {wanted} is due: keep to the order of steps")
    if message.step != step:
        raise SplitError(
            f"got {message.kind.name.lower()} of batch {message.step} while batch {step} is due: send each batch once"
        )


def must_fit_batch(message: Message, session: Session, shape: tuple[int, ...]) -> None:
    """Refuse a message whose piece or whose values have not the size that they should have, or are not finite."""
    if not 1 <= message.num_samples <= session.max_samples:
        raise SplitError(
            f"got a batch of {message.num_samples} samples, 1 to {session.max_samples} are allowed: keep to the plan"
        )
    sizes = piece_sizes(message.num_samples, session.pieces)
    if message.pieces != len(sizes) or not 0 <= message.piece < len(sizes):
        raise SplitError(
            f"got piece {message.piece} of {message.pieces}, but a batch of {message.num_samples} samples has "
            f"{len(sizes)} pieces: keep to split.micro_batches"
        )
    must_have_shape(message, (sizes[message.piece], *shape))


def must_have_shape(message: Message, shape: tuple[int, ...]) -> None:
    """Refuse values of another shape, or that are not finite."""
    what = message.kind.name.lower()
    if tuple(message.values.shape) != shape:
        raise SplitError(f"got {what} of shape {tuple(message.values.shape)}, {shape} is due: cut the model alike")
    if not bool(message.values.isfinite().all()):
        raise NotFinite(
            f"got {what} of client {message.holder} that hold NaN or Inf: lower local.lr, or check data and model"
        )


def filled(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Grads:
    """Return gradients, with zeros for parameters that the loss does not depend on."""
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True))


def added(sum_so_far: Grads | None, more: Grads) -> Grads:
    """Add the gradients of a further piece of a batch; the first are kept to the bit."""
    return more if sum_so_far is None else tuple(a + b for a, b in zip(sum_so_far, more, strict=True))
