"""Train on wrong labels."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.options import at_least

Class = Annotated[int, at_least(0)]
"""The number of a class, from 0; the upper bound is checked when the data are loaded."""
EXAMPLES = [{"source": 0, "target": 1}, {}]


def label_flip(source: Class | None = None, target: Class | None = None) -> Attack:
    """Change every label y to K - 1 - y, or only the labels of class `source` to `target`.

    (Fang et al. 2020, arXiv:1911.11815, section 5; one class, Tolpegin et al. 2020, arXiv:2007.08432.)
    """
    if (source is None) != (target is None):
        raise PlanError(
            f"label_flip changes one class to another: got source = {source}, target = {target}; "
            "give both source and target, or neither"
        )

    def data(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
        if source is None or target is None:
            return x, known.num_classes - 1 - y
        check_class("label_flip: attack.source", source, known)
        check_class("label_flip: attack.target", target, known)
        return x, torch.where(y == source, target, y)

    return Attack(data=data, knows="its own data, and the number of classes", needs_classes=True)


def check_class(name: str, value: int, known: Knowledge) -> None:
    """Refuse a class that the data do not have."""
    if not 0 <= value < known.num_classes:
        raise PlanError(f"{name} is {value}, but classes are 0 to {known.num_classes - 1}: choose one of them")
