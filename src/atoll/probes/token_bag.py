"""Words of a text from the gradient of an embedding. Shapes: V words, E entries of a word, T positions, N texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.core.probe import TOKENS, Guess, Known, Probe, Sight, Work

QUIET = 1e-6
"""Share of the longest row below which a row counts as untouched."""


def token_bag() -> Probe:
    """Read words off the rows of an embedding that moved (Melis et al. 2019, arXiv:1805.04049, section 4.1).

    The gradient of row v is the sum of the slopes at the positions where word v stands, and zero where it stands
    nowhere: which words there are is exact, for any number of texts, steps and clients. How often each one stands there
    follows, in models that predict the next word, from the last layer's bias: its mean gradient is p_v - n_v / (N T),
    with p_v the mean probability of v (Zhao et al. 2020, arXiv:2001.02610, eq. 3, for counts); otherwise from the
    squared lengths of rows, which grow with it.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        guesses, name = list[Guess](), embedding_of(known)
        assert name is not None
        for sight in sights:
            for place, delta_D in enumerate(sight.rows.delta_D):
                rows_VE = known.spec.without_buffers.views(delta_D.double())[f"{name}.weight"]
                present_V = present_words(rows_VE)
                num = max(1, sight.num_samples_R[place]) * known.input_shape[0]
                share_V = _shares(known, sight, place, rows_VE)
                guesses.append(Guess(row=len(guesses), counts_K=whole_counts(share_V, present_V, num)))
                if work.is_over():
                    return guesses
        return guesses

    return Probe(goal=TOKENS, run=run, why_not=no_words)


def embedding_of(known: Known) -> str | None:
    """Return the name of the trained layer that turns words into vectors; None if there is none of its own."""
    trained = {slot.name for slot in known.spec.trainable}
    for name, module in known.model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings >= known.num_classes:
            every = known.model.named_parameters(remove_duplicate=False)
            same = sum(tensor is module.weight for _, tensor in every)
            return name if f"{name}.weight" in trained and same == 1 else None
    return None


def no_words(known: Known, sights: Sequence[Sight]) -> str | None:
    """Return why words cannot be read off an embedding."""
    if not known.tokens:
        return "the data are not texts, so there are no words to read"
    if embedding_of(known) is None:
        return (
            "the layer that turns words into numbers is not trained and sent by clients, or is at the same time the "
            "model's last layer, in which every word moves"
        )
    return None


def present_words(rows_VE: Tensor) -> Tensor:
    """Return which words occur: those whose rows moved."""
    length_V = rows_VE.norm(dim=1)
    present_V: Tensor = length_V > QUIET * length_V.max()
    return present_V


def _shares(known: Known, sight: Sight, place: int, rows_VE: Tensor) -> Tensor:
    """Return about how large the share of each word is, not below 0."""
    bias = known.spec.trainable[-1]
    if bias.shape != (known.num_classes,) or known.elsewhere.y.shape != known.elsewhere.x.shape:
        squares_V: Tensor = rows_VE.square().sum(1)
        return squares_V
    with torch.no_grad():
        outputs = known.outputs(sight.model_M, known.elsewhere.x[:64]).double().softmax(-1)
    slope_V = known.spec.without_buffers.views(known.gradients(sight)[place].double())[bias.name]
    share_V = (outputs.flatten(0, -2).mean(0) - slope_V).clamp(min=0)
    return nn.functional.pad(share_V, (0, len(rows_VE) - len(share_V)))


def whole_counts(share_V: Tensor, present_V: Tensor, num: int) -> Tensor:
    """Share out `num` words: at least one to each that is present, none to others, the rest where most is missing.

    >>> whole_counts(torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([True, True, True, False]), 10).tolist()
    [6, 1, 3, 0]
    """
    wanted_V = torch.where(present_V, share_V.double(), 0.0)
    wanted_V = wanted_V * num / wanted_V.sum().clamp(min=1e-30)
    counts_V = present_V.long()
    for _ in range(num - int(counts_V.sum())):
        counts_V[int(torch.where(present_V, wanted_V - counts_V, -torch.inf).argmax())] += 1
    return counts_V
