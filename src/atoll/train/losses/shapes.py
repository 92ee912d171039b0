"""Outputs and targets of the same shape, for losses that compare them number by number. Shapes: B samples."""

from __future__ import annotations

from torch import Tensor


def alike(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs in the shape of the targets, and targets in the type of the outputs."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    elif targets.dim() == outputs.dim() + 1 and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "give the model as many outputs as a sample has targets"
        )
    return outputs, targets.to(outputs.dtype)


def per_sample(values: Tensor) -> Tensor:
    """Return the mean over all but the first dimension."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values
