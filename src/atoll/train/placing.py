"""A job on a device: its model, its first parameters and, where they fit, its samples."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import PlanError
from atoll.data.rows import LazyFeatures
from atoll.train.devices import KEPT_SHARE, LOSS_SCALE, Place, compute_in, free_memory, moved
from atoll.train.federation import Federation
from atoll.train.job import Job

PINNED = ("cuda", "xpu")
"""Devices that read pinned memory of the processor while it goes on."""


def on_device(job: Job, place: Place, like: Job | None = None) -> Job:
    """Return a job whose clients' work is computed in a place; the job itself where that is the plain processor.

    `like` is what this gave for a job that differs in how much is trained only: model and samples are taken from there.
    """
    if place.is_plain:
        return job
    device = place.torch_device
    federation = job.federation if like is None else like.federation
    if like is None and not place.on_cpu:
        federation = DeviceFederation(job.federation, device)
    inner = like.architectures if like is not None else (None,) * len(job.architectures)
    return replace(
        job,
        device=device,
        loss_scale=LOSS_SCALE if place.precision == "fp16" else 1.0,
        federation=federation,
        model=_model(job, place) if like is None else like.model,
        first_D=job.first_D.to(device),
        first_kept_K=job.first_kept_K.to(device),
        extras=moved(job.extras, device),
        architectures=tuple(on_device(each, place, old) for each, old in zip(job.architectures, inner, strict=True))
        if like is not None
        else tuple(replace(on_device(each, place), federation=federation) for each in job.architectures),
    )


def _model(job: Job, place: Place) -> nn.Module:
    """Return a copy of the job's model in a place; the server's own stays where it is."""
    try:
        model = copy.deepcopy(job.model)
    except Exception as error:
        raise PlanError(
            f"the model cannot be copied to {place.device}: {type(error).__name__}: {error}; keep what cannot be "
            'copied out of the model\'s attributes, or set engine.device = "cpu"'
        ) from error
    return compute_in(model.to(place.torch_device), place)


class DeviceFederation(Federation):
    """Samples for clients on a device: kept there if they fit, or else read in batches, from pinned memory if it helps.

    Who holds what is that of another federation.
    """

    def __init__(self, federation: Federation, device: torch.device, free: int | None = None) -> None:
        vars(self).update(vars(federation))
        self.device, self._pins = device, device.type in PINNED
        left = free_memory(device) if free is None else free
        left = None if left is None else int(KEPT_SHARE * left)
        self.train_y, self.test_y = self.train_y.to(device), self.test_y.to(device)
        for name in ("train_x", "test_x"):
            features = getattr(self, name)
            if isinstance(features, LazyFeatures) or left is None or features.nbytes > left:
                continue
            setattr(self, name, features.to(device))
            left -= features.nbytes

    @property
    def on_device(self) -> bool:
        """Whether the training samples lie on the device."""
        return isinstance(self.train_x, Tensor) and self.train_x.device.type != "cpu"

    def take(self, indices: Tensor) -> Tensor:
        """Return training samples as they are stored, on the device, at indices of any shape."""
        if self.on_device:
            return super().take(indices.to(self.device))
        return self._sent(super().take(indices.cpu()))

    def targets(self, indices: Tensor) -> Tensor:
        """Return the targets of training samples, on the device, at indices of any shape."""
        return self.train_y[indices.to(self.device)]

    def tested(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return features, as a model wants them, and targets of a part of the test set, on the device."""
        return self.features(self._sent(torch.as_tensor(self.test_x[start:stop]))), self.test_y[start:stop]

    def public_features(self, indices: np.ndarray) -> Tensor:
        """Public samples as a model wants them, on the device."""
        return self._sent(super().public_features(indices))

    def _sent(self, values: Tensor) -> Tensor:
        if self._pins and values.device.type == "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=self._pins)
