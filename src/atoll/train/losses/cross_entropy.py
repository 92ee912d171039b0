"""Cross entropy."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(outputs)[target] of each sample, (B,); sequences are averaged over their positions."""
    picked = outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg()
    return picked.flatten(1).mean(1) if picked.dim() > 1 else picked
