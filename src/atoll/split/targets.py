"""Labels beside activations: in as few bytes as the number of classes needs."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.problem import IGNORED
from atoll.data.targets import BINARY, MULTI_LABEL, TOKENS
from atoll.split.messages import TARGETS, Message, NotFinite, SplitError
from atoll.train.job import Job


def sent_targets(job: Job, targets: Tensor) -> Tensor:
    """Return targets as they travel: classes, and zeros and ones, in one or two bytes; no label stands for none."""
    dataset = job.federation.dataset
    if dataset.problem in (BINARY, MULTI_LABEL):
        return targets.to(torch.uint8)
    if not dataset.has_classes or dataset.num_classes > 1 << 15:
        return targets
    small = dataset.num_classes <= 1 << 8 and dataset.problem != TOKENS
    return targets.to(torch.uint8 if small else torch.int16)


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
    dataset, labels = job.federation.dataset, found.to(like.dtype)
    if dataset.has_classes:
        wrong = (labels < 0) | (labels >= dataset.num_classes)
        wrong &= (labels != IGNORED) | (dataset.problem != TOKENS)
        if bool(wrong.any()):
            raise SplitError(
                f"got the label {int(labels[wrong][0])}, but classes are 0 to {dataset.num_classes - 1}: send those of "
                "the data"
            )
    elif dataset.problem in (BINARY, MULTI_LABEL) and bool((found > 1).any()):
        raise SplitError(f"got the label {int(found.max())}, but labels are 0 or 1: send those of the data")
    elif labels.is_floating_point() and not bool(labels.isfinite().all()):
        raise NotFinite(f"got targets of client {message.holder} that hold NaN or Inf: check the data")
    return labels
