"""The model of parties that hold different columns: a bottom model for each, and a top model on what they make.

Shapes: B samples of a batch, F features, P parties, q values of a party.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError, PlanError
from atoll.core.parts import Part
from atoll.core.split import Split
from atoll.data.dataset import Dataset
from atoll.data.places import feature_places

TRIED = 2
"""Samples that a bottom model is tried on."""


class VerticalModel(nn.Module):
    """Bottom models on columns of the samples, side by side below a top model: what vertical learning trains.

    It is the whole of what lies with the parties and the server, for evaluation and for whoever has all columns.
    """

    def __init__(self, bottoms: Sequence[nn.Module], columns: Sequence[Tensor], top: nn.Module) -> None:
        super().__init__()
        self.bottoms, self.top = nn.ModuleList(bottoms), top
        self.columns = tuple(columns)
        """Places of each party's features in a flattened sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the top model for samples with all columns."""
        parts = [bottom(held(x, places)) for bottom, places in zip(self.bottoms, self.columns, strict=True)]
        outputs: Tensor = self.top(joined(parts))
        return outputs


def held(x: Tensor, places: Tensor) -> Tensor:
    """Return the columns that a party holds of samples, (B, F of the party)."""
    return x.flatten(1).index_select(1, places)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return what parties make of their columns, side by side; that of a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


def vertical_model(split: Split, top: Part, dataset: Dataset) -> VerticalModel:
    """Build the bottom model of each party, in their order, and the top model of a plan."""
    bottoms, columns = list[nn.Module](), list[Tensor]()
    for party in split.parties or ():
        places = feature_places(dataset, party.columns, f"split.parties: {party.name}")
        bottom = _made(f"of {party.name}", party.model, (len(places),), party.width)
        _must_give(bottom, party.name, len(places), party.width)
        bottoms.append(bottom)
        columns.append(torch.from_numpy(places))
    width = sum(party.width for party in split.parties or ())
    return VerticalModel(bottoms, columns, _made("on top", top, (width,), dataset.num_outputs))


def _made(which: str, part: Part, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Build one of the models; a factory gets `input_shape` and `num_classes` if it names them."""
    build: Callable[..., Any] = part.build
    try:
        model = build("models", input_shape=input_shape, num_classes=num_outputs)
    except AtollError:
        raise
    except Exception as error:
        raise PlanError(
            f"the model {which}, '{part.name}', cannot be made for samples of shape {input_shape}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"the model {which}, '{part.name}', is {type(model).__name__}: a factory must return an nn.Module"
        )
    return model


def _must_give(bottom: nn.Module, name: str, num_columns: int, width: int) -> None:
    """Refuse a bottom model without parameters, or with other outputs than its party should send."""
    if not any(parameter.requires_grad for parameter in bottom.parameters()):
        raise PlanError(f"the model of {name} has no parameters to train: use another in split.parties")
    try:
        with torch.no_grad():
            shape = tuple(bottom.eval()(torch.zeros(TRIED, num_columns)).shape)
        bottom.train()
    except Exception as error:
        raise PlanError(
            f"the model of {name} does not fit its {num_columns} columns ({type(error).__name__}: {error}): use a "
            "model for rows of a table"
        ) from error
    if shape != (TRIED, width):
        raise PlanError(
            f"the model of {name} gives outputs of shape {shape[1:]} for a sample, and split.parties say width = "
            f"{width}: let its factory make num_classes outputs, or correct the width"
        )
