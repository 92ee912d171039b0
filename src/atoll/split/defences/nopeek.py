"""NoPeek: activations that depend less on samples."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.defence import Defence
from atoll.core.options import above
from atoll.split.correlation import LEAST_ROWS, correlation

EXAMPLE = {"weight": 0.5}


def nopeek(weight: Annotated[float, above(0, "leave nopeek out for none")]) -> Defence:
    """Add weight * dCor(samples, activations) to the client's loss (Vepakomma et al. 2020, arXiv:2008.09161, eq. 1).

    The distance correlation is that of a piece of a batch. Its gradient by the activations is added at the client, so
    that nothing more is sent. It claims nothing: activations tell less on average, and no sample is promised anything.
    """

    def penalty(x_B: Tensor, activations_B: Tensor) -> Tensor:
        return weight * correlation(x_B, activations_B)

    return Defence(penalty=penalty, min_samples=LEAST_ROWS)
