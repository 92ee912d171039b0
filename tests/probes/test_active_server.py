"""A server that plants its own model, against the samples behind a secure sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from probes.membership_plans import few
from torch import Tensor, nn

from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.probe import Known, Work
from atoll.data.catalog.cifar10 import cifar10
from atoll.data.catalog.digits import digits
from atoll.data.catalog.mnist import mnist
from atoll.data.dataset import Dataset
from atoll.probes.trap_weights import binned_layers, trap_weights
from atoll.simulation.seat import Watched, samples_of, watch

ONE_STEP = {"steps": 1, "batch_size": "all", "lr": 0.1}


class Recovered(NamedTuple):
    """What the server got of the samples behind the first row."""

    watched: Watched
    share: float
    """Of the samples, those above 30 dB."""
    surest_right: float
    """Of the half of its guesses that it is surest of, those above 30 dB."""


def fresh_work() -> Work:
    return Work(np.random.default_rng(0), lambda: False)


def recovered(data: Dataset, *, planted: bool = True, **changes: Any) -> Recovered:
    """Let ten clients train one round on a planted model, and add up in secret."""
    probe = trap_weights()
    settings = {"local": ONE_STEP, "secagg": {}, "model": "mlp_2nn", **changes}
    plan = Plan(data=data, partition=Part("iid", num_clients=10), **settings)

    def plant(known: Known, model_M: Tensor) -> Tensor:
        assert probe.plant is not None
        return probe.plant(known, model_M, fresh_work())

    watched = watch(plan, 1, plant=plant if planted else None)
    known, sights = watched.known, watched.sights
    assert probe.why_not(known, sights) is None and sights[0].num_clients_R == (10,)
    [guess] = probe.run(known, sights, fresh_work())
    true_NF = samples_of(watched, watched.truths[0][0]).x.flatten(1).double()
    assert guess.x is not None
    mse_GN = torch.cdist(guess.x.flatten(1).double(), true_NF).square() / true_NF.shape[1]
    hit_GN = 10 * torch.log10((known.high - known.low) ** 2 / mse_GN) > 30
    surest = hit_GN.any(1)[: max(1, len(hit_GN) // 2)]
    return Recovered(watched, float(hit_GN.any(0).double().mean()), float(surest.double().mean()))


def test_single_samples_come_out_of_a_secure_sum_of_ten_clients() -> None:
    got = recovered(few(digits(), 50))
    assert got.share > 0.5 and got.surest_right == 1.0
    assert len(samples_of(got.watched, got.watched.truths[0][0]).x) == 50


def test_an_honest_model_gives_no_sample_away() -> None:
    assert recovered(few(digits(), 50), planted=False).share == 0


def test_bins_hold_equal_shares_of_samples_from_elsewhere() -> None:
    known = recovered(few(digits(), 50)).watched.known
    probe = trap_weights()
    assert probe.plant is not None
    views = known.spec.views(probe.plant(known, torch.randn(known.spec.num_params), fresh_work()))
    active_NH = known.elsewhere.x.flatten(1) @ views["1.weight"].T + views["1.bias"] > 0
    num_H = active_NH.sum(0)
    assert num_H[0] == len(active_NH) and (num_H.diff() <= 0).all() and num_H.diff().min() >= -5
    assert (views["3.weight"] == views["3.weight"][:, :1]).all()  # every bin counts the same further on


def test_models_that_bins_do_not_fit_are_refused() -> None:
    flat, linear = nn.Flatten(), nn.Linear(4, 3)
    assert binned_layers(nn.Sequential(flat, linear, nn.ReLU(), nn.Linear(3, 2))) == ("1", "3")
    for between in ([nn.Tanh()], [], [nn.ReLU(), nn.ReLU()]):
        assert binned_layers(nn.Sequential(flat, linear, *between, nn.Linear(3, 2))) is None
    assert binned_layers(nn.Sequential(nn.Conv2d(1, 1, 1), flat, linear, nn.ReLU(), nn.Linear(3, 2))) is None
    assert binned_layers(nn.Sequential(flat, linear)) is None
    watched = watch(Plan(data=few(digits(), 50), partition=Part("iid", num_clients=10), model="logistic"), 1)
    assert "two fully connected layers" in (trap_weights().why_not(watched.known, watched.sights) or "")


@pytest.mark.slow
@pytest.mark.parametrize("source", [mnist, cifar10])
def test_half_of_a_hundred_pictures_come_out_of_a_sum(source: Any) -> None:
    got = recovered(few(source(quiet=True), 100))
    assert got.share > 0.5 and got.surest_right == 1.0
    steps = recovered(few(source(quiet=True), 100), local={"epochs": 1, "batch_size": 5, "lr": 0.1})
    assert steps.share > 0.2
