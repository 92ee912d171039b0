"""Whose samples they are: which update, or which sum, made a sample fit better. Shapes: R rows, C candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.probe import SOURCE, Guess, Known, Probe, Sight, Work
from atoll.probes.shadows import losses, scaled_confidence


def source() -> Probe:
    """Say behind which row a sample is: where it gains most (after Hu et al. 2021, arXiv:2109.05659, section IV).

    score(row, x) = phi(model + update of the row, x) - phi(model, x), with phi = log(p / (1 - p)), less the row's mean
    gain on samples from elsewhere of the same class: the row with the largest is the source. A row may be a client's or
    the sum of few; rows of the same client in several rounds are added up.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None:
            return []
        scores, senders = list[Tensor](), list[object]()
        for sight in sights:
            before_C = scaled_confidence(losses(known, sight.model_M, work.candidates))
            before_N = scaled_confidence(losses(known, sight.model_M, known.elsewhere))
            who = sight.sender_R or (None,) * len(sight.num_clients_R)
            for sender, delta_D in zip(who, sight.rows.delta_D, strict=True):
                if work.is_over() and scores:
                    break
                after_M = sight.model_M.clone()
                after_M[: len(delta_D)] += delta_D
                gain_C = scaled_confidence(losses(known, after_M, work.candidates)) - before_C
                gain_N = scaled_confidence(losses(known, after_M, known.elsewhere)) - before_N
                scores.append(gain_C - _usual(gain_N, known.elsewhere.y, work.candidates.y))
                senders.append(object() if sender is None else sender)
        pooled = [sum(s for s, who in zip(scores, senders, strict=True) if who == own) for own in senders]
        return [Guess(row=row, score_C=torch.as_tensor(each)) for row, each in enumerate(pooled)]

    return Probe(goal=SOURCE, run=run, why_not=_why_not)


def _usual(gain_N: Tensor, y_N: Tensor, y_C: Tensor) -> Tensor:
    """Return the mean gain elsewhere, of samples of the same class where targets are classes."""
    usual_C = gain_N.mean().expand(len(y_C)).clone()
    if y_N.dim() == 1 and not y_N.dtype.is_floating_point:
        for label in set(y_C.tolist()):
            if (y_N == label).any():
                usual_C[y_C == label] = gain_N[y_N == label].mean()
    return usual_C


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if sum(len(sight.num_clients_R) for sight in sights) < 2:
        return "the server saw no more than one update or sum, so there is nothing to tell apart"
    if all(num == known.num_clients for sight in sights for num in sight.num_clients_R):
        return "every sum that was opened is of all clients, and so of no one more than of another"
    return None
