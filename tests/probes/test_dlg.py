"""Deep leakage from gradients, on real images and the model of the paper."""

from __future__ import annotations

import numpy as np
import pytest
from real_images import decibels, real, seen

from atoll.core.probe import Work
from atoll.probes.dlg import dlg


def test_it_finds_digits() -> None:
    assert min(decibels(dlg(), seen(real("mnist", 1), "lenet_sigmoid", lr=1.0))) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("data", "iterations"), [("mnist", 2000), ("cifar10", 600)])
def test_it_finds_nine_of_ten_real_images(data: str, iterations: int) -> None:
    found = decibels(dlg(iterations=iterations), seen(real(data, 10), "lenet_sigmoid", lr=1.0))
    assert sum(each > 30 for each in found) >= 9


def test_it_returns_the_best_so_far_when_time_is_over() -> None:
    watched = seen(real("cifar10", 2), "lenet_sigmoid", lr=1.0)
    guesses = dlg().run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: True))
    assert [guess.row for guess in guesses] == [0] and guesses[0].x is not None
    assert guesses[0].notes["tries"] == 1
