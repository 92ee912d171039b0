"""Measures of heterogeneity against closed forms, plain computation and scikit-learn.

Shapes: C clients, D parameters, S samples of a client.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import dropped, normed
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

from atoll import Dataset, Plan
from atoll.core.errors import PlanError
from atoll.train.build import build_job
from atoll.train.job import Job
from atoll.train.measure import (
    dissimilarity,
    drift,
    first_order,
    gamma,
    gradients,
    is_convex,
    losses,
    pseudo_gradient,
    shares,
)

D = 3


class Quadratic(nn.Module):
    """A sample is a centre x and a curvature A; the output is its loss 0.5 (w - x)^T A (w - x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        off, curvature = self.w - x[..., :D], x[..., D:].unflatten(-1, (D, D))
        return 0.5 * torch.einsum("...i,...ij,...j->...", off, curvature, off)


def itself(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs


def quadratics(seed: int = 0, sizes: tuple[int, ...] = (2, 5, 1, 4), *, same_curvature: bool = False) -> Dataset:
    """Clients whose samples have centres and curvatures of their own; coordinates are multiples of 1/8."""
    rng, num = np.random.default_rng(seed), sum(sizes)
    centre = np.round(8 * rng.normal(0, 2, (num, D))) / 8
    root = np.round(8 * rng.normal(size=(1 if same_curvature else num, D, D))) / 8
    curvature = np.broadcast_to(root @ root.transpose(0, 2, 1) + np.eye(D) / 8, (num, D, D))
    return of_samples(centre, curvature, sizes)


def of_samples(centre: np.ndarray, curvature: np.ndarray, sizes: tuple[int, ...]) -> Dataset:
    x = np.concatenate([centre, curvature.reshape(-1, D * D)], axis=1).astype(np.float32)
    y = np.zeros(len(x), dtype=np.int64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset(name="quadratics", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2, owners=owners)


def copies() -> Dataset:
    """Four clients that hold the same two samples."""
    one = quadratics(7, (2,)).train_x
    return of_samples(np.tile(one[:, :D], (4, 1)), np.tile(one[:, D:], (4, 1)), (2, 2, 2, 2))


def job_of(dataset: Dataset) -> Job:
    plan = Plan(data=lambda: dataset, partition="natural", model=Quadratic, loss=f"{__name__}:itself")
    return build_job(plan)


class Known(NamedTuple):
    """The clients' objectives written down: F_k(w) = 0.5 w^T H_k w - b_k^T w + c_k."""

    share_C: np.ndarray
    hessian_CDD: np.ndarray
    b_CD: np.ndarray
    c_C: np.ndarray

    def grads(self, w_D: np.ndarray) -> np.ndarray:
        return self.hessian_CDD @ w_D - self.b_CD

    def least(self, hessian_DD: np.ndarray, b_D: np.ndarray, c: float) -> float:
        return float(c - 0.5 * b_D @ np.linalg.solve(hessian_DD, b_D))

    def gamma(self) -> float:
        together = self.least(*(np.tensordot(self.share_C, part, 1) for part in self[1:]))
        alone = [self.least(*parts) for parts in zip(*self[1:], strict=True)]
        return together - float(self.share_C @ alone)


def known(dataset: Dataset) -> Known:
    assert dataset.owners is not None
    parts: list[tuple[Any, ...]] = []
    for client in np.unique(dataset.owners):
        x = dataset.train_x[dataset.owners == client].astype(float)
        centre, curvature = x[:, :D], x[:, D:].reshape(-1, D, D)
        pull = np.einsum("sij,sj->si", curvature, centre)
        parts.append((len(x), curvature.mean(0), pull.mean(0), 0.5 * np.mean(np.sum(pull * centre, axis=1))))
    size_C, *rest = (np.array(part) for part in zip(*parts, strict=True))
    return Known(size_C / size_C.sum(), *rest)


def everybody(job: Job) -> range:
    return range(job.federation.num_clients)


seeds = st.integers(0, 10_000)


# --- gradients --------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=seeds, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple))
def test_gradients_b_and_diversity_of_quadratics_are_the_closed_forms(seed: int, sizes: tuple[int, ...]) -> None:
    dataset = quadratics(seed, sizes)
    job, truth = job_of(dataset), known(dataset)
    grads_CD = truth.grads(job.first_D.numpy())
    np.testing.assert_allclose(gradients(job, job.first_D, everybody(job)), grads_CD, rtol=1e-10, atol=1e-10)
    found = dissimilarity(job, job.first_D, everybody(job))
    square_C, mean_D = (grads_CD**2).sum(1), truth.share_C @ grads_CD
    assert found.b == pytest.approx(math.sqrt(truth.share_C @ square_C / (mean_D @ mean_D)), rel=1e-9)
    assert found.diversity == pytest.approx(square_C.sum() / (grads_CD.sum(0) ** 2).sum(), rel=1e-9)
    assert found.b >= 1 - 1e-12 and found.diversity >= 1 / len(sizes) - 1e-12
    assert found.norm == pytest.approx(np.linalg.norm(mean_D), rel=1e-10)
    assert found.loss == pytest.approx(float(truth.share_C @ losses(job, job.first_D, everybody(job)).numpy()))


def test_of_clients_of_equal_size_the_diversity_is_b_squared_over_their_number() -> None:
    job = job_of(quadratics(3, (4, 4, 4)))
    found = dissimilarity(job, job.first_D, everybody(job))
    assert found.b > 1.05
    assert found.diversity == pytest.approx(found.b**2 / 3, rel=1e-12)


def test_b_is_infinite_where_only_the_mean_gradient_vanishes_and_1_where_all_do() -> None:
    eye = np.broadcast_to(np.eye(D), (2, D, D))
    apart = job_of(of_samples(np.array([[1.0, -2, 1.5], [1, -2, -0.5]]), eye, (1, 1)))
    assert dissimilarity(apart, apart.first_D, [0, 1]).b == math.inf
    agreed = job_of(of_samples(np.tile([1.0, -2, 0.5], (2, 1)), eye, (1, 1)))
    assert dissimilarity(agreed, agreed.first_D, [0, 1]).b == 1


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_gradients_of_digits_are_those_of_plain_torch_over_all_batches(holdout: float) -> None:
    """Clients of 718 samples, or 503, which fill several batches and part of one more."""
    plan = Plan(partition={"num_clients": 2}, model={"name": "mlp_2nn", "hidden": 8}, evaluation={"holdout": holdout})
    job = build_job(plan)
    federation = job.federation
    model = build_job(plan).model.double()
    for client in (0, 1):
        index = federation.train_indices(client)
        x = torch.from_numpy(federation.dataset.train_x[index]).double() / 16
        loss = functional.cross_entropy(model(x), federation.train_y[index])
        truth_D = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        (found_D,) = gradients(job, job.first_D, [client])
        torch.testing.assert_close(found_D, truth_D, rtol=1e-6, atol=1e-8)
        assert float(losses(job, job.first_D, [client])) == pytest.approx(float(loss.detach()), rel=1e-6)


@pytest.mark.parametrize("model", [normed, dropped])
def test_nothing_is_random_and_the_model_stays_as_it_is(model: Any) -> None:
    job = build_job(Plan(model=model, partition={"num_clients": 4}))
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    first, again = (gradients(job, job.first_D, [1, 2]) for _ in range(2))
    assert torch.equal(first, again)
    assert not first[:, job.spec.num_trainable :].any()
    calm = build_job(Plan(model=model)).model.double().eval()
    for row_D, samples in zip(first, map(job.federation.train_indices, [1, 2]), strict=True):
        x = torch.from_numpy(job.federation.dataset.train_x[samples]).double() / 16
        loss = functional.cross_entropy(calm(x), job.federation.train_y[samples])
        truth = [grad.flatten() for grad in torch.autograd.grad(loss, list(calm.parameters()))]
        torch.testing.assert_close(job.trainable(row_D), torch.cat(truth), rtol=1e-6, atol=1e-8)
    assert job.model.training and job.first_D.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1).float())


def test_what_cannot_be_measured_is_refused_with_advice() -> None:
    job = build_job(Plan(model=Stubborn))
    with pytest.raises(PlanError, match=r"cannot be measured in float64: .*; let it compute in the dtype of its"):
        gradients(job, job.first_D, [0])
    with pytest.raises(PlanError, match="no client to measure"):
        shares(job, [])


# --- Gamma ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=seeds, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
def test_gamma_of_quadratics_is_the_closed_form(seed: int, sizes: tuple[int, ...]) -> None:
    dataset = quadratics(seed, sizes)
    job, truth = job_of(dataset), known(dataset).gamma()
    found = gamma(job, job.first_D, everybody(job), convex=True, budget=500, tolerance=1e-6)
    assert found.kind == "solved" and found.norm <= 1e-6
    assert found.num_solved == found.num_solves == len(sizes) + 1
    assert found.value == pytest.approx(truth, rel=1e-8, abs=1e-8)


def test_gamma_that_is_not_solved_says_so() -> None:
    job = job_of(quadratics(1))
    hasty = gamma(job, job.first_D, everybody(job), convex=True, budget=1)
    assert hasty.kind == "estimate" and hasty.num_solved < hasty.num_solves and hasty.norm > hasty.tolerance
    unknown = gamma(job, job.first_D, everybody(job), convex=False, budget=500)
    assert unknown.kind == "estimate" and unknown.num_solved == unknown.num_solves


def noisy() -> Dataset:
    """Three classes whose labels are often wrong, so that minima of cross entropy exist."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 3)) + rng.gumbel(0, 2, (600, 3))).argmax(1)
    return Dataset(name="noisy", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=3)


def test_gamma_of_logistic_regression_agrees_with_scikit_learn() -> None:
    job = build_job(Plan(data=noisy, partition={"name": "dirichlet", "num_clients": 3, "alpha": 2.0}))
    assert is_convex(job)
    found = gamma(job, job.first_D, range(3), convex=True, budget=500)
    parts = [job.federation.train_indices(client) for client in range(3)]

    def least(index: np.ndarray) -> float:
        x, y = job.federation.dataset.train_x[index].astype(float), job.federation.dataset.train_y[index]
        fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(x, y)
        assert len(fitted.classes_) == 3
        return float(-np.mean(fitted.predict_log_proba(x)[np.arange(len(y)), y]))

    alone = [least(index) for index in parts]
    truth = least(np.concatenate(parts)) - float(shares(job, range(3)) @ alone)
    assert found.kind == "solved" and truth > 0.005
    assert found.value == pytest.approx(truth, abs=1e-6)


def test_where_no_minimum_exists_the_infimum_is_approached_from_above() -> None:
    """One class a client, and digits that a linear layer separates: every loss has the infimum 0, at no parameters."""
    job = build_job(Plan(partition={"name": "shards", "num_clients": 10, "shards_per_client": 1}))
    found = gamma(job, job.first_D, range(10), convex=True, budget=500)
    assert found.kind == "solved" and 0 < found.norm <= found.tolerance
    assert 0 < found.value < 1e-4
    alone = gamma(job, job.first_D, [3], convex=True, budget=500)
    assert alone.value == 0 and alone.num_solves == 2  # one client is all clients


def test_gamma_grows_with_label_skew() -> None:
    """A client with one class only has the infimum 0, so Gamma is then F* itself."""
    found = {}
    for name, options in (("iid", {}), ("shards", {"shards_per_client": 1})):
        job = build_job(Plan(data=noisy, partition={"name": name, "num_clients": 3, **options}))
        found[name] = gamma(job, job.first_D, range(3), convex=True, budget=500).value
    assert 0 < found["iid"] < 0.1 < 0.5 < found["shards"]


def test_only_one_linear_layer_under_cross_entropy_is_called_convex() -> None:
    assert is_convex(build_job(Plan()))
    assert not is_convex(build_job(Plan(model="mlp_2nn")))
    assert not is_convex(build_job(Plan(model=bent)))
    assert not is_convex(build_job(Plan(model=two_layers)))
    assert not is_convex(build_job(Plan(loss=f"{__name__}:saturating")))
    assert not is_convex(job_of(quadratics()))


def bent() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh())


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 10))


def saturating(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.softmax(-1)[:, 0]


# --- drift ------------------------------------------------------------------------------------------------------------


def drifted(truth: Known, w_D: np.ndarray, lr: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The bias, from where gradient descent on a quadratic ends after some steps, and its first-order prediction."""
    grads_CD = truth.grads(w_D)
    pseudo_D = np.zeros(D)
    for share, hessian_DD, grad_D in zip(truth.share_C, truth.hessian_CDD, grads_CD, strict=True):
        still_DD = np.linalg.matrix_power(np.eye(D) - lr * hessian_DD, steps)
        pseudo_D += share * np.linalg.solve(hessian_DD, (np.eye(D) - still_DD) @ grad_D) / (lr * steps)
    bent_D = np.einsum("c,cij,cj->i", truth.share_C, truth.hessian_CDD, grads_CD)
    return pseudo_D - truth.share_C @ grads_CD, -lr * (steps - 1) / 2 * bent_D


@settings(max_examples=20, deadline=None)
@given(seed=seeds, lr=st.sampled_from([0.01, 0.03]), steps=st.integers(2, 6))
def test_drift_of_quadratics_is_the_closed_form(seed: int, lr: float, steps: int) -> None:
    dataset = quadratics(seed)
    job = job_of(dataset)
    first = first_order(job, job.first_D, everybody(job))
    found = drift(job, job.first_D, everybody(job), first, lr=lr, steps=steps)
    measured_D, predicted_D = drifted(known(dataset), job.first_D.numpy(), lr, steps)
    assert found.measured == pytest.approx(np.linalg.norm(measured_D), rel=1e-7)
    assert found.predicted == pytest.approx(np.linalg.norm(predicted_D), rel=1e-9)
    gap = np.linalg.norm(measured_D - predicted_D) / np.linalg.norm(measured_D)
    assert found.gap == pytest.approx(gap, rel=1e-6, abs=1e-8)
    pseudo_D = pseudo_gradient(job, job.first_D, everybody(job), lr=lr, steps=steps)
    np.testing.assert_allclose(pseudo_D - first.grad_D, measured_D, rtol=1e-6, atol=1e-9)


def test_of_quadratics_two_steps_drift_exactly_as_predicted_and_one_step_does_not_drift() -> None:
    job = job_of(quadratics(2))
    first = first_order(job, job.first_D, everybody(job))
    two, one = (drift(job, job.first_D, everybody(job), first, lr=0.1, steps=steps) for steps in (2, 1))
    assert two.gap < 1e-12 < two.measured
    assert one.measured == one.predicted == one.gap == one.between == 0


def test_equal_hessians_leave_the_drift_of_one_holder_of_all_data() -> None:
    """Clients with different centres then add nothing: the mean of their paths is the path of the mean."""
    clients = job_of(quadratics(4, same_curvature=True))
    first = first_order(clients, clients.first_D, everybody(clients))
    found = drift(clients, clients.first_D, everybody(clients), first, lr=0.02, steps=5)
    dataset = quadratics(4, same_curvature=True)
    alone = job_of(of_samples(dataset.train_x[:, :D], dataset.train_x[:, D:], (12,)))
    central_D = pseudo_gradient(alone, alone.first_D, [0], lr=0.02, steps=5)
    pseudo_D = pseudo_gradient(clients, clients.first_D, everybody(clients), lr=0.02, steps=5)
    torch.testing.assert_close(pseudo_D, central_D, rtol=1e-10, atol=1e-10)
    assert found.between < 1e-12 * found.measured
    differing = job_of(quadratics(4))
    first = first_order(differing, differing.first_D, everybody(differing))
    other = drift(differing, differing.first_D, everybody(differing), first, lr=0.02, steps=5)
    assert other.between > 0.05 * other.predicted


def test_identical_clients_do_not_differ_in_any_measure() -> None:
    job = job_of(copies())
    found = dissimilarity(job, job.first_D, everybody(job))
    assert found.b == pytest.approx(1, abs=1e-12) and found.diversity == pytest.approx(1 / 4, abs=1e-12)
    assert gamma(job, job.first_D, everybody(job), convex=True, budget=500).value == pytest.approx(0, abs=1e-9)
    first = first_order(job, job.first_D, everybody(job))
    same = drift(job, job.first_D, everybody(job), first, lr=0.01, steps=4)
    assert same.between < 1e-12 * same.measured


@pytest.mark.parametrize("case", ["quadratics", "digits"])
def test_what_the_prediction_misses_falls_with_the_square_of_the_step(case: str) -> None:
    shards = {"name": "shards", "num_clients": 6}
    small = Plan(partition=shards, model=smooth_network)
    job = job_of(quadratics(5)) if case == "quadratics" else build_job(small)
    first = first_order(job, job.first_D, everybody(job))
    found = [drift(job, job.first_D, everybody(job), first, lr=0.01 / 2**n, steps=4) for n in range(4)]
    missed = np.array([one.gap * one.measured for one in found])
    np.testing.assert_allclose(missed[:-1] / missed[1:], 4, rtol=0.08)
    assert found[0].measured / found[1].measured == pytest.approx(2, rel=0.1)


def smooth_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))


