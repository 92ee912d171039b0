"""Decoders of activations, which an attacker trains on samples of its own. Shapes: N samples, Q values of one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.probe import CutKnown, CutSight, Guess, Work

HELD_OUT = 5
"""One in so many of the attacker's samples decides which decoder is kept."""
STEPS, BATCH, RATE = 600, 32, 2e-3
CHANNELS, HIDDEN = 32, 512
RIDGES = (1e-3, 1e-1, 10.0)
"""Penalties of the linear decoder, in units of the mean square of a row's activations."""
MOST = 256
"""Samples of a task that are decoded."""
Decoder = Callable[[Tensor], Tensor]


def decode(known: CutKnown, sight: CutSight, decoder: Decoder, row: int) -> Guess:
    """Return what a decoder makes of the first samples of a task."""
    with torch.no_grad():
        x = decoder(sight.activations_N[:MOST]).clamp(known.low, known.high)
    return Guess(row=row, x=x)


def sent_by(known: CutKnown, head: nn.Module) -> Tensor:
    """Return what a client with such a head would send of the attacker's own samples."""
    with torch.no_grad():
        return known.as_sent(torch.cat([head(part) for part in torch.split(known.elsewhere.x, 256)]))


def best_decoder(known: CutKnown, activations_N: Tensor, work: Work) -> Decoder:
    """Train decoders on pairs of activations and samples; return the one with the least error on those kept apart.

    They are the mean sample, a ridge regression for each of RIDGES, and a network: of convolutions where activations
    and samples are images, else of two layers.
    """
    x = known.elsewhere.x.to(activations_N.dtype)
    apart = torch.arange(len(x)) % HELD_OUT == HELD_OUT - 1
    mean_Q, spread_Q = activations_N[~apart].mean(0), activations_N[~apart].std(0, correction=0)
    usual = spread_Q[spread_Q > 0].mean() if bool((spread_Q > 0).any()) else torch.ones(())

    def scaled(values_N: Tensor) -> Tensor:
        return (values_N - mean_Q) / (spread_Q + 0.1 * usual)

    mean_x = x[~apart].mean(0)
    network = _trained(scaled(activations_N[~apart]), x[~apart], mean_x, work)
    tries: list[Decoder] = [lambda values: mean_x.expand(len(values), *mean_x.shape)]
    tries += _ridges(scaled(activations_N[~apart]), x[~apart])
    tries.append(network)
    with torch.no_grad():
        errors = [float((each(scaled(activations_N[apart])) - x[apart]).square().mean()) for each in tries]
    best = tries[int(np.nanargmin(errors))]
    return lambda values: best(scaled(values))


def _ridges(inputs_N: Tensor, x: Tensor) -> list[Decoder]:
    """Return linear decoders x = K(z, Z) (K(Z, Z) + r I)^-1 (X - mean) + mean."""
    flat, mean_x = inputs_N.flatten(1).double(), x.mean(0)
    kernel = flat @ flat.T
    values, vectors = torch.linalg.eigh(kernel)
    turned = vectors.T @ (x - mean_x).flatten(1).double()
    size = float(kernel.diagonal().mean())

    def decoder(ridge: float) -> Decoder:
        weights = flat.T @ (vectors @ (turned / (values.clamp(min=0) + ridge * size).unsqueeze(1)))
        weights = weights.to(x.dtype)
        return lambda rows: (rows.flatten(1) @ weights).view(len(rows), *mean_x.shape) + mean_x

    return [decoder(ridge) for ridge in RIDGES]


def _trained(inputs_N: Tensor, x: Tensor, mean_x: Tensor, work: Work) -> Decoder:
    """Train a network by Adam to the least square error, until the steps or the time are over."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(work.rng.integers(2**62)))
        network = _network(tuple(inputs_N.shape[1:]), tuple(x.shape[1:])).to(x.dtype)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    order = torch.from_numpy(work.rng.integers(0, len(x), (STEPS, min(BATCH, len(x)))))
    for step, rows in enumerate(order):
        if work.is_over():
            break
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        loss = (network(inputs_N[rows]) + mean_x - x[rows]).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return lambda rows: network(rows) + mean_x


def _network(shape: tuple[int, ...], x_shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == len(x_shape) == 3:
        return _Images(shape, x_shape)
    layers = [nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, math.prod(x_shape))]
    return nn.Sequential(*layers, nn.Unflatten(1, x_shape))


class _Images(nn.Module):
    """Convolve, enlarge to the size of a sample, and convolve."""

    def __init__(self, shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.size = x_shape[1:]
        self.first = nn.Conv2d(shape[0], CHANNELS, 3, padding=1)
        self.middle = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.last = nn.Conv2d(CHANNELS, x_shape[0], 5, padding=2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.first(inputs))
        hidden = functional.interpolate(hidden, size=self.size, mode="bilinear", align_corners=False)
        found: Tensor = self.last(functional.relu(self.middle(hidden)))
        return found
