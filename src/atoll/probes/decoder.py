"""Samples from activations, by a server that knows the clients' layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.probe import SAMPLES, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates
from atoll.probes.decoders import Decoder, best_decoder, decode, sent_by
from atoll.probes.rows import no_tokens

MOST_LAYERS = 3
"""Different layers of clients, one of each task at most, that decoders are trained for."""


def decoder() -> Probe:
    """Train a decoder on public samples that went through the clients' layers (He et al. 2019, ACSAC, section 4.1).

    The server of SplitFed averages these layers, and that of split learning in turn hands them on, so that it has a
    copy. min_D mean |D(as_sent(head(x))) - x|^2 over its own samples x; as_sent are the plan's defences with noise of
    its own. A decoder is trained for the layers that a task begins with; during the task they drift away from it.
    """

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        guesses, trained = list[Guess](), list[tuple[torch.Tensor, Decoder]]()
        for row, sight in reversed(list(enumerate(sights))):
            if sight.client_M is None or (work.is_over() and trained):
                continue
            own = next((each for layers, each in trained if torch.equal(layers, sight.client_M)), None)
            if own is None and len(trained) < MOST_LAYERS:
                own = best_decoder(known, sent_by(known, known.client(sight.client_M)["head"]), work)
                trained.append((sight.client_M, own))
            if own is not None:
                guesses.append(decode(known, sight, own, row))
        return guesses

    return Probe(
        goal=SAMPLES,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=_why_not,
        assumes="the server looks at activations, has some samples of the same kind, and knows the clients' layers, "
        "which it averages or hands on",
    )


def _why_not(known: CutKnown, sights: Sequence[CutSight]) -> str | None:
    if all(sight.client_M is None for sight in sights):
        return "the clients hand their layers to each other, and the server does not get them"
    return no_tokens(known)
