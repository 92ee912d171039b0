"""R-GAP: images from gradients of convolutions in closed form, on real images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from real_images import decibels, real, seen, work
from torch import nn

from atoll.core.probe import Work
from atoll.probes.r_gap import chain_of, r_gap
from atoll.simulation.seat import samples_of

Model = Callable[[tuple[int, ...], int], nn.Module]


def convolutions(activation: Callable[[], nn.Module], channels: int = 12) -> Model:
    """Two convolutions that lose no pixel, and the output."""

    def model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        size = channels * (input_shape[1] // 2) * (input_shape[2] // 2)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(input_shape[0], channels, 3, stride=2, padding=1), activation()),
            nn.Conv2d(channels, channels, 3, padding=1),
            activation(),
            nn.Flatten(),
            nn.Linear(size, num_classes),
        )

    return model


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.LeakyReLU])
def test_images_come_out_exactly(activation: Callable[[], nn.Module]) -> None:
    watched = seen(real("digits", 4), convolutions(activation), lr=1.0)
    assert min(decibels(r_gap(), watched)) > 60
    for guess, truth in zip(r_gap().run(watched.known, watched.sights, work()), watched.truths[0], strict=True):
        assert guess.y is not None and guess.y.tolist() == samples_of(watched, truth).y.tolist()
        assert guess.notes["rank"] == 1.0 and guess.notes["distance"] < 1e-6


def test_zeros_of_a_relu_cost_equations_and_the_attacker_sees_which_images_are_right() -> None:
    watched = seen(real("digits", 8), convolutions(nn.ReLU), lr=1.0)
    guesses = r_gap().run(watched.known, watched.sights, work())
    right = [psnr > 60 for psnr in decibels(r_gap(), watched)]
    assert right == [guess.notes["distance"] < 1e-6 for guess in guesses]
    assert sum(right) >= 4


def test_too_few_equations_are_told_by_their_rank() -> None:
    """Two channels of stride 2 keep half of the pixels; the attacker sees by itself that its image is a guess."""
    watched = seen(real("digits", 2), convolutions(nn.Sigmoid, channels=2), lr=1.0)
    for guess in r_gap().run(watched.known, watched.sights, work()):
        assert guess.notes["rank"] < 1.0
    assert max(decibels(r_gap(), watched)) < 40


def test_reasons_not_to_try() -> None:
    def why(model: object, **settings: object) -> str:
        watched = seen(real("digits", 4), model, **settings)  # type: ignore[arg-type]
        return r_gap().why_not(watched.known, watched.sights) or ""

    assert "one step on one sample" in why(convolutions(nn.Tanh), each=2)
    assert "one step on one sample" in why(convolutions(nn.Tanh), steps=2)
    assert "no convolution" in why("mlp_2nn")
    assert "no plain sequence" in why("helpers:grouped")
    assert chain_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))) is None
    assert chain_of(nn.Sequential(nn.Conv2d(2, 2, 3, groups=2))) is None
    wide = seen(real("mnist", 1), convolutions(nn.Tanh, channels=24))
    assert "at most 4,096" in (r_gap().why_not(wide.known, wide.sights) or "")


def test_noise_takes_the_image_away_and_zeros_tell_nothing() -> None:
    watched = seen(real("digits", 1), convolutions(nn.Sigmoid), lr=1.0)
    [sight] = watched.sights
    rows = sight.rows
    noisy = rows.delta_D + 0.1 * rows.delta_D.std() * torch.randn(
        rows.delta_D.shape, generator=torch.Generator().manual_seed(0)
    )
    [guess] = r_gap().run(watched.known, [sight._replace(rows=rows._replace(delta_D=noisy))], work())
    assert guess.notes["distance"] > 1e-3
    still = sight._replace(rows=rows._replace(delta_D=torch.zeros_like(rows.delta_D)))
    [guess] = r_gap().run(watched.known, [still], Work(np.random.default_rng(0), lambda: True))
    assert guess.row == 0 and guess.x is None


@pytest.mark.slow
@pytest.mark.parametrize(("data", "least"), [("mnist", 100), ("cifar10", 80)])
def test_it_beats_a_search_on_the_model_of_the_papers(data: str, least: float) -> None:
    """Real images on the sigmoid LeNet, each in seconds and without a second try."""
    assert min(decibels(r_gap(), seen(real(data, 3), "lenet_sigmoid", lr=1.0))) > least
