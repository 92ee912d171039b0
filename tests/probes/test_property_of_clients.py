"""What updates say of clients: their classes, a property, and whose a sample is; against what clients hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from probes.membership_plans import few
from torch import nn

from atoll.core.plan import Plan
from atoll.core.probe import Guess, Probe, Samples, Work
from atoll.data.catalog.digits import digits
from atoll.data.catalog.mnist import mnist
from atoll.data.dataset import Dataset
from atoll.probes.label_distribution import label_distribution
from atoll.probes.property_inference import property_inference
from atoll.probes.source import source
from atoll.redteam.membership_judge import auc
from atoll.simulation.seat import Truth, Watched, samples_of, watch

ONE_STEP = {"steps": 1, "batch_size": "all", "lr": 0.1}
ONE_EPOCH = {"epochs": 1, "batch_size": 10, "lr": 0.1}


def without_bias(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes, bias=False))


def seen(data: Dataset | None = None, rounds: int = 1, num_clients: int = 10, **changes: Any) -> Watched:
    settings: dict[str, Any] = {
        "data": data or digits(),
        "partition": {"name": "dirichlet", "num_clients": num_clients, "alpha": 0.3},
        "model": {"name": "mlp_2nn", "hidden": 64},
        "local": ONE_STEP,
    }
    return watch(Plan(**{**settings, **changes}), rounds)


def guesses(probe: Probe, watched: Watched, candidates: Samples | None = None) -> list[Guess]:
    assert probe.why_not(watched.known, watched.sights) is None
    return probe.run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: False, candidates))


def truths(watched: Watched) -> list[Truth]:
    return [truth for row in watched.truths for truth in row]


def off(share_K: torch.Tensor, watched: Watched, truth: Truth) -> float:
    """By how much shares differ from the true ones: 0 if they are the same, 1 if they have no class in common."""
    y = samples_of(watched, truth).y
    true_K = torch.bincount(y, minlength=10) / len(y)
    return float((share_K / share_K.sum() - true_K).abs().sum() / 2)


def label_errors(watched: Watched) -> tuple[float, float]:
    """The largest error of any client's class shares, and the mean error of those who guess the usual shares."""
    usual_K = torch.bincount(watched.known.elsewhere.y, minlength=10).double()
    rows = zip(guesses(label_distribution(), watched), truths(watched), strict=True)
    errors = [off(guess.counts_K, watched, truth) for guess, truth in rows if guess.counts_K is not None]
    floor = [off(usual_K, watched, truth) for truth in truths(watched)]
    return max(errors), float(np.mean(floor))


def test_class_shares_follow_from_one_step() -> None:
    worst, floor = label_errors(seen(rounds=2))
    assert worst < 0.03 and floor > 0.4


def test_class_shares_follow_roughly_from_an_epoch() -> None:
    worst, floor = label_errors(seen(rounds=3, local={"epochs": 1, "batch_size": 10, "lr": 0.05}))
    assert worst < floor / 2


def test_counts_are_those_of_the_client() -> None:
    watched = seen()
    [guess, *_] = guesses(label_distribution(), watched)
    assert guess.counts_K is not None
    assert float(guess.counts_K.sum()) == pytest.approx(watched.sights[0].num_samples_R[0])


def test_sums_of_groups_are_of_the_clients_that_the_judge_is_told() -> None:
    alone, summed = seen(), seen(secagg={"groups": 3})
    delta_C = {truth.clients[0]: row for truth, row in zip(truths(alone), alone.sights[0].rows.delta_D, strict=True)}
    size_C = dict(zip([truth.clients[0] for truth in truths(alone)], alone.sights[0].num_samples_R, strict=True))
    assert summed.sights[0].num_clients_R == (4, 3, 3)
    for truth, row in zip(truths(summed), summed.sights[0].rows.delta_D, strict=True):
        weights = [size_C[client] / sum(size_C[each] for each in truth.clients) for client in truth.clients]
        mean = sum(weight * delta_C[client] for weight, client in zip(weights, truth.clients, strict=True))
        assert float((row - mean).norm() / row.norm()) < 1e-3


def property_area(watched: Watched, label: int, num_shadows: int) -> float:
    """Chance that a client with samples of a class scores above one without."""
    found = guesses(property_inference(label, num_shadows), watched)
    has = torch.tensor([bool((samples_of(watched, truth).y == label).any()) for truth in truths(watched)])
    return auc(torch.tensor([guess.value or 0.0 for guess in found]), has)


def test_clients_that_have_a_class_are_found() -> None:
    watched = seen(num_clients=40)
    assert np.mean([property_area(watched, label, 128) for label in (0, 3, 7)]) > 0.85


def sources_right(watched: Watched, num: int = 20) -> tuple[float, float]:
    """The share of samples whose row is named, of the first samples of each client, and what guessing gives."""
    federation, rows = watched.job.federation, watched.truths[0]
    loaded = [federation.client_samples(client).load() for client in range(federation.num_clients)]
    candidates = Samples(torch.cat([x[:num] for x, _ in loaded]), torch.cat([y[:num] for _, y in loaded]))
    owners = [client for client, (_, y) in enumerate(loaded) for _ in range(min(num, len(y)))]
    scores = torch.stack(
        [guess.score_C for guess in guesses(source(), watched, candidates) if guess.score_C is not None]
    )
    picked = scores[: len(rows)].argmax(0).tolist()
    right = [owner in rows[row].clients for owner, row in zip(owners, picked, strict=True)]
    return float(np.mean(right)), 1 / len(rows)


def test_the_client_of_a_sample_is_named_far_above_chance() -> None:
    right, guessing = sources_right(seen(few(digits(), 200), partition={"name": "iid", "num_clients": 10}))
    assert right > 4 * guessing


def test_the_sum_that_a_sample_is_in_is_named_above_chance() -> None:
    plan = {"partition": {"name": "iid", "num_clients": 10}, "secagg": {"groups": 3}}
    right, guessing = sources_right(seen(few(digits(), 200), **plan))
    assert guessing == pytest.approx(1 / 3) and right > 0.5


def test_reasons_not_to_try() -> None:
    summed = seen(secagg={})
    known, sights = summed.known, summed.sights
    assert "of several clients" in (property_inference().why_not(known, sights) or "")
    assert "no more than one" in (source().why_not(known, sights) or "")
    assert "of all clients" in (source().why_not(known, [*sights, *sights]) or "")
    assert "class 99" in (property_inference(99).why_not(known, []) or "")
    numbers = known._replace(elsewhere=known.elsewhere._replace(y=known.elsewhere.y.float()))
    for probe in (label_distribution(), property_inference()):
        assert "one class each" in (probe.why_not(numbers, []) or "")
    bare = seen(model=without_bias)
    assert "bias for each of 10" in (label_distribution().why_not(bare.known, bare.sights) or "")


@pytest.mark.slow
def test_digits_of_clients_that_train_an_epoch_are_found() -> None:
    watched = seen(few(mnist(quiet=True), 2000), rounds=3, num_clients=40, local=ONE_EPOCH)
    assert min(property_area(watched, label, 256) for label in (0, 3, 7)) > 0.85
    assert sources_right(seen(few(mnist(quiet=True), 400), partition={"name": "iid", "num_clients": 10}))[0] > 0.5
