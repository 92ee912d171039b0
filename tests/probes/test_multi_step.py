"""Updates of several local steps, on real images."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from real_images import decibels, real, seen
from torch import nn

from atoll.probes.dlg import dlg
from atoll.probes.matching import gradient_of
from atoll.probes.multi_step import multi_step
from atoll.probes.rows import rows_of
from atoll.simulation.seat import samples_of


@pytest.mark.parametrize(("each", "steps"), [(1, 1), (1, 4), (2, 4)])
def test_simulated_steps_are_those_of_the_client(each: int, steps: int) -> None:
    watched = seen(real("mnist", 4), "lenet_sigmoid", each=each, steps=steps)
    for row in rows_of(watched.known, watched.sights):
        truth = samples_of(watched, watched.truths[0][row.place])
        simulated_D = gradient_of(watched.known, row, truth.x.double(), truth.y, simulate=True)
        assert torch.allclose(simulated_D, row.mean_gradient().double(), rtol=1e-3, atol=1e-5)


def normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    layers = (nn.Conv2d(1, 4, 5, stride=2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4 * 12 * 12, num_classes))


def test_steps_of_a_model_with_batch_norm_are_simulated_too() -> None:
    watched = seen(real("mnist", 3), normed, each=3, steps=3)
    row, truth = next(rows_of(watched.known, watched.sights)), samples_of(watched, watched.truths[0][0])
    simulated_D = gradient_of(watched.known, row, truth.x.double(), truth.y, simulate=True)
    assert torch.allclose(simulated_D, row.mean_gradient().double(), rtol=1e-3, atol=1e-5)


def test_batches_are_taken_in_order() -> None:
    """Two samples that are one and the same: their order is no matter."""
    data = real("mnist", 1)
    doubled = dataclasses.replace(data, train_x=data.train_x[[0, 0]], train_y=data.train_y[[0, 0]])
    watched = seen(doubled, "lenet_sigmoid", each=2, steps=3, batch_size=1)
    row, truth = next(rows_of(watched.known, watched.sights)), samples_of(watched, watched.truths[0][0])
    assert (row.num_steps, row.batch_size, row.num_samples) == (3, 1, 2)
    simulated_D = gradient_of(watched.known, row, truth.x.double(), truth.y, simulate=True)
    assert torch.allclose(simulated_D, row.mean_gradient().double(), rtol=1e-3, atol=1e-5)


def test_it_says_where_it_has_nothing_to_add() -> None:
    watched = seen(real("mnist", 1), "lenet_sigmoid")
    assert "one step" in str(multi_step().why_not(watched.known, watched.sights))


@pytest.mark.slow
def test_it_finds_what_one_step_cannot_explain() -> None:
    watched = seen(real("mnist", 1), "lenet_sigmoid", steps=5)
    assert decibels(multi_step(restarts=1), watched)[0] > 40
    assert decibels(dlg(restarts=1), watched)[0] < 20


@pytest.mark.slow
def test_it_finds_a_batch_of_two_behind_five_steps() -> None:
    assert min(decibels(multi_step(restarts=1), seen(real("mnist", 2), "lenet_sigmoid", each=2, steps=5, lr=0.01))) > 40
