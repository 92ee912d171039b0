"""What every algorithm must satisfy. Shapes: D parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from atoll.api import run
from atoll.commit.server_step import stepped
from atoll.core.algorithm import Algorithm
from atoll.core.messages import Aggregate, State, Task, Update
from atoll.core.params import flatten
from atoll.core.plan import Plan
from atoll.models.lora_mlp import LowRankLinear, lora_mlp
from atoll.testing.law import Member, law, must, must_be_close, must_be_equal, must_be_state, written
from atoll.testing.runs import must_agree, must_ignore_order, must_repeat, must_resume, small_plan
from atoll.train.build import build_job
from atoll.train.job import Job, broadcast_of, first_server, layout_of
from atoll.train.trainer import Trainer

CONTRACT = Algorithm
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-3}},
    {"optimizer": "adam", "lr": 0.01},
)
"""Local settings that are tried: plain steps, and two more where the algorithm leaves the choice."""


def batch_normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a small model with batch norm."""
    channels, height, width = input_shape
    layers = (nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(3 * height * width, num_classes))


def layer_normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a small model of two layers with a norm between them that clients can be stacked with."""
    layers = (nn.Flatten(), nn.Linear(math.prod(input_shape), 16), nn.LayerNorm(16), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(16, num_classes))


def adapted(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a small model of two frozen layers with low-rank adapters."""
    return lora_mlp(input_shape, num_classes, hidden=16, rank=2)


def adapted_batch_normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a small model with batch norm and a low-rank adapter."""
    *layers, last = batch_normed(input_shape, num_classes).children()
    assert isinstance(last, nn.Linear)
    return nn.Sequential(*layers, LowRankLinear(last, rank=2, alpha=4.0))


def _plan(member: Member, local: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """Return a small plan with this algorithm, the public samples and the models that it asks for."""
    algorithm: Algorithm = member.build()
    settings = {"lr": 0.1, "batch_size": 16, **(local or {})}
    around: dict[str, Any] = {"local": {key: value for key, value in settings.items() if key not in algorithm.local}}
    if algorithm.needs_public:
        around["public"] = {"name": "held_out", "fraction": 0.1}
    if _sends_scores(algorithm):
        around["models"] = ["logistic", {"name": "mlp_2nn", "hidden": 16}]
    if algorithm.keep is not None:
        around["model"] = layer_normed
    if algorithm.prepare is not None:
        around["model"] = adapted
    if algorithm.needs_validation:
        around["evaluation"] = {"every": 0, "validation": 0.1}
    return small_plan(algorithm=member.part, policy={"size": 5}, **{**around, **changes})


def _sends_scores(algorithm: Algorithm) -> bool:
    """Return whether its clients keep models of their own and send something else, so that a plan may give several."""
    return algorithm.work is not None and not algorithm.work.build("train.works").sends_models


@law()
def every_engine_gives_the_same_run(member: Member) -> None:
    """Run a small plan in every engine: by plain steps, and by two other optimisers unless one is fixed."""
    for local in OPTIMIZERS[:1] if "optimizer" in member.build().local else OPTIMIZERS:
        must_agree(_plan(member, local))


@law()
def the_model_moves(member: Member) -> None:
    """Run a small plan, and compare with the model that it began with, or clients' own models with it."""
    plan = _plan(member)
    result, first = run(plan), build_job(plan)
    moved = not torch.equal(result.params_D, first.first_D)
    for model in () if moved or result.shared is None else result.models.values():
        moved = moved or not torch.equal(flatten(model, first.spec), first.first_D)
    must(moved, "no model moves in two rounds: train it")


@law()
def batch_norm_is_trained(member: Member) -> None:
    """Run a small plan with batch norm, whose statistics are averaged beside the parameters."""
    algorithm: Algorithm = member.build()
    models: dict[str, Any] = {"models": [batch_normed, "logistic"]} if _sends_scores(algorithm) else {}
    must_repeat(_plan(member, model=batch_normed if algorithm.prepare is None else adapted_batch_normed, **models))


@law()
def the_order_of_clients_changes_nothing(member: Member) -> None:
    """Train a cohort forwards and backwards, one by one and stacked, to the same bits."""
    must_ignore_order(build_job(_plan(member)))


@law()
def a_resumed_run_ends_the_same(member: Member) -> None:
    """Stop a run with clipped updates after two of four rounds, and go on from its directory to the same bits."""
    must_resume(_plan(member, uplink=[{"name": "clip", "norm": 1.0}]))


@law()
def extras_and_states_are_laid_out_before_training(member: Member) -> None:
    """Train two clients for two rounds: updates, client states and the server's state keep their names and shapes."""
    plan = _plan(member)
    job = build_job(plan)
    trainer, layout, server = Trainer(job), layout_of(job), first_server(job, job.first_D)
    must_be_state(server, "what init_server returns")
    first = job.algorithm.init_client(job.trainable(job.first_D))
    must_be_state(first, "what init_client returns")
    model_D, states = job.first_D, dict[int, State]()
    for version in range(2):
        sent = broadcast_of(job, model_D, server)
        must_be_state(sent.aux, "what broadcast returns")
        for client in (0, 1):
            trained = trainer.train_one(Task(client, version, version), sent, states.get(client, {}))
            _must_have_layout(trained.update, layout)
            must_be_state(trained.state, "the state that finish returns")
            states[client] = trained.state
            must(first.keys() <= trained.state.keys(), f"finish drops {sorted(first.keys() - trained.state.keys())}")
        if not job.algorithm.needs_updates:
            model_D, server = _moved(job, model_D, trained.update, server, version)


def _must_have_layout(update: Update, layout: Update) -> None:
    def described(each: Update) -> dict[str, tuple[torch.Size, torch.dtype]]:
        tensors = {"delta": each.delta_D, "weight": each.weight, **each.aux}
        return {name: (value.shape, value.dtype) for name, value in tensors.items()}

    must(
        described(update) == described(layout),
        f"finish sends {described(update)} after training, and {described(layout)} without data: send the same extras",
    )
    finite = all(bool(value.isfinite().all()) for value in (update.delta_D, update.weight, *update.aux.values()))
    must(finite, "finish sends what is not finite")
    must(float(update.weight) > 0, f"finish weighs an update {float(update.weight)}: weights are above 0")


def _moved(job: Job, model_D: Tensor, update: Update, server: State, version: int) -> tuple[Tensor, State]:
    """Step the server by one client's update, twice: it must be repeatable, and write to nothing that comes in."""
    aggregate = Aggregate(update.delta_D, update.aux, float(update.weight), 1)
    before, kept = model_D.clone(), written(server)
    (new_D, after), (again_D, _) = (stepped(job, model_D, aggregate, server, version, 12) for _ in range(2))
    must_be_close(again_D, new_D, "server_step gives two models: draw from task.rng, and remember nothing")
    must_be_close(model_D, before, "server_step writes to the parameters: return new ones")
    must_be_equal(server, kept, "server_step writes to its state: return a new one")
    must_be_state(after, "the state that server_step returns")
    must(after.keys() == server.keys(), f"server_step returns {sorted(after)}, and init_server {sorted(server)}")
    return new_D, after
