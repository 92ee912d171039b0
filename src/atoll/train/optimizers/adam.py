"""Adam."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Optimizer, spread
from atoll.core.options import NotNegative, Positive, ShareBelowOne

SMOOTH = {"eps": 1.0}


def adam(
    beta1: ShareBelowOne = 0.9, beta2: ShareBelowOne = 0.999, eps: Positive = 1e-8, weight_decay: NotNegative = 0.0
) -> Optimizer:
    """Step by m / (sqrt(v) + eps), both corrected for their start (Kingma and Ba 2015, arXiv:1412.6980, alg. 1)."""

    def init(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in tensors for _ in range(2)]

    def step_(tensors: list[Tensor], grads: list[Tensor], memory: list[Tensor], lr: Tensor, number: Tensor) -> None:
        correct1, correct2 = 1 - beta1**number, 1 - beta2**number
        for position, (tensor, given) in enumerate(zip(tensors, grads, strict=True)):
            grad = given.add(tensor, alpha=weight_decay) if weight_decay else given
            first = memory[2 * position].mul_(beta1).add_(grad, alpha=1 - beta1)
            second = memory[2 * position + 1].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            direction = (first / correct1) / ((second / correct2).sqrt() + eps)
            tensor.addcmul_(direction, spread(-lr, tensor))

    return Optimizer(step_, init)
