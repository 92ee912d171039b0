"""How near guessed images come to the true ones. Shapes: G guesses, N true images, P pixels of a window."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from atoll.core.probe import Known
from atoll.probes.fidelity import psnr as psnr

SHARP = 30.0
"""The PSNR from which an image counts as recovered, in dB."""
SIGMA, RADIUS = 1.5, 5
"""Standard deviation and radius of the Gaussian window of SSIM, in pixels."""
K1, K2 = 0.01, 0.03
"""The constants of SSIM."""


class Floor(NamedTuple):
    """What can be had without looking at updates: the mean PSNR of true images, in dB."""

    blank: float
    """With one grey image, of the value in the middle of the range."""
    mean: float
    """With the mean of samples from elsewhere."""
    nearest: float
    """With the one of the samples from elsewhere that is nearest to each true image, which takes the truth to find."""


class Matched(NamedTuple):
    """Guesses beside the true images that they are nearest to as a whole."""

    guess: tuple[int, ...]
    """Of each true image the guess; -1 for those that have none."""
    psnr: tuple[float, ...]
    """Of each true image, in dB; 0 for those without a guess."""
    ssim: tuple[float, ...]

    @property
    def share_sharp(self) -> float:
        """The share of true images that come out with at least 30 dB."""
        return sum(each >= SHARP for each in self.psnr) / max(len(self.psnr), 1)


def ssim(guess: Tensor, true: Tensor, span: float) -> Tensor:
    """Return the mean structural similarity of each pair of images (N, channels, height, width), (N,).

    (2 m_a m_b + c1) (2 s_ab + c2) / ((m_a^2 + m_b^2 + c1) (s_a^2 + s_b^2 + c2)), with means, variances and covariance
    under a Gaussian window (Wang et al. 2004, IEEE Trans. Image Process. 13(4), eq. 13), where it fits into the image.
    """
    a, b = guess.double(), true.double()
    radius = min(RADIUS, (min(a.shape[-2:]) - 1) // 2)
    place_P = torch.arange(-radius, radius + 1, dtype=torch.float64)
    window_P = torch.exp(-place_P.square() / (2 * SIGMA**2))
    window_P = window_P / window_P.sum()

    def smooth(images: Tensor) -> Tensor:
        flat = images.flatten(0, 1).unsqueeze(1)
        return functional.conv2d(functional.conv2d(flat, window_P.view(1, 1, -1, 1)), window_P.view(1, 1, 1, -1))

    mean_a, mean_b = smooth(a), smooth(b)
    spread_a, spread_b = smooth(a * a) - mean_a.square(), smooth(b * b) - mean_b.square()
    joint = smooth(a * b) - mean_a * mean_b
    c1, c2 = (K1 * span) ** 2, (K2 * span) ** 2
    top = (2 * mean_a * mean_b + c1) * (2 * joint + c2)
    local = top / ((mean_a.square() + mean_b.square() + c1) * (spread_a + spread_b + c2))
    return local.view(len(a), -1).mean(1)


def match(guess: Tensor, true: Tensor, span: float) -> Matched:
    """Pair guesses with true samples so that the PSNR of all pairs together is largest (Kuhn 1955, the Hungarian way).

    Every guess stands for at most one true sample. SSIM is that of images, and 0 for what is none.
    """
    each_GN = torch.stack([psnr(one.expand_as(true), true, span) for one in guess]) if len(guess) else None
    partner, decibels, alike = [-1] * len(true), [0.0] * len(true), [0.0] * len(true)
    pairs = zip(*linear_sum_assignment(-each_GN.numpy()), strict=True) if each_GN is not None else ()
    for g, n in pairs:
        assert each_GN is not None
        partner[n], decibels[n] = int(g), float(each_GN[g, n])
        if true.dim() == 4:
            alike[n] = float(ssim(guess[g : g + 1], true[n : n + 1], span))
    return Matched(guess=tuple(partner), psnr=tuple(decibels), ssim=tuple(alike))


def floors(known: Known, true: Tensor) -> Floor:
    """Return the PSNR of what needs no attack at all: honest figures to put beside those of probes."""
    span, own = known.high - known.low, known.elsewhere.x
    blank = psnr(torch.full_like(true, (known.low + known.high) / 2), true, span)
    mean = psnr(own.mean(0).expand_as(true), true, span)
    nearest = [float(psnr(own, one.expand_as(own), span).max()) for one in true]
    return Floor(float(blank.mean()), float(mean.mean()), math.fsum(nearest) / max(len(nearest), 1))
