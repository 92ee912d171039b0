"""Every algorithm with every kind of layer, in every engine, against plain PyTorch. Shapes: D parameters, B samples.

The reference below is written from the papers' equations with torch.autograd on an nn.Module, one client after another;
of Atoll it takes the first weights, the order of samples and the seeds of dropout. All is in double precision, so that
rounding cannot hide a wrong term. An algorithm that is new needs an entry in REFERENCES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hashed_keep
from torch import Tensor, nn
from torch.nn import functional

from atoll import Dataset, Plan, run
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part, members
from atoll.core.seeds import derive, generator
from atoll.engine.inline import inline
from atoll.train.batches import client_batches
from atoll.train.build import build_job

WIDTH, CLASSES, LR, ROUNDS = 6, 5, 0.3, 2
KINDS = ["batch", "group", "layer", "instance", "rms", "dropout", "lstm", "gru", "embedding", "attention"]
ALONE = {"batch", "lstm", "gru"}
"""Layers whose models are trained one by one in every engine."""
OPTIONS: dict[str, dict[str, float]] = {
    "fedprox": {"mu": 0.5},
    "feddyn": {"alpha": 0.3},
    "fedsam": {"rho": 0.2},
    "moon": {"mu": 2.0, "temperature": 0.5},
    "fedavgm": {"momentum": 0.7},
    "qffl": {"q": 1.5},
    "afl": {"step": 0.4},
    "fedexp": {"epsilon": 1e-4},
    "feddf": {"steps": 3, "batch_size": 50, "lr": 0.05, "temperature": 2.0},
}


class HashedDropout(nn.Module):
    """Dropout with the masks that Atoll promises, made in Python's integers."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.tensor(hashed_keep(self.seed, 0, x.numel(), 0.3), dtype=x.dtype).view(x.shape)
        return x * keep / 0.7


class Net(nn.Module):
    """Tokens -> embedding -> the layer in question -> scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layer: nn.Module = {
            "batch": lambda: nn.BatchNorm1d(WIDTH),
            "group": lambda: nn.GroupNorm(2, WIDTH),
            "layer": lambda: nn.LayerNorm(WIDTH),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "dropout": lambda: nn.Dropout(0.3),
            "hashed dropout": HashedDropout,
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
            "embedding": nn.Identity,
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        }[kind]()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.kind in ("batch", "group", "instance"):
            h = self.layer(h.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "attention":
            h = self.layer(h, h, h, need_weights=False)[0]
        else:
            h = self.layer(h)
            h = h[0] if isinstance(h, tuple) else h
        found: Tensor = self.out(torch.tanh(1.5 * h).mean(1))
        return found


def net(kind: str) -> nn.Module:
    return Net(kind).double()


def tokens() -> Dataset:
    """Three clients with 4, 6 and 8 samples of four tokens: other numbers of steps, and short batches."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, CLASSES, (18, 4)).astype(np.uint8), rng.integers(0, CLASSES, 18)
    owners = np.repeat([0, 1, 2], [4, 6, 8])
    return Dataset(
        name="tokens", train_x=x, train_y=y, test_x=x[:4], test_y=y[:4], num_classes=CLASSES, tokens=True, owners=owners
    )


def public() -> Dataset:
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, CLASSES, (4, 4)).astype(np.uint8), rng.integers(0, CLASSES, 4)
    return Dataset(name="public", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=CLASSES, tokens=True)


def plan_of(algorithm: str, kind: str, engine: Any = "inline") -> Plan:
    built = Part(algorithm).build("algorithms")
    model = Part(net, kind=kind)
    local = {"lr": LR} if "batch_size" in built.local else {"lr": LR, "batch_size": 4}
    return Plan(
        data=tokens,
        partition="natural",
        algorithm={"name": algorithm, **OPTIONS.get(algorithm, {})},
        local=local if built.needs_public or kind != "batch" else {**local, "buffers": "local"},
        rounds=ROUNDS,
        evaluation={"every": 0},
        engine=engine,
        **({"public": public} if built.needs_public else {}),
        **({"models": [model]} if built.work else {"model": model}),
    )


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


