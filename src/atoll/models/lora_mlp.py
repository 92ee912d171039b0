"""An MLP whose layers are frozen and have low-rank adapters."""

from __future__ import annotations

import math

from torch import Tensor, nn

from atoll.core.personal_adapters import add_personal
from atoll.models.sizes import Classes, MaybeWidth, Shape, Width


class LowRankLinear(nn.Module):
    """A frozen linear layer W with a trained product beside it: W x + (alpha / rank) B A x; B is 0 at first."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return what both give together."""
        output: Tensor = self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
        return output


def lora_mlp(
    input_shape: Shape = (1, 28, 28),
    num_classes: Classes = 10,
    hidden: Width = 64,
    rank: Width = 4,
    alpha: float = 8.0,
    personal_rank: MaybeWidth = 0,
) -> nn.Module:
    """Build a frozen random hidden layer of ReLU units and a frozen random output, each with an adapter.

    The smallest model that algorithms for adapters can be tried on (Hu et al. 2022, arXiv:2106.09685, section 4.1).
    With a `personal_rank` each client has adapters of its own beside the shared ones (`core/personal_adapters.py`).
    """
    model = nn.Sequential(
        nn.Flatten(),
        LowRankLinear(nn.Linear(math.prod(input_shape), hidden), rank, alpha),
        nn.ReLU(),
        LowRankLinear(nn.Linear(hidden, num_classes), rank, alpha),
    )
    if personal_rank:
        add_personal(model, personal_rank, alpha)
    return model
