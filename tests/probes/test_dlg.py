"""Deep leakage from gradients, on real images and the model of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from real_images import decibels, photographs, real, seen, work

from atoll.core.probe import Work
from atoll.probes.dlg import dlg


def test_it_finds_digits() -> None:
    assert min(decibels(dlg(), seen(real("mnist", 1), "lenet_sigmoid", lr=1.0))) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("data", "iterations"), [("mnist", 2000), ("cifar10", 600)])
def test_it_finds_nine_of_ten_real_images(data: str, iterations: int) -> None:
    found = decibels(dlg(iterations=iterations), seen(real(data, 10), "lenet_sigmoid", lr=1.0))
    assert sum(each > 30 for each in found) >= 9


@pytest.mark.slow
def test_it_finds_crops_of_photographs() -> None:
    """Where the wide model is already sure of a crop's label, its gradient is zero, and nothing leaks."""
    watched = seen(photographs(64, 3), {"name": "lenet_sigmoid", "stride": 1}, lr=1.0)
    tells = watched.sights[0].rows.delta_D.any(1).tolist()
    found = decibels(dlg(iterations=300, restarts=1), watched)
    assert sum(tells) == 2 and min(psnr for psnr, told in zip(found, tells, strict=True) if told) > 30


def test_an_update_of_zeros_tells_nothing() -> None:
    watched = seen(real("mnist", 1), "lenet_sigmoid")
    [sight] = watched.sights
    still = sight._replace(rows=sight.rows._replace(delta_D=torch.zeros_like(sight.rows.delta_D)))
    [guess] = dlg().run(watched.known, [still], work())
    assert guess.row == 0 and guess.x is None


def test_it_returns_the_best_so_far_when_time_is_over() -> None:
    watched = seen(real("cifar10", 2), "lenet_sigmoid", lr=1.0)
    guesses = dlg().run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: True))
    assert [guess.row for guess in guesses] == [0] and guesses[0].x is not None
    assert guesses[0].notes["tries"] == 1
