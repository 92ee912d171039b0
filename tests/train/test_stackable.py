"""Models that a recorded step cannot repeat are trained one by one in every engine, to the bits of the plain loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import timeless
from torch import Tensor, nn
from torch.nn import functional

from atoll import Dataset, Plan, run
from atoll.core.parts import Part
from atoll.engine.vectorised import vectorised
from atoll.train.build import build_job


class Probe(nn.Module):
    """A small network that does something to its hidden values: `act`, a method below."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = act
        self.hidden, self.out = nn.Linear(64, 12), nn.Linear(12, 10)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 12))
        self.calls, self.log, self.last = 0, [0.0], None
        self.rng, self.coin = np.random.default_rng(3), random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.hidden(x.flatten(1)))
        found: Tensor = self.out(getattr(self, self.act)(hidden))
        return found

    def functional_dropout(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.3, self.training)

    def torch_noise(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.rand(h.shape[-1])

    def bernoulli(self, h: Tensor) -> Tensor:
        return h * torch.empty_like(h).bernoulli_(0.7)

    def python_noise(self, h: Tensor) -> Tensor:
        return h * (1 + random.random())

    def numpy_noise(self, h: Tensor) -> Tensor:
        return h * (1 + float(np.random.rand()))

    def own_generator(self, h: Tensor) -> Tensor:
        return h * (1 + float(self.rng.random()))

    def own_coin(self, h: Tensor) -> Tensor:
        return h if self.coin.random() < 0.5 else h * 2

    def branch(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum() > h.numel() / 9 else h / 2

    def chosen_rows(self, h: Tensor) -> Tensor:
        return h + h[h.sum(1) > 0].mean()

    def through_numpy(self, h: Tensor) -> Tensor:
        return h * float(h.detach().numpy().max())

    def counter(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h / self.calls

    def late_counter(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h if self.calls < 3 else h / 2

    def lazy_counter(self, h: Tensor) -> Tensor:
        self.late = getattr(self, "late", 0) + 1
        return h / self.late

    def list_of_calls(self, h: Tensor) -> Tensor:
        self.log.append(1.0)
        return h / len(self.log)

    def buffer_in_place(self, h: Tensor) -> Tensor:
        self.seen += 1
        return h / self.seen

    def batch_mean(self, h: Tensor) -> Tensor:
        return h - h.mean(0)

    def kept_tensor(self, h: Tensor) -> Tensor:
        before, self.last = self.last, h.detach().mean()
        return h if before is None else h + before

    # what can be recorded

    def nothing(self, h: Tensor) -> Tensor:
        return h

    def constant_table(self, h: Tensor) -> Tensor:
        return h * self.table + torch.tensor(0.5)

    def scalar_parameter(self, h: Tensor) -> Tensor:
        return h * self.gate

    def choice_without_branch(self, h: Tensor) -> Tensor:
        return torch.where(h > 0.3, h * 2, h / 2)

    def stored_for_later(self, h: Tensor) -> Tensor:
        self.last = h.detach()
        return h


def probe(act: str) -> nn.Module:
    return Probe(act)


ALONE = {
    "functional_dropout": "random",
    "torch_noise": "random",
    "bernoulli": "random",
    "python_noise": "draws random numbers",
    "numpy_noise": "draws random numbers",
    "own_generator": "'rng'",
    "own_coin": "'coin'",
    "branch": "",
    "chosen_rows": "",
    "through_numpy": "",
    "counter": "'calls'",
    "late_counter": "'calls'",
    "lazy_counter": "'late'",
    "list_of_calls": "'log'",
    "buffer_in_place": "'seen'",
    "batch_mean": "mixes samples",
    "kept_tensor": "",
}
TOGETHER = ["nothing", "constant_table", "scalar_parameter", "choice_without_branch", "stored_for_later"]


def plan_of(model: Any, **changes: Any) -> Plan:
    """Twenty samples and batches of eight: the last batch of an epoch is short."""
    local = {"lr": 0.1, "batch_size": 8}
    base = {"partition": {"num_clients": 5}, "policy": {"size": 4}, "local": local, "rounds": 2, "engine": "inline"}
    return Plan(data=few_digits, model=model, **{**base, **changes})


def few_digits() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 17, (130, 8, 8)).astype(np.uint8), rng.integers(0, 10, 130)
    return Dataset(
        name="few", train_x=x[:100], train_y=y[:100], test_x=x[100:], test_y=y[100:], num_classes=10, scale=1 / 16
    )


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("act", ALONE)
def test_what_cannot_be_repeated_is_not_recorded(act: str, stack: int) -> None:
    engine = vectorised(build_job(plan_of(Part(probe, act=act))), stack=stack)
    engine.close()
    assert engine.trainer.stack == 0
    assert ALONE[act] in engine.trainer.alone_because


@pytest.mark.parametrize("act", ALONE)
def test_every_engine_gives_the_bits_of_the_plain_loop(act: str) -> None:
    plan = plan_of(Part(probe, act=act))
    ends = [run(plan), run(plan)]
    for engine in ({"name": "vectorised", "stack": 1}, {"name": "processes", "stack": 1, "workers": 2}):
        ends.append(run(plan.replace({"engine": engine})))
    for end in ends[1:]:
        assert torch.equal(ends[0].params_D, end.params_D)
        assert timeless(end.history) == timeless(ends[0].history)
    still_D = run(plan_of(Part(probe, act="nothing"))).params_D
    assert (ends[0].params_D - still_D).abs().max() > 1e-4


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("act", TOGETHER)
def test_what_can_be_repeated_is_recorded(act: str, stack: int, algorithm: str) -> None:
    plan = plan_of(Part(probe, act=act), algorithm=algorithm)
    stacked = run(plan.replace({"engine": {"name": "vectorised", "stack": stack}}))
    assert stacked.engine == {"name": "vectorised", "stack": stack, "compile": False}
    assert (run(plan).params_D - stacked.params_D).abs().max() < 2e-6


# --- recurrent models -------------------------------------------------------------------------------------------------


def counting() -> Dataset:
    starts = np.arange(24) % 4
    tokens = (starts[:, None] + np.arange(7)) % 6
    x, y = tokens[:, :-1].astype(np.uint8), tokens[:, 1:]
    return Dataset(
        name="counting", train_x=x, train_y=y, test_x=x[:8], test_y=y[:8], num_classes=6, tokens=True, owners=starts
    )


class Recurrent(nn.Module):
    def __init__(self, num_classes: int, layer: Callable[..., nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 4)
        self.layer = layer(4, 5, num_layers=2, batch_first=True, dropout=dropout)
        self.out = nn.Linear(5, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(self.embedding(tokens))[0])
        return found


def recurrent(num_classes: int, kind: str, dropout: float = 0.0) -> nn.Module:
    return Recurrent(num_classes, getattr(nn, kind), dropout)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "char_lstm", "hidden": 8},
        Part(recurrent, kind="GRU"),
        Part(recurrent, kind="RNN"),
        Part(recurrent, kind="LSTM", dropout=0.4),
    ],
    ids=["char_lstm", "gru", "rnn", "lstm with dropout"],
)
def test_recurrent_models_train_in_every_engine(model: Any, tmp_path: Path) -> None:
    plan = Plan(data=counting, partition="natural", model=model, local={"lr": 0.5, "batch_size": 4}, rounds=2)
    whole = run(plan.replace({"engine": "inline"}))
    engines = ["vectorised", "auto", {"name": "processes", "workers": 1}, {"name": "processes", "workers": 3}]
    for engine in engines:
        assert torch.equal(run(plan.replace({"engine": engine})).params_D, whole.params_D)
    run(plan.replace({"engine": "processes", "rounds": 1}), out=tmp_path / "run", report=False)
    assert "no stacked kernel" in json.loads((tmp_path / "run" / "run.json").read_text())["one_by_one"]
    resumed = run(plan.replace({"engine": "processes"}), out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)
    assert (whole.params_D - build_job(plan).first_D).abs().max() > 1e-2


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(9), nn.ReLU(), nn.LazyLinear(10))


def test_a_model_that_makes_its_tensors_when_first_used_is_stacked() -> None:
    stacked = run(plan_of(lazy, engine={"name": "vectorised", "stack": 3}))
    assert stacked.engine["stack"] == 3
    assert (run(plan_of(lazy)).params_D - stacked.params_D).abs().max() < 2e-6


def test_a_plain_loop_can_be_asked_for() -> None:
    plan = plan_of({"name": "mlp_2nn", "hidden": 8}, engine={"name": "processes", "stack": 0, "workers": 2})
    shared = run(plan)
    assert shared.engine["stack"] == 0
    assert torch.equal(shared.params_D, run(plan.replace({"engine": "inline"})).params_D)
