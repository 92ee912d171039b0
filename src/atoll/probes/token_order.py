"""A text in order, from the gradients of words and positions. Shapes: V words, T positions, E entries, P present."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.core.probe import TOKENS, Guess, Known, Probe, Sight, Work
from atoll.probes.token_bag import embedding_of, no_words, present_words

CONDITION = 1e-7
"""Singular values below this share of the largest are left out."""


def token_order() -> Probe:
    """Read a text in order off an update, where words and positions have embeddings that are added up.

    The gradient of position t is the slope d_t there (Lu et al. 2022, arXiv:2112.14087, section 3.3), and that of word
    v is the sum of d_t where v stands: G_words = A G_positions, with A[v, t] = 1 where v stands at t. Least squares
    gives A, and each position the word of its largest entry. It is exact for an update of one text, in
    any number of steps; where several were mixed it says at each position which word of all is the likeliest.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        words, places = embedding_of(known), position_of(known)
        assert words is not None and places is not None
        guesses = list[Guess]()
        for sight in sights:
            for delta_D in sight.rows.delta_D:
                views = known.spec.without_buffers.views(delta_D.double())
                word_VE, place_TE = views[f"{words}.weight"], views[places].view(-1, views[f"{words}.weight"].shape[1])
                guesses.append(_guess(word_VE, place_TE[: known.input_shape[0]], len(guesses)))
                if work.is_over():
                    return guesses
        return guesses

    return Probe(goal=TOKENS, run=run, why_not=_why_not)


def position_of(known: Known) -> str | None:
    """Return the name of the trained parameter that is added at each position; None if there is none."""
    words = embedding_of(known)
    if words is None or len(known.input_shape) != 1:
        return None
    width, length = known.model.get_parameter(f"{words}.weight").shape[1], known.input_shape[0]
    for slot in known.spec.trainable:
        layer = known.model.get_submodule(slot.name.rpartition(".")[0])
        table = isinstance(layer, nn.Embedding) or not type(layer).__module__.startswith("torch.nn")
        rows = slot.shape[-2] if len(slot.shape) > 1 else 0
        alone = len(slot.shape) == 2 or slot.shape[:-2] == (1,)
        if slot.name != f"{words}.weight" and table and alone and rows >= length and slot.shape[-1] == width:
            return slot.name
    return None


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if reason := no_words(known, sights):
        return reason
    if position_of(known) is None:
        return "the model has no trained table of positions, from which the order of the words could be read"
    return None


def _guess(word_VE: Tensor, place_TE: Tensor, row: int) -> Guess:
    present_P = present_words(word_VE).nonzero().flatten()
    if not len(present_P):
        return Guess(row=row)
    standing_PT = word_VE[present_P] @ torch.linalg.pinv(place_TE, rtol=CONDITION)
    sure_T, picked_T = standing_PT.max(0)
    rest = float((standing_PT.round() @ place_TE - word_VE[present_P]).norm() / word_VE.norm())
    return Guess(row=row, y=present_P[picked_T], sure_N=sure_T, notes={"unexplained": rest})
