"""The leak of a first linear layer, on real digits."""

from __future__ import annotations

import torch
from real_images import decibels, real, seen, work

from atoll.probes.linear_leak import linear_leak
from atoll.redteam.image_judge import match
from atoll.simulation.seat import samples_of


def test_one_image_is_exact() -> None:
    assert min(decibels(linear_leak(), seen(real("digits", 4), "mlp_2nn"))) > 100


def test_noise_is_averaged_over_all_neurons() -> None:
    """Noise puts every neuron's own sample out of range, and their least squares are still the image."""
    watched = seen(real("digits", 1), "mlp_2nn", lr=1.0)
    [sight], truth = watched.sights, watched.truths[0][0]
    noise = torch.randn(sight.rows.delta_D.shape, generator=torch.Generator().manual_seed(0))
    rows = sight.rows._replace(delta_D=sight.rows.delta_D + 2e-3 * noise)
    [guess] = linear_leak().run(watched.known, [sight._replace(rows=rows)], work())
    assert guess.x is not None and guess.x.shape == (1, 1, 8, 8)
    assert match(guess.x, samples_of(watched, truth).x, 1.0).psnr[0] > 20
    still = sight.rows._replace(delta_D=torch.zeros_like(rows.delta_D))
    [guess] = linear_leak().run(watched.known, [sight._replace(rows=still)], work())
    assert guess.x is None
