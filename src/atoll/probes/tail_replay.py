"""Labels from gradients by a copy of the clients' last layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.core.probe import SAMPLE_LABELS, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates


def tail_replay() -> Probe:
    """Take the label whose gradient, by a copy of the client's tail, is nearest to the one that came.

    The server sent the outputs o of its layers, and averages or hands on the clients' layers: for every label k it
    computes the gradient of L(tail(o), k) by o, and compares it with what the client sent. With the labels that it has
    found it takes the client's step on its copy, by plain descent, and goes on with the next batch. Where labels stay
    with clients, this needs no statistics at all, and any number of classes.
    """

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        guesses = list[Guess]()
        for row, sight in reversed(list(enumerate(sights))):
            if sight.gradients_N is not None and sight.client_M is not None and not (work.is_over() and guesses):
                guesses.append(_replayed(known, sight, row))
        return guesses

    return Probe(
        goal=SAMPLE_LABELS,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=_why_not,
        assumes="the server looks at gradients, and knows the clients' last layers, which it averages or hands on",
    )


def _why_not(known: CutKnown, sights: Sequence[CutSight]) -> str | None:
    if all(sight.gradients_N is None for sight in sights):
        return "labels travel beside activations, and no gradient by outputs comes to the server"
    if all(sight.client_M is None for sight in sights):
        return "the clients hand their layers to each other, and the server does not get them"
    return None if len(known.labels_K) else "targets are no classes"


def _replayed(known: CutKnown, sight: CutSight, row: int) -> Guess:
    """Follow a client's task batch by batch."""
    assert sight.outputs_N is not None and sight.gradients_N is not None
    tail, places = known.client(sight.client_M)["tail"], torch.zeros(len(sight.batch_N), dtype=torch.long)
    score_N = torch.zeros(len(places), dtype=torch.float64)
    for step in torch.unique(sight.batch_N):
        behind = sight.batch_N == step
        apart_KB = _distances(known, tail, sight.outputs_N[behind], sight.gradients_N[behind])
        places[behind] = apart_KB.argmin(0)
        if len(known.labels_K) == 2:
            score_N[behind] = (apart_KB[0] - apart_KB[1]) / (apart_KB.sum(0) + 1e-300)
        _step(known, tail, sight.outputs_N[behind], known.labels_K[places[behind]], known.lr(sight.version))
    return Guess(row=row, y=known.labels_K[places], score_N=score_N if len(known.labels_K) == 2 else None)


def _distances(known: CutKnown, tail: nn.Module, outputs_B: Tensor, grads_B: Tensor) -> Tensor:
    """Return how far each label's gradients are from those that came, (K, B)."""
    found = []
    for label in known.labels_K:
        leaf_B = outputs_B.clone().requires_grad_()
        losses_B = known.loss(tail(leaf_B), label.expand(len(leaf_B)))
        [grad_B] = torch.autograd.grad(losses_B.sum() / len(leaf_B), leaf_B)
        found.append((grad_B - grads_B).flatten(1).double().norm(dim=1))
    return torch.stack(found)


def _step(known: CutKnown, tail: nn.Module, outputs_B: Tensor, labels_B: Tensor, lr: float) -> None:
    parameters = [each for each in tail.parameters() if each.requires_grad]
    if not parameters:
        return
    grads = torch.autograd.grad(known.loss(tail(outputs_B), labels_B).mean(), parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.sub_(lr * grad)