class Torch:
    """The federation by hand: a module, the samples of each client, and what an algorithm may ask of them."""

    def __init__(self, plan: Plan, kind: str) -> None:
        self.job = build_job(plan)
        jobs = self.job.architectures or (self.job,)
        self.model = net("hashed dropout" if kind == "dropout" else kind)
        self.first_D = jobs[0].first_D.clone()
        self.buffers = plan.local.buffers == "average"
        self.x, self.y = self.job.federation.train_x.long(), self.job.federation.train_y
        self.clients = range(3)
        self.options = plan.algorithm.options

    def indices(self, client: int) -> Tensor:
        return torch.from_numpy(np.asarray(self.job.federation.train_indices(client)))

    def num(self, client: int) -> float:
        return float(len(self.indices(client)))

    def load(self, vector_D: Tensor) -> nn.Module:
        position = 0
        stats = [b for b in self.model.buffers() if b.is_floating_point()] if self.buffers else []
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *stats]:
                tensor.copy_(vector_D[position : position + tensor.numel()].view(tensor.shape))
                position += tensor.numel()
        assert position == len(vector_D)
        return self.model

    def flat(self) -> Tensor:
        stats = [b for b in self.model.buffers() if b.is_floating_point()] if self.buffers else []
        return torch.cat([tensor.detach().reshape(-1) for tensor in [*self.model.parameters(), *stats]]).clone()

    def batches(self, client: int, number: int) -> list[Tensor]:
        job = self.job.architectures[0] if self.job.architectures else self.job
        return [torch.from_numpy(np.asarray(b)) for b in client_batches(job, Task(client, number, number))]

    def seed(self, purpose: str, client: int, number: int, step: int) -> None:
        for module in self.model.modules():
            if isinstance(module, HashedDropout):
                module.seed = (derive(self.job.seed, purpose, number, client) >> 2) + step

    def slope(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """The gradient of a loss of the module as it stands; statistics have none."""
        self.model.zero_grad()
        loss_of().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        grad_D = torch.cat([grad.reshape(-1) for grad in grads])
        return functional.pad(grad_D, (0, len(self.first_D) - len(grad_D)))

    def loss(self, batch: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(self.x[batch]), self.y[batch])

    def grad_at(self, vector_D: Tensor, batch: Tensor) -> Tensor:
        here = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.load(vector_D)
        grad_D = self.slope(lambda: self.loss(batch))
        self.model.load_state_dict(here)  # a second look moves no statistics
        return grad_D

    def features(self, vector_D: Tensor, batch: Tensor) -> Tensor:
        here, seen = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}, []
        self.load(vector_D)
        handle = self.model.out.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        self.model(self.x[batch])
        handle.remove()
        self.model.load_state_dict(here)
        return seen[0]

    def train(self, start_D: Tensor, client: int, number: int, rule: Any = None, purpose: str = "dropout") -> Tensor:
        """One client's steps; `rule` makes the gradient of a step from (vector, batch)."""
        self.load(start_D).train()
        batches = self.batches(client, number)
        for step, batch in enumerate(batches):
            self.seed(purpose, client, number, step)
            here_D = self.flat()
            grad_D = self.slope(lambda batch=batch: self.loss(batch)) if rule is None else rule(here_D, batch)
            grad_D[sum(p.numel() for p in self.model.parameters()) :] = 0  # statistics move by themselves
            self.load(self.flat() - LR * grad_D)
        return self.flat()

    def home_loss(self, vector_D: Tensor, client: int) -> float:
        """The mean loss of a model on all of a client's samples, in evaluation mode.

        Batch norm whose statistics stay with the clients takes those of the samples.
        """
        self.load(vector_D).eval()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train()
        with torch.no_grad():
            return float(self.loss(self.indices(client)))

    def scores(self, vector_D: Tensor) -> Tensor:
        self.load(vector_D).eval()
        with torch.no_grad():
            return self.model(torch.from_numpy(public().train_x).long())


