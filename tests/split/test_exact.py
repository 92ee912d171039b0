"""A model that is cut trains to the bits of the whole one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from split.models import images, plan_of
from torch import nn

from atoll import Plan, run
from atoll.split.graph import trace

WAYS = ("in_turn", "splitfed_v1", "splitfed_v2")
ADAM = {"steps": 3, "batch_size": 10, "lr": 0.01, "optimizer": {"name": "adam", "weight_decay": 0.01}}
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "mlp_2nn": ({}, "2", "4"),
    "cnn_mcmahan": ({"model": "cnn_mcmahan", "data": images()}, "2", "7"),
    "cnn_mcmahan, second pool": ({"model": "cnn_mcmahan", "data": images()}, "5", "9"),
    "cnn_cifar": ({"model": "cnn_cifar", "data": images((3, 32, 32))}, "1", "8"),
    "cnn_cifar with dropout": (
        {"model": {"name": "cnn_cifar", "dropout": 0.3}, "data": images((3, 32, 32))},
        "5",
        "9",
    ),
    "a user's": ({"model": "split.models:named"}, "pool1", "out"),
    "a user's, after a block": ({"model": "split.models:named"}, "block", "out"),
    "named layers": ({"model": "split.models:named_sequence"}, "act", "head"),
    "batch norm": ({"model": "split.models:normed_sequence"}, "3", "6"),
    "dropout": ({"model": "split.models:dropped_sequence", "local": ADAM}, "3", "6"),
    "padding": ({"model": "char_lstm", "data": "split.models:padded"}, "embedding", "output"),
    "a language model": ({"model": "char_lstm", "data": "helpers:phrases"}, "embedding", "output"),
}
FEW = [pytest.param(name, marks=[pytest.mark.slow] * (place % 3)) for place, name in enumerate(MODELS)]
"""Every third model is fast, all are slow."""


def both(name: str, **split: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a run of the whole model, and of one that is cut."""
    fields, cut, _ = MODELS[name]
    return run(plan_of(**fields)).params_D, run(plan_of({"cut": cut, **split}, **fields)).params_D


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_one_client_ends_with_the_bits_of_the_whole_model(name: str, way: str) -> None:
    whole, parts = both(name, way=way)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_so_it_does_where_labels_stay_with_the_client(name: str, way: str) -> None:
    whole, parts = both(name, way=way, tail=MODELS[name][2])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("name", ["mlp_2nn", "cnn_mcmahan", "cnn_cifar", "a user's"])
def test_pieces_of_a_batch_add_up_to_it(name: str, tail: bool) -> None:
    more = {"tail": MODELS[name][2]} if tail else {}
    whole, parts = both(name, micro_batches=4, **more)
    assert float((whole - parts).abs().max()) < 1e-6
    assert torch.equal(parts, both(name, micro_batches=4, in_flight=1, **more)[1])


def test_a_place_is_a_name_in_a_sequential_model() -> None:
    fields = {"model": "split.models:named_sequence"}
    assert torch.equal(run(plan_of({"cut": "act"}, **fields)).params_D, run(plan_of({"cut": 2}, **fields)).params_D)


EPOCHS = {"epochs": 1, "batch_size": 60, "lr": 0.05, "optimizer": {"name": "sgd", "momentum": 0.9}}


@pytest.mark.parametrize("model", ["mlp_2nn", "split.models:normed_sequence"])
def test_splitfed_v1_is_fedavg_to_the_bit(model: str) -> None:
    fields: dict[str, Any] = {"num_clients": 4, "rounds": 2, "model": model, "local": EPOCHS}
    fields["partition"] = {"name": "dirichlet", "num_clients": 4, "alpha": 1.0}
    whole, parts = run(plan_of(**fields)), run(plan_of({"cut": "3"}, **fields))
    assert torch.equal(whole.params_D, parts.params_D)
    ends = [result.history[-1] for result in (whole, parts)]
    assert all(ends[0][key] == ends[1][key] for key in ("train_loss", "test", "samples_trained"))


@pytest.mark.parametrize("handover", ["server", "peer"])
def test_in_turn_is_the_whole_model_trained_by_one_client_after_another(handover: str) -> None:
    """A round of three clients has the model of three rounds of one client each."""
    sampler = {"sampler": "round_robin"}
    split = {"cut": "2", "way": "in_turn", "handover": handover}
    together = run(plan_of(split, num_clients=3, **sampler, local=EPOCHS))
    apart = plan_of(num_clients=3, rounds=3, local=EPOCHS, **sampler).replace({"policy.size": 1})
    chained = _with_attempt_of_first_round(apart)
    assert float((together.params_D - chained).abs().max()) < 1e-6


def _with_attempt_of_first_round(plan: Plan) -> torch.Tensor:
    """Train the clients of a plan in turn by the ordinary loop, with the batches of the first round."""
    from atoll.core.messages import Task
    from atoll.train.build import build_job
    from atoll.train.trainer import Trainer

    job = build_job(plan)
    model_M = job.first_D
    for client in range(3):
        done = Trainer(job).train_one(Task(client, 0, 0), job.broadcast(model_M, {}), {})
        model_M = model_M + done.update.delta_D
    return model_M


def test_splitfed_v2_shares_the_servers_layers() -> None:
    """Its clients' layers are averaged, and the server's take a step for each batch of each client."""
    fields: dict[str, Any] = {"num_clients": 3, "local": EPOCHS}
    v1, v2 = (run(plan_of({"cut": "2", "way": way}, **fields)) for way in ("splitfed_v1", "splitfed_v2"))
    assert v2.history[-1]["train_loss"] < v1.history[-1]["train_loss"]
    assert not torch.equal(v1.params_D, v2.params_D)


def test_tracing_leaves_the_modules_of_other_threads_alone() -> None:
    """A server traces the model of a run while another run trains."""
    busy, over, wrong = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), threading.Event(), list[Exception]()
    x = torch.ones(1, 2)
    expected = busy(x)

    def work() -> None:
        while not over.is_set():
            try:
                assert bool((busy(x) == expected).all())
            except Exception as error:
                wrong.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(40):
        trace(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(2, 2, 2))
    over.set()
    thread.join()
    assert not wrong
