"""Clipped sums of per-sample gradients, against a loop over samples by plain autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import convolutions, dropped, grouped, normed
from torch import Tensor, nn

from atoll import Dataset, Plan
from atoll.core.algorithm import Batch, LocalTask
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast
from atoll.models.mlp_2nn import mlp_2nn
from atoll.train import clipping, private
from atoll.train.build import build_job
from atoll.train.job import Job
from atoll.train.private import private_gradient

PRIVACY = {"name": "sample", "clip": 0.7, "sigma": 1.0, "delta": 1e-5, "test_noise": True}


class Tokens(nn.Module):
    """An embedding, a layer at every position, and an output for the whole."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes, 6)
        self.inner = nn.Linear(6, 5)
        self.wide = nn.Linear(5 * 7, 40, bias=False)
        self.each = nn.Linear(5, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states = torch.tanh(self.inner(self.table(tokens)))
        return self.each(states) + self.wide(states.flatten(1))[:, None, : self.each.out_features]


def tokens_model(num_classes: int) -> nn.Module:
    return Tokens(num_classes)


def texts() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 12, size=(60, 8))
    kind = {"tokens": True, "num_classes": 12, "name": "texts"}
    return Dataset(train_x=x[:50, :7], train_y=x[:50, 1:], test_x=x[50:, :7], test_y=x[50:, 1:], **kind)  # type: ignore[arg-type]


def patches(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Few places of many numbers, so that lengths come from products of pairs of places."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 40, 4, stride=4), nn.Tanh(), nn.Flatten(), nn.Linear(160, num_classes)
    )


class Twice(nn.Module):
    """A weight that is used in a second place, where no rule sees it."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(input_shape[1] * input_shape[2], num_classes)
        self.out = nn.Linear(num_classes, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.out(torch.tanh(self.inner(flat))) + flat[:, :30] @ self.inner.weight[:, :30].T


class Mixed(nn.Module):
    """A model that looks at the whole batch."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(input_shape[1] * input_shape[2], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1) - x.flatten(1).mean(0))


def twice(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Twice(input_shape, num_classes)


def mixed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Mixed(input_shape, num_classes)


def job_with(model: Any, data: Any = "digits", **changes: Any) -> Job:
    partition = {"name": "iid", "num_clients": 1}
    local = {"batch_size": 16, "steps": 2}
    return build_job(Plan(model=model, data=data, partition=partition, privacy=PRIVACY, local=local, **changes))


def given(job: Job, num: int = 9) -> tuple[dict[str, Tensor], Batch, LocalTask]:
    """Return parameters, a batch and a task."""
    federation = job.federation
    params_D = job.first_D * 2
    x = federation.features(federation.train_x[:num])
    weight = torch.full((num,), 1 / max(1, num))
    numbers = torch.tensor(float(len(federation.train_y)))
    outputs = lambda named, x: torch.func.functional_call(job.model, dict(named), (x,))  # noqa: E731
    order = LocalTask(
        broadcast=Broadcast(params_D, {}),
        state={},
        lr=numbers,
        num_steps=numbers,
        num_samples=numbers,
        outputs=outputs,
        grad_at=outputs,
        features=outputs,
        first_loss=numbers,
        step=numbers,
        end_D=params_D,
    )
    leaves = {slot.name: job.spec.views(params_D)[slot.name] for slot in job.spec.trainable}
    return leaves, Batch(x, federation.train_y[:num], weight), order


def no_noise(job: Job) -> Tensor:
    return torch.zeros(job.spec.num_trainable, dtype=torch.float64)


def by_hand(job: Job, leaves: dict[str, Tensor], batch: Batch) -> tuple[list[Tensor], list[float]]:
    """The clipped mean over the expected batch, and the lengths before the clip, sample after sample."""
    assert job.private is not None
    total = [torch.zeros_like(leaf) for leaf in leaves.values()]
    lengths = []
    for i in range(len(batch.y)):
        rows = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        outputs = torch.func.functional_call(job.model, rows, (batch.x[i : i + 1],))
        grads = torch.autograd.grad(job.loss(outputs, batch.y[i : i + 1]).sum(), list(rows.values()))
        length = float(torch.cat([g.reshape(-1) for g in grads]).norm())
        lengths.append(length)
        factor = min(1.0, job.private.clip / length)
        total = [t + factor * g for t, g in zip(total, grads, strict=True)]
    return [t / job.batch_size for t in total], lengths


RULED = ["logistic", "mlp_2nn", "cnn_mcmahan", convolutions, patches]


@pytest.mark.parametrize("model", RULED)
@pytest.mark.parametrize("ruled", [True, False])
def test_clipped_sums_equal_a_loop_over_samples(model: Any, ruled: bool) -> None:
    job = job_with(model)
    assert job.layers
    assert {name for layer in job.layers for name in layer.parameters} == {slot.name for slot in job.spec.trainable}
    job = job if ruled else replace(job, layers=())
    leaves, batch, order = given(job)
    loss, grads = private_gradient(job, leaves, batch, order, no_noise(job), 0)
    expected, lengths = by_hand(job, leaves, batch)
    assert max(lengths) > 0.7, "nothing is clipped"
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad - wanted).abs().max() < 1e-5
    outputs = torch.func.functional_call(job.model, leaves, (batch.x,))
    assert float(loss) == pytest.approx(float(job.loss(outputs, batch.y).mean()), rel=1e-4)


