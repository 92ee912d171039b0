"""Words and texts from updates of a small transformer, against the texts that clients hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.core.plan import Plan
from atoll.core.probe import Guess, Work
from atoll.data.catalog.shakespeare import shakespeare
from atoll.data.dataset import Dataset
from atoll.probes.token_bag import token_bag, whole_counts
from atoll.probes.token_order import token_order
from atoll.simulation.seat import Watched, samples_of, watch

LENGTH, WORDS = 20, 60


class Transformer(nn.Module):
    """Words and positions, one layer that looks back, and scores of the next word."""

    def __init__(self, num_classes: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_classes, width), nn.Embedding(length, width)
        self.query, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.out = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[-1]))
        scores = self.query(x) @ self.keys(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + scores.masked_fill(later, -torch.inf).softmax(-1) @ self.values(x)
        x = x + self.narrow(self.wide(self.norm(x)).relu())
        found: Tensor = self.out(x)
        return found


def transformer(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Transformer(num_classes, input_shape[0])


class Tied(Transformer):
    """A transformer whose last layer is its first."""

    def __init__(self, num_classes: int, length: int) -> None:
        super().__init__(num_classes, length)
        self.out.weight = self.words.weight


def tied(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Tied(num_classes, input_shape[0])


def texts(num_classes: int = WORDS) -> Dataset:
    """Texts in which some words are common, each position followed by the next word."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, num_classes + 1)
    x = rng.choice(num_classes, size=(120, LENGTH + 1), p=share / share.sum())
    return Dataset(
        name="texts",
        train_x=x[:80, :-1],
        train_y=x[:80, 1:],
        test_x=x[80:, :-1],
        test_y=x[80:, 1:],
        num_classes=num_classes,
        tokens=True,
    )


def seen(data: Dataset, each: int = 1, model: Any = transformer, **changes: Any) -> Watched:
    """One round of four clients with so many texts each."""
    partition = {"name": "iid", "num_clients": 4, "samples_per_client": each}
    local = {"steps": 1, "batch_size": "all", "lr": 0.1}
    return watch(Plan(data=data, partition=partition, model=model, **{"local": local, **changes}), 1)


def guesses(probe: Any, watched: Watched) -> list[Guess]:
    assert probe.why_not(watched.known, watched.sights) is None
    found: list[Guess] = probe.run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: False))
    assert len(found) == 4
    return found


def shares_recovered(watched: Watched) -> list[float]:
    """Of each client's text the share of positions at which the word is right."""
    truths = [samples_of(watched, truth).x[0] for truth in watched.truths[0]]
    pairs = zip(guesses(token_order(), watched), truths, strict=True)
    return [float((guess.y == x).double().mean()) for guess, x in pairs if guess.y is not None]


@pytest.mark.parametrize("each", [1, 5])
def test_words_that_occur_are_exactly_those_that_are_found(each: int) -> None:
    watched = seen(texts(), each)
    for guess, truth in zip(guesses(token_bag(), watched), watched.truths[0], strict=True):
        counts_V = torch.bincount(samples_of(watched, truth).x.flatten(), minlength=WORDS)
        assert guess.counts_K is not None and torch.equal(guess.counts_K > 0, counts_V > 0)
        common = torch.minimum(guess.counts_K, counts_V).sum() / counts_V.sum()
        assert guess.counts_K.sum() == counts_V.sum() and common >= 0.9


def test_a_text_is_read_in_order() -> None:
    assert shares_recovered(seen(texts())) == [1.0] * 4


def test_a_text_is_read_in_order_from_several_steps() -> None:
    assert shares_recovered(seen(texts(), local={"steps": 5, "batch_size": "all", "lr": 0.1})) == [1.0] * 4


def test_sureness_falls_where_texts_are_mixed() -> None:
    alone, mixed = (
        np.mean([guess.notes["unexplained"] for guess in guesses(token_order(), seen(texts(), each))])
        for each in (1, 5)
    )
    assert alone < 1e-3 < 0.1 < mixed


def test_reasons_not_to_try() -> None:
    bare, shared = seen(texts(), model="char_lstm"), seen(texts(), model=tied)
    assert token_bag().why_not(bare.known, bare.sights) is None
    assert "no trained table of positions" in (token_order().why_not(bare.known, bare.sights) or "")
    for probe in (token_bag(), token_order()):
        assert "last layer" in (probe.why_not(shared.known, shared.sights) or "")
        numbers = bare.known._replace(tokens=False)
        assert "not texts" in (probe.why_not(numbers, bare.sights) or "")


def test_words_are_found_under_an_lstm() -> None:
    watched = seen(texts(), model={"name": "char_lstm", "hidden": 16, "layers": 1})
    for guess, truth in zip(guesses(token_bag(), watched), watched.truths[0], strict=True):
        present_V = torch.bincount(samples_of(watched, truth).x.flatten(), minlength=WORDS) > 0
        assert guess.counts_K is not None and torch.equal(guess.counts_K > 0, present_V)


def test_counts_never_leave_out_a_word_that_is_there() -> None:
    assert whole_counts(torch.zeros(4), torch.tensor([True, False, True, True]), 5).tolist() == [2, 0, 2, 1]


@pytest.mark.slow
def test_lines_of_shakespeare_are_read() -> None:
    watched = seen(shakespeare(sequence_length=LENGTH, quiet=True))
    assert min(shares_recovered(watched)) >= 0.95
    for guess, truth in zip(guesses(token_bag(), watched), watched.truths[0], strict=True):
        counts_V = torch.bincount(samples_of(watched, truth).x.flatten(), minlength=80)
        assert guess.counts_K is not None and torch.equal(guess.counts_K > 0, counts_V > 0)
        assert torch.minimum(guess.counts_K, counts_V).sum() >= 0.85 * LENGTH
