"""Inverting gradients on a network of kinked activations, against deep leakage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from real_images import decibels, real, seen

from atoll.core.probe import Work
from atoll.probes.dlg import dlg
from atoll.probes.inverting_gradients import inverting_gradients, signed_adam, total_variation


def test_total_variation_is_that_of_neighbours() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(2, 3, 8, 8)
    assert total_variation(stripes) == 1 and total_variation(stripes.mT) == 1
    assert total_variation(torch.full((1, 1, 4, 4), 0.7)) == 0


def test_steps_go_by_signs_and_become_smaller() -> None:
    goal = torch.tensor([[3.0, -0.002]])
    found = signed_adam(lambda x: (x - goal).square().sum(), torch.zeros(1, 2), lambda: False, 4000, 0.01)
    assert torch.allclose(found, goal, atol=1e-3)
    two = signed_adam(lambda x: (x - goal).square().sum(), torch.zeros(1, 2), lambda: False, 2, 0.01)
    assert torch.allclose(two[0, 0], torch.tensor(0.011), atol=1e-3)  # a hundred times the slope, the same step


def test_it_stops_when_time_is_over() -> None:
    watched = seen(real("cifar10", 2), "cnn_cifar")
    guesses = inverting_gradients().run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: True))
    assert [guess.row for guess in guesses] == [0] and guesses[0].notes["tries"] == 1


@pytest.mark.slow
def test_it_finds_an_image_of_a_relu_network() -> None:
    assert decibels(inverting_gradients(iterations=300, restarts=1), seen(real("cifar10", 1), "cnn_cifar"))[0] > 25


@pytest.mark.slow
def test_it_beats_deep_leakage_on_a_batch() -> None:
    watched = seen(real("cifar10", 4), "cnn_cifar", each=4)
    found = decibels(inverting_gradients(iterations=300, restarts=1), watched)
    assert np.mean(found) > np.mean(decibels(dlg(iterations=300, restarts=1), watched)) + 1
