"""Samples from activations, by a server that does not know the clients' layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.core.probe import SAMPLES, CutKnown, CutSight, Guess, Probe, Work, nothing_of_updates
from atoll.probes.decoders import best_decoder, decode, sent_by
from atoll.probes.rows import no_tokens

STEPS, BATCH, RATE = 300, 32, 2e-3


def decoder_blind() -> Probe:
    """Train layers that stand for the clients', and a decoder for these (Gao and Zhang 2023, PCAT, USENIX Security).

    The server's own layers say what activations should look like: layers in front of them that make public samples come
    out with their labels, min mean L(server(h(x)), y), give activations that are like the clients'. The server's layers
    stay as they are. With a tail, one is trained too.
    """

    def at_cut(known: CutKnown, sights: Sequence[CutSight], work: Work) -> list[Guess]:
        row, last = len(sights) - 1, sights[-1]
        stages = pseudo_client(known, last, work)
        own = best_decoder(known, sent_by(known, stages["head"]), work)
        version = [place for place, sight in enumerate(sights) if sight.version == last.version]
        return [decode(known, sights[place], own, place) for place in version or [row]]

    return Probe(
        goal=SAMPLES,
        run=nothing_of_updates,
        at_cut=at_cut,
        why_not_at_cut=lambda known, sights: no_tokens(known) if sights else "no client sent activations",
        assumes="the server looks at activations, has labelled samples of the same kind and its own layers, and knows "
        "the shape of the clients' layers, not their values",
    )


def pseudo_client(known: CutKnown, sight: CutSight, work: Work) -> nn.ModuleDict:
    """Train layers of the clients' shape on public samples, through the server's layers as they are."""
    stages, body = known.client(None).train(), known.server(sight.server_M).eval()
    optimizer = torch.optim.Adam(stages.parameters(), lr=RATE)
    x, y = known.elsewhere.x, known.elsewhere.y
    for rows in torch.from_numpy(work.rng.integers(0, len(x), (STEPS, min(BATCH, len(x))))):
        if work.is_over():
            break
        outputs = body(known.as_sent(stages["head"](x[rows])))
        outputs = stages["tail"](outputs) if "tail" in stages else outputs
        loss = known.loss(outputs, y[rows]).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return stages.eval()
