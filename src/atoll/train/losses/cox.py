"""Cox's partial likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.problem import Loss
from atoll.train.losses.shapes import per_sample

FITS = ("survival",)
"""The problems that it is for."""


def cox() -> Loss:
    """Negative log partial likelihood of the events of a batch (Cox 1972), with Breslow's handling of ties.

    For a sample with an event at t: log sum of exp(risk) over all samples of the batch whose time is t or later, minus
    its own risk; 0 for a censored one. Risk sets are those of the batch: with `local.batch_size = "all"` a client's
    loss is its own partial likelihood, and a federation's the likelihood stratified by clients.
    """
    return cox_loss


def cox_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's term of the negative log partial likelihood of its batch."""
    if targets.dim() != 2 or targets.shape[1] != 2:
        raise ValueError(f"targets of shape {tuple(targets.shape)}: a sample of survival data has a time and an event")
    risk_B, (time_B, event_B) = per_sample(outputs), targets.unbind(1)
    at_risk_BB = time_B[None, :] >= time_B[:, None]
    hidden = torch.where(at_risk_BB, risk_B[None, :], torch.full_like(risk_B[None, :], -torch.inf))
    return event_B.to(risk_B.dtype) * (hidden.logsumexp(1) - risk_B)