Server = Callable[[Torch, Tensor, list[Tensor], dict[str, Any]], Tensor]


def mean(torch_: Torch, values: list[Any], weights: list[float] | None = None) -> Any:
    weights = weights or [torch_.num(client) for client in torch_.clients]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def averaging(server: Server | None = None, rule: Any = None) -> Callable[[Torch], Tensor]:
    """Local training by a rule, the mean of the deltas by samples, and what the server makes of it."""

    def rounds(by: Torch) -> Tensor:
        now_D, memory = by.first_D, dict[str, Any]()
        for number in range(ROUNDS):
            deltas = []
            for client in by.clients:
                used = None if rule is None else rule(by, now_D, client, memory)
                deltas.append(by.train(now_D, client, number, used) - now_D)
                memory["model", client] = now_D + deltas[-1]
            now_D = now_D + mean(by, deltas) if server is None else server(by, now_D, deltas, memory)
        return now_D

    return rounds


def prox(by: Torch, sent_D: Tensor, client: int, memory: dict[Any, Any]) -> Any:
    return lambda here_D, batch: by.slope(lambda: by.loss(batch)) + by.options["mu"] * (here_D - sent_D)


def sam(by: Torch, sent_D: Tensor, client: int, memory: dict[Any, Any]) -> Any:
    def rule(here_D: Tensor, batch: Tensor) -> Tensor:
        grad_D = by.slope(lambda: by.loss(batch))
        return by.grad_at(here_D + by.options["rho"] * grad_D / grad_D.norm(), batch)

    return rule


def contrast(by: Torch, sent_D: Tensor, client: int, memory: dict[Any, Any]) -> Any:
    before_D = memory.get(("model", client), sent_D)
    heat = by.options["temperature"]

    def rule(here_D: Tensor, batch: Tensor) -> Tensor:
        glob, prev = by.features(sent_D, batch), by.features(before_D, batch)

        def loss() -> Tensor:
            seen: list[Tensor] = []
            handle = by.model.out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
            plain = by.loss(batch)
            handle.remove()
            near = torch.exp(functional.cosine_similarity(seen[0], glob) / heat)
            far = torch.exp(functional.cosine_similarity(seen[0], prev) / heat)
            return plain + by.options["mu"] * -torch.log(near / (near + far)).mean()

        return by.slope(loss)

    return rule


