"""Small federations on real images, seen from the server's seat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_sample_images
from torch import nn

from atoll import Dataset, Plan
from atoll.core.parts import Part
from atoll.core.probe import Probe, Work
from atoll.redteam.image_judge import match
from atoll.simulation.seat import Watched, samples_of, watch


def real(name: str, num: int) -> Dataset:
    """The first images for training, and 500 others for test."""
    whole = Part(name).build("data.catalog", quiet=True)
    return Dataset(
        name=name,
        train_x=whole.train_x[:num],
        train_y=whole.train_y[:num],
        test_x=whole.test_x[:500],
        test_y=whole.test_y[:500],
        num_classes=10,
        scale=whole.scale,
        shift=whole.shift,
    )


def photographs(size: int, num: int) -> Dataset:
    """Crops of two photographs, with labels that are the numbers of places in a grid of 10."""
    crops = [
        photograph[top : top + size, left : left + size].transpose(2, 0, 1)
        for top, left in [(180, 280), (40, 500), (300, 100), (120, 400), (220, 180)]
        for photograph in load_sample_images().images
    ]
    x, y = np.stack(crops), np.arange(len(crops)) % 10
    return Dataset(
        name="photographs", train_x=x[:num], train_y=y[:num], test_x=x, test_y=y, num_classes=10, scale=1 / 255
    )


def seen(
    data: Dataset, model: str | dict[str, object] | Callable[..., nn.Module], *, each: int = 1, **local: object
) -> Watched:
    """One round in which all clients train, each on so many samples; one step on all of them if nothing is said."""
    num_clients = data.num_train // each
    plan = Plan(
        data=data,
        partition={"name": "iid", "num_clients": num_clients},
        model=model,
        local={"lr": 0.1, **({"steps": 1, "batch_size": "all"} | local)},
        policy={"name": "cohort", "size": num_clients},
        rounds=1,
    )
    return watch(plan, 1)


def work(seed: int = 0) -> Work:
    """All the time in the world."""
    return Work(np.random.default_rng(seed), lambda: False)


def decibels(probe: Probe, watched: Watched) -> list[float]:
    """The PSNR of every sample of every client, by what a probe guesses."""
    assert probe.why_not(watched.known, watched.sights) is None
    found, span = list[float](), watched.known.high - watched.known.low
    for guess, truth in zip(probe.run(watched.known, watched.sights, work()), watched.truths[0], strict=True):
        true = samples_of(watched, truth).x
        found.extend(match(true[:0] if guess.x is None else guess.x, true, span).psnr)
    return found
