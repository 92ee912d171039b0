"""Labels beside activations: in as few bytes as the number of classes needs."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.split.messages import TARGETS, Message, SplitError
from atoll.train.job import Job


def sent_targets(job: Job, targets: Tensor) -> Tensor:
    """Return targets as they travel: classes in one or two bytes."""
    dataset = job.federation.dataset
    if not dataset.has_classes or targets.is_floating_point():
        return targets
    if dataset.num_classes <= 1 << 8:
        return targets.to(torch.uint8)
    return targets.to(torch.int16) if dataset.num_classes <= 1 << 15 else targets


def read_targets(job: Job, message: Message) -> Tensor:
    """Return the targets of a message as a loss takes them; refuse others than the data can have."""
    found, like = message.arrays.get(TARGETS), job.federation.train_y
    if found is None:
        raise SplitError(
            f"the activations of client {message.holder} came without labels: send them, or set split.tail"
        )
    expected = sent_targets(job, like[:1])
    shape = (len(message.values), *like.shape[1:])
    if tuple(found.shape) != shape or found.dtype != expected.dtype:
        raise SplitError(
            f"got labels of shape {tuple(found.shape)} and type {found.dtype}, {shape} of {expected.dtype} are due: "
            "send one for each sample"
        )
    dataset = job.federation.dataset
    if dataset.has_classes and not found.is_floating_point() and found.numel():
        low, high = int(found.min()), int(found.max())
        if low < -1 or high >= dataset.num_classes:
            raise SplitError(f"got labels from {low} to {high}, but there are {dataset.num_classes} classes")
    return found.to(like.dtype)
