"""Shield: the defences of a party of split learning, and the secret that they draw from. Shapes: B samples of a piece.

A defence acts inside the machines, so that it holds over any transport. What it draws comes from the party's own secret
and from what it is added to (`Key`): the same values in the same place get the same noise, as a message that is sent
again must, and other values get other noise, so that whoever makes a client send twice cannot subtract it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.defence import Defence, Key, defences_of
from atoll.core.messages import Update
from atoll.core.plan import Plan
from atoll.core.privacy import CutNoise
from atoll.privacy.grid import LEVELS, bounded
from atoll.privacy.noise import derived, discrete_gaussian
from atoll.train.job import Job

UNIT = 2.0**-24
"""Step of the grid of standard normal numbers."""


class Place(NamedTuple):
    """Where a piece of a batch stands in a run."""

    attempt: int
    client: int
    step: int
    piece: int


class Shield(NamedTuple):
    """The defences of one party, one after another, and the secret that they draw from."""

    defences: tuple[Defence, ...] = ()
    secret: bytes = b""

    def shaped(self, activations_B: Tensor) -> Tensor:
        """Return the activations that are sent and trained with, before noise."""
        for each in self.defences:
            activations_B = activations_B if each.shape is None else each.shape(activations_B)
        return activations_B

    def sent(self, activations_B: Tensor, place: Place) -> Tensor:
        """Return what is sent of shaped activations."""
        for number, each in enumerate(self.defences):
            if each.hide is not None:
                activations_B = each.hide(activations_B, self._key("activations", number, place))
        return activations_B

    def pull(self, x_B: Tensor, activations_B: Tensor, share: float) -> Tensor | None:
        """Return the gradient of all penalties by a piece's activations; None if there is none."""
        penalties = [each for each in self.defences if each.penalty is not None and len(x_B) >= each.min_samples]
        if not penalties:
            return None
        leaf_B = activations_B.detach().clone().requires_grad_()
        total = torch.zeros((), dtype=leaf_B.dtype)
        for each in penalties:
            assert each.penalty is not None
            total = total + share * each.penalty(x_B.to(leaf_B.dtype), leaf_B)
        return torch.autograd.grad(total, leaf_B)[0]

    def perturbed(self, grads_B: Tensor, labels_B: Tensor, place: Place) -> Tensor:
        """Return the gradients that whoever has the labels sends."""
        for number, each in enumerate(self.defences):
            if each.perturb is not None:
                grads_B = each.perturb(grads_B, labels_B, self._key("gradients", number, place))
        return grads_B

    def _key(self, what: str, number: int, place: Place) -> Key:
        def key(values: Tensor) -> bytes:
            content = hashlib.sha256(values.detach().contiguous().numpy().tobytes()).hexdigest()
            return derived(self.secret, "cut", what, number, *place, str(tuple(values.shape)), content)

        return key


OPEN = Shield()
"""No defence."""


def build_shield(plan: Plan, job: Job) -> Shield:
    """Return the shield of a party whose secret a job has; noise that privacy accounts for comes last."""
    found = defences_of(plan)
    if job.mechanism is not None and job.mechanism.at_cut is not None:
        found = (*found, clipped_noise(job.mechanism.at_cut))
    return Shield(found, job.secret)


def clipped_noise(noise: CutNoise) -> Defence:
    """Clip each sample's activations to a norm, and send them with discrete Gaussian noise on a grid."""
    return Defence(shape=partial(clipped, norm=noise.clip), hide=partial(_noised, noise=noise), draws=True)


def clipped(activations_B: Tensor, norm: float) -> Tensor:
    """Scale each sample's activations to a norm of at most `norm`; a sample of zeros stays."""
    length_B = activations_B.flatten(1).norm(dim=1).clamp(min=torch.finfo(activations_B.dtype).tiny)
    factor_B: Tensor = (norm / length_B).clamp(max=1.0)
    return activations_B * factor_B.view(-1, *[1] * (activations_B.dim() - 1))


def _noised(activations_B: Tensor, key: Key, noise: CutNoise) -> Tensor:
    """Return clipped activations on the grid of clip / LEVELS, with noise of sigma * clip on each value."""
    rows = activations_B.flatten(1)
    steps = bounded(Update(rows, rows.new_ones(len(rows)), {}), noise.clip, LEVELS).delta_D.numpy()
    drawn = discrete_gaussian(key(activations_B), noise.sigma * LEVELS, steps.size).reshape(steps.shape)
    noisy = torch.from_numpy(steps + drawn).to(torch.float64) * (noise.clip / LEVELS)
    return noisy.to(activations_B.dtype).view(activations_B.shape)


def normal(key: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers, rounded to multiples of 2^-24, from a key that is used once."""
    num = int(torch.Size(shape).numel())
    drawn = torch.from_numpy(discrete_gaussian(key, 1 / UNIT, num)).to(torch.float64)
    return (drawn * UNIT).to(dtype).view(*shape)
