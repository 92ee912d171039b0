"""Stochastic gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Optimizer, remember_nothing, spread
from atoll.core.errors import PlanError
from atoll.core.options import NotNegative, ShareBelowOne


def sgd(momentum: ShareBelowOne = 0.0, weight_decay: NotNegative = 0.0, nesterov: bool = False) -> Optimizer:
    """Step w <- w - lr * v, v <- momentum * v + (grad + weight_decay * w), as torch.optim.SGD does."""
    if nesterov and momentum == 0:
        raise PlanError("sgd: nesterov needs a momentum above 0")

    def init(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in tensors]

    def step_(tensors: list[Tensor], grads: list[Tensor], memory: list[Tensor], lr: Tensor, number: Tensor) -> None:
        for position, (tensor, given) in enumerate(zip(tensors, grads, strict=True)):
            grad = given.add(tensor, alpha=weight_decay) if weight_decay else given
            if momentum:
                velocity = memory[position].mul_(momentum).add_(grad)
                grad = grad.add(velocity, alpha=momentum) if nesterov else velocity
            tensor.addcmul_(grad, spread(-lr, tensor))

    return Optimizer(step_, init if momentum else remember_nothing)