@pytest.mark.parametrize("model", [tokens_model, {"name": "char_lstm", "hidden": 6, "embedding": 4}])
def test_clipped_sums_of_sequences_equal_a_loop_over_samples(model: Any) -> None:
    job = job_with(model, data=texts)
    assert bool(job.layers) == (model is tokens_model)
    for each in (job, replace(job, layers=())):
        leaves, batch, order = given(each)
        _, grads = private_gradient(each, leaves, batch, order, no_noise(each), 0)
        for grad, wanted in zip(grads, by_hand(each, leaves, batch)[0], strict=True):
            assert (grad - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("model", [twice, mixed, grouped])
def test_models_without_rules_are_differentiated_sample_by_sample(model: Any) -> None:
    job = job_with(model)
    assert not job.layers
    leaves, batch, order = given(job)
    _, grads = private_gradient(job, leaves, batch, order, no_noise(job), 0)
    for grad, wanted in zip(grads, by_hand(job, leaves, batch)[0], strict=True):
        assert (grad - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("ruled", [True, False])
def test_few_samples_at_a_time_give_the_same(ruled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_with(convolutions)
    job = job if ruled else replace(job, layers=())
    leaves, batch, order = given(job)
    _, whole = private_gradient(job, leaves, batch, order, no_noise(job), 0)
    monkeypatch.setattr(
        private, "AT_ONCE", 2 * (sum(layer.footprint for layer in job.layers) or job.spec.num_trainable)
    )
    _, parts = private_gradient(job, leaves, batch, order, no_noise(job), 0)
    assert all((left - right).abs().max() < 1e-5 for left, right in zip(whole, parts, strict=True))


@pytest.mark.parametrize("ruled", [True, False])
@pytest.mark.parametrize("scale", [1e4, 1e15, 1e25, float("nan"), float("inf")])
def test_one_sample_moves_the_sum_by_no_more_than_the_clip(scale: float, ruled: bool) -> None:
    """However large it is; one whose gradient is not finite counts for nothing."""
    job = job_with("mlp_2nn")
    job = job if ruled else replace(job, layers=())
    leaves, batch, order = given(job)
    x = batch.x.clone()
    x[3] = x[3] * scale if scale < 1e20 or scale != scale else scale
    without = [torch.cat([each[:3], each[4:]]) for each in batch]
    _, grads = private_gradient(job, leaves, batch._replace(x=x), order, no_noise(job), 0)
    _, others = private_gradient(job, leaves, Batch(*without), order, no_noise(job), 0)
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(grads, others, strict=True)]).norm() * job.batch_size
    assert float(moved) <= 0.7 * (private.SENSITIVITY + 2**-12)
    if scale == 1e4:
        assert float(moved) == pytest.approx(0.7, rel=1e-3)
    if scale != scale:  # to the bit, with products of the same shape
        silent = batch._replace(weight=batch.weight.index_fill(0, torch.tensor([3]), 0.0))
        _, same = private_gradient(job, leaves, silent, order, no_noise(job), 0)
        assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_gradients_that_cancel_between_places_are_clipped(seed: int) -> None:
    """Two places whose gradients all but cancel, so that float32 cannot tell the length of what is left."""
    generator = torch.Generator().manual_seed(seed)
    base, left, slope = (torch.randn(1, 64, generator=generator) for _ in range(3))
    a_BTI = torch.stack([3e4 * base, 3e4 * base + 5 * left / left.norm()], dim=1)
    g_BTO = torch.stack([slope, -slope], dim=1) / slope.norm()
    part = clipping._multiplied(a_BTI, g_BTO, False)
    true = torch.einsum("bto,bti->boi", g_BTO.double(), a_BTI.double()).norm()
    assert 4 < float(true) < 6
    weight_B = private.weights_of(part.square_B, torch.tensor([True]), torch.tensor(1.0))
    assert float(part.summed(weight_B)[0].double().norm()) < 1
    assert float(true * weight_B) <= 1


def double_mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return mlp_2nn(input_shape, num_classes).double()


def test_float_errors_stay_far_below_their_margin() -> None:
    """What one sample changes, in float32 and in float64, where the grid and the noise come after."""
    changes = []
    for model in ("mlp_2nn", double_mlp):
        job = job_with(model)
        leaves, batch, _ = given(job, 200)
        wide = batch._replace(x=batch.x.to(job.spec.dtype), weight=batch.weight.to(job.spec.dtype))
        sums = []
        for keep in (slice(0, 200), slice(0, 199)):
            part = Batch(*(each[keep] for each in wide))
            _, clipped_sum = private._part(job, leaves, part, None, 0, 0)  # type: ignore[arg-type]
            sums.append(torch.cat([each.reshape(-1) for each in clipped_sum(torch.tensor(0.7, dtype=job.spec.dtype))]))
        changes.append((sums[0] - sums[1]).double())
    assert float(changes[1].norm()) == pytest.approx(1)
    assert float((changes[0] - changes[1]).norm()) < (private.SENSITIVITY - 1) / 50


@pytest.mark.parametrize("ruled", [True, False])
def test_an_empty_batch_is_noise_alone(ruled: bool) -> None:
    job = job_with("logistic")
    job = job if ruled else replace(job, layers=())
    leaves, batch, order = given(job, 0)
    noise = torch.arange(job.spec.num_trainable, dtype=torch.float64) - 40
    loss, grads = private_gradient(job, leaves, batch, order, noise, 0)
    assert float(loss) == 0
    steps = torch.cat([grad.reshape(-1) for grad in grads]).double() * job.batch_size / (0.7 * private.grid_of(job))
    assert (steps - noise).abs().max() < 1e-3


def test_dropout_differs_from_sample_to_sample() -> None:
    """Also where gradients are made sample by sample, each as a batch of its own."""
    job = replace(job_with(dropped), layers=())
    leaves, batch, order = given(job)
    same = Batch(batch.x[:1].expand(9, -1, -1, -1), batch.y[:1].expand(9), batch.weight)
    ends = []
    for seed in (0, 1, 0):
        _, grads = private_gradient(job, leaves, same, order, no_noise(job), seed)
        ends.append(torch.cat([grad.reshape(-1) for grad in grads]))
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])
    _, one = private_gradient(job, leaves, Batch(*(each[:1] for each in same)), order, no_noise(job), 0)
    assert (9 * torch.cat([grad.reshape(-1) for grad in one]) - ends[0]).abs().max() > 1e-4


class Choosing(nn.Module):
    """A model that decides by the values that it sees."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(input_shape[1] * input_shape[2], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1)) * (self.scale if float(x.sum()) > 0 else 1.0)


def choosing(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Choosing(input_shape, num_classes)


def test_a_model_that_cannot_be_mapped_over_samples_is_refused() -> None:
    job = job_with(choosing)
    leaves, batch, order = given(job)
    with pytest.raises(PlanError, match="does not allow"):
        private_gradient(job, leaves, batch, order, no_noise(job), 0)


def test_models_that_cannot_be_protected_are_refused() -> None:
    with pytest.raises(PlanError, match=r"BatchNorm2d mixes samples.*group norm"):
        job_with(normed)
    with pytest.raises(PlanError, match="losses"):
        job_with("logistic", algorithm="qffl")
    with pytest.raises(PlanError, match="scores"):
        job_with("logistic", algorithm="fedmd", public={"name": "held_out", "fraction": 0.1})
    for option, value in (("clip", 0), ("sigma", -1.0), ("delta", 0), ("delta", 1.0), ("epsilon", 0)):
        with pytest.raises(PlanError, match=option):
            build_job(Plan(privacy={**PRIVACY, option: value}))
