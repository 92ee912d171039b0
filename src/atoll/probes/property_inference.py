"""Whether clients have a property, by a classifier on updates. Shapes: S shadow clients, R rows, F features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.core.options import Range
from atoll.core.probe import PROPERTY, Guess, Known, Probe, Sight, Work
from atoll.probes.shadows import STACKED, OutOfTime, train_stacked

NumShadows = Annotated[int, Range(8, 4096, hint="half of them have the property, and the classifier needs several")]
RIDGE = 0.3
"""Weight decay of the classifier, with features of unit spread, for each shadow client."""


def property_inference(label: Annotated[int, Range(0, 10**6)] = 0, num_shadows: NumShadows = 256) -> Probe:
    """Classify updates by those of shadow clients with and without a property (Melis et al. 2019, arXiv:1805.04049).

    The property is "has samples of class `label`". From the model of each round (algorithm 3 of the paper, section 5.2)
    shadow clients train on samples from elsewhere, with random shares of the classes, half of them without that class.
    A linear classifier with weight decay, on figures of how each class's row of the last layer changed, says of each
    update how likely its client has the property, about 0 to 1; rows of the same client in several rounds are averaged.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        scores, senders = list[float](), list[object]()
        for sight in sights:
            if work.is_over() and scores:
                break
            scores += _scores(known, sight, label, num_shadows, work)
            who = sight.sender_R or (None,) * len(sight.num_clients_R)
            senders += [object() if each is None else each for each in who]
        guesses = list[Guess]()
        for row, sender in enumerate(senders):
            own = [score for score, other in zip(scores, senders, strict=True) if other == sender]
            guesses.append(Guess(row=row, value=float(np.mean(own)), notes={"rounds": float(len(own)), "label": label}))
        return guesses

    def why_not(known: Known, sights: Sequence[Sight]) -> str | None:
        y = known.elsewhere.y
        if y.dim() != 1 or y.dtype.is_floating_point:
            return "samples do not have one class each, of which clients could have some or none"
        if not (y == label).any() or (y == label).all():
            return f"the server has no samples from elsewhere both of class {label} and of others, to learn from"
        if not _last_rows(known):
            return "the model does not end with a layer that has a row for each class and that clients train and send"
        if any(num > 1 for sight in sights for num in sight.num_clients_R):
            return "the server sees sums of several clients, and no client's own update"
        return None

    return Probe(goal=PROPERTY, run=run, why_not=why_not)


def _scores(known: Known, sight: Sight, label: int, num_shadows: int, work: Work) -> list[float]:
    """Return how likely the client of each row has the property."""
    num = int(np.median([num for num in sight.num_samples_R if num] or [known.num_train // known.num_clients]))
    index_SN, has_S = _shadow_clients(known, label, num_shadows, max(1, num), work.rng)
    start_M, features = sight.model_M, list[Tensor]()
    for part in torch.split(index_SN, STACKED):
        start_SM = start_M.expand(len(part), -1)
        try:
            model_SM = train_stacked(known, start_SM, known.elsewhere, part, sight.version, work.rng, work.is_over)
        except OutOfTime:
            if not features:
                raise
            break
        features.append(_features(known, (model_SM - start_SM)[:, : known.spec.num_trainable]))
    train_SF, rows_RF = torch.cat(features), _features(known, sight.rows.delta_D)
    return _classified(train_SF, has_S[: len(train_SF)], rows_RF)


def _shadow_clients(
    known: Known, label: int, num_shadows: int, num: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the samples of clients with random shares of classes, and which have some of `label`: every other."""
    y = known.elsewhere.y.numpy()
    labels, place_N, held = np.unique(y, return_inverse=True, return_counts=True)
    has_S = np.arange(num_shadows) % 2 == 0
    picked = []
    for has in has_S:
        share = rng.dirichlet(np.full(len(labels), rng.choice([0.3, 1.0, 10.0])))
        share = np.where(labels == label, max(share[labels == label][0], 1.5 / num) if has else 0.0, share)
        chance_N = (share / held)[place_N] + np.where(y == label, 0.0, 1e-12)
        own = rng.choice(len(y), num, p=chance_N / chance_N.sum())
        if has and not (y[own] == label).any():
            own[0] = rng.choice(np.flatnonzero(y == label))
        picked.append(own)
    return torch.from_numpy(np.stack(picked)), torch.from_numpy(has_S)


def _features(known: Known, delta_SD: Tensor) -> Tensor:
    """Return, for each class, figures of how its row of the last layer changed: sum, length, extremes, and its bias."""
    views = known.spec.without_buffers.views(delta_SD.double())
    rows_SKH = views[_last_rows(known)]
    figures_S4K = torch.stack([rows_SKH.sum(2), rows_SKH.norm(dim=2), rows_SKH.amax(2), rows_SKH.amin(2)], 1)
    features = [(figures_S4K / rows_SKH.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1)).flatten(1)]
    last = known.spec.trainable[-1]
    if last.shape == (known.num_classes,):
        features.append(views[last.name] / views[last.name].norm(dim=1, keepdim=True).clamp(min=1e-30))
    return torch.cat(features, 1)


def _last_rows(known: Known) -> str:
    """Return the name of the last layer's weights, a row for each class; empty if it has none."""
    last = known.spec.trainable[-1].name.rpartition(".")[0]
    slots = [slot for slot in known.spec.trainable if slot.name.rpartition(".")[0] == last]
    return next((slot.name for slot in slots if len(slot.shape) == 2 and slot.shape[0] == known.num_classes), "")


def _classified(train_SF: Tensor, has_S: Tensor, rows_RF: Tensor) -> list[float]:
    """Return ridge regression's answer, 1 for the property and 0 for none, for each row."""
    mean_F, spread_F = train_SF.mean(0), train_SF.std(0).clamp(min=1e-12)
    train_SF, rows_RF = (train_SF - mean_F) / spread_F, (rows_RF - mean_F) / spread_F
    num, size = train_SF.shape
    kernel_SS = train_SF @ train_SF.T / size + RIDGE / num * torch.eye(num, dtype=torch.float64)
    target_S = has_S.double() - 0.5
    weight_S: Tensor = torch.linalg.solve(kernel_SS, target_S)
    found: list[float] = (rows_RF @ train_SF.T @ weight_S / size + 0.5).tolist()
    return found
