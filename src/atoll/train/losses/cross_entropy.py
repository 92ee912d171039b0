"""Cross entropy."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.options import NotNegative, Range
from atoll.core.problem import IGNORED, Loss

EXAMPLES = [{}, {"label_smoothing": 0.1}]
FITS = ("classification", "tokens")
"""The problems that it is for."""


def cross_entropy(
    weights: tuple[NotNegative, ...] = (),
    label_smoothing: Annotated[float, Range(0, 1, open_high=True)] = 0.0,
    ignore: bool = False,
) -> Loss:
    """-log softmax(outputs)[target] of each sample, (B,); sequences are averaged over their positions.

    A class weighs what `weights` give it, and `label_smoothing` takes so much from the target and shares it out to all
    classes. With `ignore`, positions of label -100 count for nothing.
    """
    if not weights and not label_smoothing:
        return tokens_loss if ignore else plain_cross_entropy
    weight_K = torch.tensor(weights) if weights else None

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if weight_K is None else weight_K.to(outputs)
        if weight is not None and len(weight) != outputs.shape[-1]:
            raise ValueError(f"{len(weight)} weights for {outputs.shape[-1]} classes: give one for each")
        found = functional.cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            weight=weight,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=label_smoothing,
        ).view(targets.shape)
        return found if found.dim() == 1 else _mean(found, targets)

    return loss


def plain_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(outputs)[target] of each sample."""
    picked = outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg()
    return picked.flatten(1).mean(1) if picked.dim() > 1 else picked


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the positions of each sequence that are not padding."""
    counts = targets != IGNORED
    picked = outputs.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).neg()
    return _mean(picked * counts, targets) if targets.dim() > 1 else picked * counts


def _mean(losses: Tensor, targets: Tensor) -> Tensor:
    counts = (targets != IGNORED).to(losses.dtype)
    return (losses * counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