def test_the_hessian_product_is_the_change_of_the_gradient() -> None:
    job = build_job(Plan(partition={"num_clients": 2}, model=smooth_network))
    first = first_order(job, job.first_D, [0, 1])
    ahead, behind = (gradients(job, job.first_D.double() + t * first.grad_D, [0, 1]) for t in (1e-5, -1e-5))
    share_C = torch.from_numpy(shares(job, [0, 1]))
    torch.testing.assert_close(share_C @ (ahead - behind) / 2e-5, first.central_D, rtol=1e-6, atol=1e-9)


# --- digits -----------------------------------------------------------------------------------------------------------


def test_clients_with_few_classes_differ_more_than_iid_ones() -> None:
    found = {}
    for partition in ("iid", "shards"):
        job = build_job(Plan(partition={"name": partition, "num_clients": 10}))
        clients = everybody(job)
        first = first_order(job, job.first_D, clients)
        drifts = drift(job, job.first_D, clients, first, lr=0.1, steps=5)
        found[partition] = (dissimilarity(job, job.first_D, clients).b, drifts.measured, drifts.between)
    iid, shards = found["iid"], found["shards"]
    assert iid[0] < 1.2 and shards[0] > 1.5
    assert shards[1] > 1.2 * iid[1]
    assert shards[2] > 10 * iid[2]
