"""Labels from the last layer's gradient, on real images. Shapes: K classes."""

from __future__ import annotations

import pytest
import torch
from real_images import real, seen, work
from torch import nn

from atoll.probes.label_counts import label_counts, labels_of
from atoll.probes.rows import rows_of
from atoll.simulation.seat import Watched, samples_of


def share_right(watched: Watched) -> float:
    """The share of all samples whose label is counted."""
    right = total = 0.0
    for guess in label_counts().run(watched.known, watched.sights, work()):
        assert guess.row is not None and guess.counts_K is not None
        truth_K = torch.bincount(samples_of(watched, watched.truths[0][guess.row]).y, minlength=10)
        assert guess.counts_K.sum() == truth_K.sum()
        right, total = right + float(guess.counts_K.minimum(truth_K).sum()), total + float(truth_K.sum())
    return right / total


def without_bias(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 60), nn.Tanh(), nn.Linear(60, num_classes, bias=False))


@pytest.mark.parametrize("model", ["lenet", "lenet_sigmoid", "mlp_2nn", "logistic"])
def test_a_single_label_is_always_read(model: str) -> None:
    assert share_right(seen(real("mnist", 50), model)) == 1
    assert share_right(seen(real("mnist", 50), model, steps=5)) == 1


def test_a_single_label_is_read_off_weights_where_there_is_no_bias() -> None:
    assert share_right(seen(real("mnist", 50), without_bias)) == 1


@pytest.mark.parametrize(("data", "model"), [("mnist", "lenet"), ("mnist", "mlp_2nn"), ("cifar10", "cnn_cifar")])
def test_counts_of_batches_of_8_on_untrained_models(data: str, model: str) -> None:
    assert share_right(seen(real(data, 160), model, each=8)) >= 0.95


def test_counts_where_there_is_no_bias() -> None:
    assert share_right(seen(real("mnist", 160), without_bias, each=8)) >= 0.8


@pytest.mark.parametrize("steps", [2, 10])
def test_counts_from_updates_of_several_steps(steps: int) -> None:
    assert share_right(seen(real("mnist", 160), "lenet", each=8, steps=steps)) >= 0.9


def test_labels_are_listed_by_their_counts() -> None:
    watched = seen(real("mnist", 16), "lenet", each=8)
    row = next(rows_of(watched.known, watched.sights))
    assert labels_of(watched.known, row).tolist() == sorted(samples_of(watched, watched.truths[0][0]).y.tolist())
