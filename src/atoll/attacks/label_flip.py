"""Train on wrong labels."""

from __future__ import annotations

from torch import Tensor

from atoll.core.attack import Attack, Knowledge


def label_flip() -> Attack:
    """Turn every label y into K - 1 - y (Fang et al. 2020, arXiv:1911.11815, section 5)."""

    def data(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
        return x, known.num_classes - 1 - y

    return Attack(data=data)
