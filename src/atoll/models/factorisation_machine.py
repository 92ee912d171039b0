"""A factorisation machine over token ids, such as a user and a film. Shapes: B samples, T tokens, K outputs."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from atoll.core.options import Range
from atoll.models.sizes import Classes, Width

EXAMPLE = {"vocabulary": 20, "factors": 4}


class FactorisationMachine(nn.Module):
    """A weight and a short vector for each token: (B, T) tokens -> (B, K) scores."""

    def __init__(self, vocabulary: int, num_classes: int, factors: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(num_classes))
        self.weights = nn.Embedding(vocabulary, num_classes)
        self.factors = nn.Embedding(vocabulary, num_classes * factors)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.factors.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return offset + sum of weights + sum over pairs of the products of their vectors."""
        vectors = self.factors(tokens).unflatten(-1, (len(self.offset), -1))
        pairs = (vectors.sum(-3).square() - vectors.square().sum(-3)).sum(-1) / 2
        scores: Tensor = self.offset + self.weights(tokens).sum(-2) + pairs
        return scores


def factorisation_machine(
    vocabulary: Annotated[int, Range(1, 2**24)], num_classes: Classes = 1, factors: Width = 8
) -> nn.Module:
    """Build w_0 + sum_i w_i + sum_{i<j} <v_i, v_j> over a sample's tokens (Rendle 2010, equation 1).

    With a user and an item as tokens it is matrix factorisation with biases. `vocabulary` is the number of token ids.
    """
    return FactorisationMachine(vocabulary, num_classes, factors)
