"""Figures for images against direct sums and published values. Shapes: G guesses, N true images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from real_images import photographs, real, seen
from torch import Tensor

from atoll.probes.fidelity import SAME
from atoll.redteam.image_judge import floors, match, psnr, ssim
from atoll.simulation.seat import samples_of


def slow_ssim(a: np.ndarray, b: np.ndarray, span: float) -> float:
    """Equation 13 of Wang et al. 2004, window by window."""
    place = np.arange(-5, 6)
    window = np.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for channel in range(len(a)):
        for top in range(a.shape[1] - 10):
            for left in range(a.shape[2] - 10):
                p = a[channel, top : top + 11, left : left + 11]
                q = b[channel, top : top + 11, left : left + 11]
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                joint = (window * (p - mp) * (q - mq)).sum()
                c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
                values.append((2 * mp * mq + c1) * (2 * joint + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return float(np.mean(values))


def crops(num: int) -> Tensor:
    return torch.from_numpy(np.asarray(photographs(32, num).train_x)).double() / 255


def test_ssim_is_that_of_the_equation() -> None:
    true = crops(4)
    noisy = (true + 0.1 * torch.randn(true.shape, generator=torch.Generator().manual_seed(0)).double()).clamp(0, 1)
    expected = [slow_ssim(a.numpy(), b.numpy(), 1.0) for a, b in zip(noisy, true, strict=True)]
    assert ssim(noisy, true, 1.0).tolist() == pytest.approx(expected, abs=1e-10)
    assert ssim(true, true, 1.0).tolist() == pytest.approx([1.0] * 4)
    assert ssim(255 * noisy, 255 * true, 255.0).tolist() == pytest.approx(expected, abs=1e-10)


def test_ssim_of_flat_images_is_the_share_of_their_means() -> None:
    a, b = torch.full((1, 1, 16, 16), 0.3), torch.full((1, 1, 16, 16), 0.6)
    c1 = 0.01**2
    assert float(ssim(a, b, 1.0)) == pytest.approx((2 * 0.18 + c1) / (0.09 + 0.36 + c1), abs=1e-6)


def test_psnr_counts_the_range_of_features() -> None:
    true = crops(2)
    assert psnr(true + 0.01, true, 1.0).tolist() == pytest.approx([40, 40])
    assert psnr(true + 0.01, true, 2.0).tolist() == pytest.approx([40 + 20 * math.log10(2)] * 2)
    assert psnr(true, true, 1.0).tolist() == [SAME, SAME]


def test_guesses_are_matched_as_a_whole() -> None:
    true = crops(4)
    found = match(true[[2, 0, 3]] + 0.01, true, 1.0)
    assert found.guess == (1, -1, 0, 2)
    assert found.psnr == pytest.approx((40, 0, 40, 40)) and found.share_sharp == 0.75
    assert found.ssim[1] == 0 and min(found.ssim[0], *found.ssim[2:]) > 0.95
    doubled = match(torch.stack([true[0], true[0] + 0.01]), true[:2], 1.0)
    assert sorted(doubled.guess) == [0, 1] and doubled.psnr[0] == SAME  # one guess does not stand for two
    assert match(true[:0], true, 1.0).psnr == (0, 0, 0, 0)


def test_floors_are_those_of_no_attack() -> None:
    watched = seen(real("mnist", 4), "logistic", each=4)
    true = samples_of(watched, watched.truths[0][0]).x
    found, own = floors(watched.known, true), watched.known.elsewhere.x
    assert found.blank == pytest.approx(float((-10 * ((true - 0.5) ** 2).mean((1, 2, 3)).log10()).mean()), abs=1e-4)
    apart = ((own[None] - true[:, None]) ** 2).mean((2, 3, 4)).min(1).values
    assert found.nearest == pytest.approx(float((-10 * apart.log10()).mean()), abs=1e-4)
    assert found.blank < found.mean < found.nearest < 30
    known = watched.known._replace(elsewhere=watched.known.elsewhere._replace(x=true))
    assert floors(known, true).nearest == SAME
