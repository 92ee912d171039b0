"""Judge guesses of a hidden attribute. Shapes: C candidates, V values of it, F features that say it, N samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.probe import Hidden, Probe, Samples, Work
from atoll.probes.attribute_inference import imputed
from atoll.simulation.seat import Watched, samples_of

MOST_VALUES = 16
"""Values that an attribute may have to be guessed."""
MOST_CANDIDATES = 200
"""Samples of one row that are guessed."""


class Attribute(NamedTuple):
    """An attribute of a table: the features that say it, and what they are for each value."""

    columns_F: Tensor
    values_VF: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the value of each sample, (N,)."""
        apart_NV = torch.cdist(x[:, self.columns_F].double(), self.values_VF.double())
        return apart_NV.argmin(1)


def attributes_of(x: Tensor) -> list[Attribute]:
    """Return the attributes with few values: runs of features of which one is 1 and the others 0, and single features.

    >>> x = torch.tensor([[1.0, 0.0, 5.0], [0.0, 1.0, 7.0], [1.0, 0.0, 5.0]])
    >>> [each.columns_F.tolist() for each in attributes_of(x)]
    [[0, 1], [2]]
    """
    binary_F = ((x == 0) | (x == 1)).all(0).tolist()
    found, column = list[Attribute](), 0
    while column < x.shape[1]:
        end = column
        while end < x.shape[1] and binary_F[end] and float(x[:, column : end + 1].sum(1).max()) <= 1:
            end += 1
        is_run = end - column > 1 and bool((x[:, column:end].sum(1) == 1).all())
        columns_F = torch.arange(column, end if is_run else column + 1)
        values_VF = torch.unique(x[:, columns_F], dim=0)
        if 1 < len(values_VF) <= MOST_VALUES:
            found.append(Attribute(columns_F, values_VF))
        column = int(columns_F[-1]) + 1
    return found


def attribute_figures(probe: Probe, watched: Watched, work: Work) -> Mapping[str, float]:
    """Let a probe guess the attribute of clients' samples that is hardest to guess; return how often it is right."""
    known = watched.known
    found = attributes_of(known.elsewhere.x) if len(known.input_shape) == 1 else []
    if not found:
        raise DataError(f"no attribute of these samples has 2 to {MOST_VALUES} values, which could be guessed")

    def usual_share(attribute: Attribute) -> float:
        return float(torch.bincount(attribute.of(known.elsewhere.x)).max() / len(known.elsewhere.x))

    attribute = min(found, key=usual_share)
    candidates, row_C = _candidates(watched)
    true_C = attribute.of(candidates.x)
    x = candidates.x.clone()
    x[:, attribute.columns_F] = 0
    hidden = Hidden(attribute.columns_F, attribute.values_VF, row_C)
    blanked = candidates._replace(x=x)
    guesses = probe.run(known, watched.sights, work._replace(candidates=blanked, hidden=hidden))
    scores = [guess.score_CV for guess in guesses if guess.score_CV is not None]
    if not scores:
        return {}
    usual = int(torch.bincount(attribute.of(known.elsewhere.x)).argmax())
    return {
        "share of hidden values right": max(_right(score_CV.argmax(1), true_C) for score_CV in scores),
        "share right by the usual value": _right(torch.full_like(true_C, usual), true_C),
        "share right by all other columns": _right(imputed(known, blanked, hidden).argmax(1), true_C),
        "values of the attribute": float(len(attribute.values_VF)),
    }


def _candidates(watched: Watched) -> tuple[Samples, Tensor]:
    """Return samples of the clients behind each row, each client once, and the rows."""
    x, y, rows, seen = list[Tensor](), list[Tensor](), list[Tensor](), set[tuple[int, ...]]()
    truths = [truth for sight in watched.truths for truth in sight]
    for row, truth in enumerate(truths):
        if truth.clients in seen:
            continue
        seen.add(truth.clients)
        own = samples_of(watched, truth)
        x.append(own.x[:MOST_CANDIDATES])
        y.append(own.y[:MOST_CANDIDATES])
        rows.append(torch.full((len(y[-1]),), row))
    if not rows:
        raise DataError("no client's samples are behind what was seen: watch more rounds")
    return Samples(torch.cat(x), torch.cat(y)), torch.cat(rows)


def _right(value_C: Tensor, true_C: Tensor) -> float:
    return float((value_C == true_C).double().mean())