def momentum(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    memory["v"] = by.options["momentum"] * memory.get("v", 0) + mean(by, deltas)
    return now_D + memory["v"]


def adaptive(second: Callable[[Any, Tensor], Tensor], beta1: float, lr: float) -> Server:
    def server(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
        delta_D = mean(by, deltas)
        memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * delta_D
        memory["v"] = second(memory.get("v", torch.full_like(now_D, 1e-6)), delta_D**2)
        return now_D + lr * memory["m"] / (memory["v"].sqrt() + 1e-3)

    return server


def longer(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    delta_D = mean(by, deltas)
    squares = mean(by, [float(each @ each) for each in deltas])
    return now_D + max(1.0, squares / (2 * (float(delta_D @ delta_D) + by.options["epsilon"]))) * delta_D


def normalised(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    steps = [len(by.batches(client, 0)) for client in by.clients]
    assert len(set(steps)) > 1
    directions = [delta_D / num for delta_D, num in zip(deltas, steps, strict=True)]
    return now_D + mean(by, steps) * mean(by, directions)


def fair(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    q, losses = by.options["q"], [by.home_loss(now_D, client) for client in by.clients]
    pairs = [(loss, -delta_D / LR) for loss, delta_D in zip(losses, deltas, strict=True)]
    pushes = [loss**q * slope_D for loss, slope_D in pairs]
    scales = [q * loss ** (q - 1) * float(slope_D @ slope_D) + loss**q / LR for loss, slope_D in pairs]
    return now_D - mean(by, pushes) / mean(by, scales)


def agnostic(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    losses = [by.home_loss(now_D, client) for client in by.clients]
    for client, loss in zip(by.clients, losses, strict=True):
        gap = loss - memory.get("usual", loss)
        memory["log", client] = memory.get(("log", client), 0.0) + by.options["step"] * gap
    weights = [math.exp(memory["log", client]) for client in by.clients]
    memory["usual"] = mean(by, losses, weights)
    return now_D + mean(by, deltas, weights)


def distilled(by: Torch, now_D: Tensor, deltas: list[Tensor], memory: dict[Any, Any]) -> Tensor:
    steps, heat = int(by.options["steps"]), by.options["temperature"]
    wanted = torch.stack([by.scores(now_D + delta_D) for delta_D in deltas]).mean(0)
    by.load(now_D + mean(by, deltas)).eval()
    optimizer = torch.optim.Adam(by.model.parameters(), lr=by.options["lr"])
    x = torch.from_numpy(public().train_x).long()
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = by.options["lr"] * (1 + math.cos(math.pi * number / steps)) / 2
        optimizer.zero_grad()
        own = functional.log_softmax(by.model(x) / heat, -1)
        target = functional.softmax(wanted / heat, -1)
        (heat**2 * functional.kl_div(own, target, reduction="batchmean")).backward()
        optimizer.step()
    return by.flat()


def scaffold(by: Torch) -> Tensor:
    now_D, control_D = by.first_D, torch.zeros_like(by.first_D)
    own = [torch.zeros_like(now_D) for _ in by.clients]
    for number in range(ROUNDS):
        ends, changes = [], []
        for client in by.clients:
            fix_D = control_D - own[client]
            end_D = by.train(now_D, client, number, lambda _, b, fix=fix_D: by.slope(lambda: by.loss(b)) + fix)
            fresh_D = own[client] - control_D + (now_D - end_D) / (len(by.batches(client, number)) * LR)
            changes.append(fresh_D - own[client])
            own[client] = fresh_D
            ends.append(end_D)
        now_D, control_D = torch.stack(ends).mean(0), control_D + torch.stack(changes).mean(0)
    return now_D


def feddyn(by: Torch) -> Tensor:
    now_D, alpha = by.first_D, by.options["alpha"]
    dual_D, own = torch.zeros_like(now_D), [torch.zeros_like(now_D) for _ in by.clients]
    for number in range(ROUNDS):
        ends = []
        for client in by.clients:

            def rule(here_D: Tensor, batch: Tensor, sent: Tensor = now_D, dual: Tensor = own[client]) -> Tensor:
                return by.slope(lambda: by.loss(batch)) - dual + alpha * (here_D - sent)

            ends.append(by.train(now_D, client, number, rule))
            own[client] = own[client] - alpha * (ends[-1] - now_D)
        dual_D = dual_D - alpha / len(ends) * sum(end_D - now_D for end_D in ends)
        now_D = torch.stack(ends).mean(0) - dual_D / alpha
    return now_D


def fedmd(by: Torch) -> Tensor:
    models = [by.first_D] * 3
    consensus = torch.zeros(4, CLASSES, dtype=torch.float64)
    x = torch.from_numpy(public().train_x).long()
    for number in range(ROUNDS):
        for client in by.clients:
            if number:
                order = generator(by.job.seed, "digest", number, client).permutation(4)
                by.load(models[client]).train()
                by.seed("digest", client, number, 0)
                aim = consensus[order]
                grad_D = by.slope(lambda aim=aim, order=order: (by.model(x[order]) - aim).abs().mean())
                models[client] = by.flat() - LR * grad_D
            models[client] = by.train(models[client], client, number)
        consensus = torch.stack([by.scores(model_D) for model_D in models]).mean(0)
    return consensus.reshape(-1)


REFERENCES: dict[str, Callable[[Torch], Tensor]] = {
    "fedavg": averaging(),
    "fedsgd": averaging(),
    "fedprox": averaging(rule=prox),
    "fedsam": averaging(rule=sam),
    "moon": averaging(rule=contrast),
    "fedavgm": averaging(momentum),
    "fedadagrad": averaging(adaptive(lambda v, square: v + square, 0.0, 0.1)),
    "fedadam": averaging(adaptive(lambda v, square: 0.99 * v + 0.01 * square, 0.9, 0.03)),
    "fedyogi": averaging(adaptive(lambda v, square: v - 0.01 * square * (v - square).sign(), 0.9, 0.03)),
    "fedexp": averaging(longer),
    "fednova": averaging(normalised),
    "qffl": averaging(fair),
    "afl": averaging(agnostic),
    "feddf": averaging(distilled),
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fedmd": fedmd,
}


# --- the law ----------------------------------------------------------------------------------------------------------


def compare(algorithm: str, kind: str, *, everywhere: bool = True) -> None:
    """Inline against plain PyTorch, and the other engines against inline."""
    expected_D = REFERENCES[algorithm](Torch(plan_of(algorithm, kind), kind))
    one_by_one = run(plan_of(algorithm, kind))
    num = len(expected_D) if algorithm == "fedmd" else sum(p.numel() for p in net(kind).parameters())
    got_D, expected_D = one_by_one.params_D[:num], expected_D[:num]
    assert (got_D - expected_D).abs().max() < 1e-9
    first_D = build_job(plan_of(algorithm, kind)).first_D[:num]
    assert (expected_D - first_D).abs().max() > 1e-2
    stacked = run(plan_of(algorithm, kind, {"name": "vectorised", "stack": 3}))
    alone = kind in ALONE or algorithm == "fedmd"
    assert stacked.engine.get("stack", 0) == (0 if alone else 3)
    assert (stacked.params_D[:num] - expected_D).abs().max() < 1e-9
    if everywhere:
        shared = run(plan_of(algorithm, kind, {"name": "processes", "stack": 3, "workers": 2}))
        assert torch.equal(shared.params_D, stacked.params_D)
        assert not alone or torch.equal(shared.params_D, one_by_one.params_D)


def test_references_are_of_members() -> None:
    assert REFERENCES.keys() <= set(members("algorithms"))


def sample() -> list[tuple[str, str]]:
    """Two kinds of layers for each algorithm, every kind several times, and the pair that was once wrong."""
    algorithms = sorted(REFERENCES)
    pairs = [(each, KINDS[(place + shift) % len(KINDS)]) for place, each in enumerate(algorithms) for shift in (0, 5)]
    return sorted({*pairs, ("fedsam", "group")})


@pytest.mark.parametrize(("algorithm", "kind"), sample())
def test_algorithms_and_layers_equal_plain_torch(algorithm: str, kind: str) -> None:
    compare(algorithm, kind, everywhere=KINDS.index(kind) % 3 == 0)


@pytest.mark.parametrize(
    ("algorithm", "rule"), [("fedavg", None), ("fedprox", prox), ("fedsam", sam), ("moon", contrast)]
)
def test_statistics_move_once_a_step(algorithm: str, rule: Any) -> None:
    """Also where an algorithm looks at the model several times; and no look changes what was sent."""
    plan = plan_of(algorithm, "batch")
    by = Torch(plan, "batch")
    sent = {0: Broadcast(by.job.first_D.clone(), {})}
    states = inline(by.job).train([Task(client, 0, 0) for client in by.clients], sent, {}).states
    for client in by.clients:
        by.model.layer.reset_running_stats()
        by.train(by.first_D, client, 0, None if rule is None else rule(by, by.first_D, client, {}))
        for name in ("running_mean", "running_var"):
            expected = by.model.get_buffer(f"layer.{name}")
            assert (states[client][f"buffer.layer.{name}"] - expected).abs().max() < 1e-12
    averaged = build_job(plan.replace({"local.buffers": "average"}))
    sent = {0: averaged.broadcast(averaged.first_D.clone(), {})}
    inline(averaged).train([Task(client, 0, 0) for client in by.clients], sent, {})
    assert torch.equal(averaged.model_of(sent[0]), averaged.first_D)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
def test_every_algorithm_with_every_layer_equals_plain_torch(algorithm: str, kind: str) -> None:
    compare(algorithm, kind)
