"""What logits say: predicted classes and labels, and probabilities. Shapes: N samples, K classes, L labels."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.metrics.forms import CLASSES, Rows


def predicted_labels(scores: Tensor) -> Tensor:
    """Return which labels are more likely than not."""
    return scores > 0


def as_classes(samples: Rows) -> tuple[Tensor, Tensor, int]:
    """Return predicted classes, true classes, and how many there are; a logit alone is one of class 1 of two."""
    if samples.form == CLASSES:
        num_classes = samples.scores.shape[1]
        predicted_N = samples.scores.argmax(1) if num_classes else samples.targets
        return predicted_N, samples.targets.long(), num_classes
    return predicted_labels(samples.scores).long(), samples.targets.long(), 2


def chances(samples: Rows) -> Tensor:
    """Return (N, K) probabilities of classes that sum to 1, or (N, L) of labels, each for itself."""
    if samples.form == CLASSES:
        return samples.scores.double().softmax(1)
    return samples.columns.double().sigmoid()


def one_hot(targets_N: Tensor, num_classes: int) -> Tensor:
    """Return (N, K) zeros and ones in float64."""
    return torch.nn.functional.one_hot(targets_N.long(), num_classes).double()
