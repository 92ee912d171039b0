"""Outputs and targets in the form that metrics take. Shapes: N samples or positions of sequences, K classes."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.problem import IGNORED, Scored


def by_class(outputs: Tensor, targets: Tensor) -> Scored:
    """Return (N, K) logits and (N,) classes; the positions of sequences are samples, and padding has no weight."""
    scores, classes = outputs.flatten(0, -2) if outputs.dim() > 2 else outputs, targets.reshape(-1)
    counts_N = classes != IGNORED
    if bool(counts_N.all()):
        return Scored(scores, classes, torch.ones(len(classes), dtype=torch.float64, device=classes.device))
    return Scored(
        scores[counts_N], classes[counts_N], torch.ones(int(counts_N.sum()), dtype=torch.float64, device=classes.device)
    )


def by_number(outputs: Tensor, targets: Tensor) -> Scored:
    """Return outputs in the shape of the targets: (N,), or (N, K) where there are several a sample."""
    scores = outputs.squeeze(-1) if outputs.dim() == targets.dim() + 1 else outputs
    wanted = targets.squeeze(-1) if targets.dim() == 2 and targets.shape[1] == 1 else targets
    scores = scores.squeeze(-1) if scores.dim() == 2 and wanted.dim() == 1 else scores
    return Scored(scores, wanted, torch.ones(len(wanted), dtype=torch.float64, device=wanted.device))


def by_risk(outputs: Tensor, targets: Tensor) -> Scored:
    """Return (N,) risks and (N, 2) times and events."""
    return Scored(
        outputs.reshape(len(targets)), targets, torch.ones(len(targets), dtype=torch.float64, device=targets.device)
    )
