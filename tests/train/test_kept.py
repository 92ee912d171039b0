"""Parameters that clients keep: a slow reference, every engine, resume, what travels, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless
from torch import Tensor, nn

from atoll import Plan, run
from atoll.commit.run_state import read_state
from atoll.core.errors import PlanError
from atoll.core.messages import KEPT, Task
from atoll.core.params import kept_names, spec_of
from atoll.train.batches import client_batches
from atoll.train.build import build_job

HEAD = {"keep": ["5.*"]}
"""The last layer of mlp_2nn."""
ENGINES: list[Any] = [{"name": "vectorised", "stack": 5}, {"name": "processes", "workers": 2, "stack": 3}]


def test_fedper_is_the_papers(digits_plan: Plan) -> None:
    """Only the head's gradient steps stay at home (Arivazhagan et al. 2019, arXiv:1912.00818, algorithms 1 and 2)."""
    plan = digits_plan.replace({**HEAD, "policy.size": 12})
    job = build_job(plan)
    dataset = job.federation.dataset
    x, y = torch.from_numpy(dataset.train_x).float() * dataset.scale, torch.from_numpy(dataset.train_y)
    heads = [copy.deepcopy(job.model[5].state_dict()) for _ in range(12)]  # type: ignore[index,operator]
    body = {name: value.clone() for name, value in job.model.state_dict().items() if not name.startswith("5.")}
    sizes = [job.federation.num_samples(client) for client in range(12)]
    for version in range(3):
        bodies = []
        for client in range(12):
            model = copy.deepcopy(job.model)
            model.load_state_dict({**body, **{f"5.{name}": value for name, value in heads[client].items()}})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in client_batches(job, Task(client, version, version)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            heads[client] = {name: value.clone() for name, value in model[5].state_dict().items()}  # type: ignore[index]
            bodies.append({name: model.state_dict()[name].clone() for name in body})
        body = {
            name: sum((n * each[name] for n, each in zip(sizes, bodies, strict=True)), start=torch.zeros(()))
            / sum(sizes)
            for name in body
        }
    result = run(plan)
    assert sorted(result.models) == list(range(12))
    for client, model in result.models.items():
        found = model.state_dict()
        for name, value in {**body, **{f"5.{name}": value for name, value in heads[client].items()}}.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold", "moon", "fedsam", "feddyn", "fednova", "qffl"])
def test_engines_agree(digits_plan: Plan, algorithm: str) -> None:
    plan = digits_plan.replace({**HEAD, "algorithm": algorithm, "rounds": 2, "local.optimizer": "sgd"})
    plain = run(plan)
    for engine in ENGINES:
        other = run(plan.replace({"engine": engine}))
        torch.testing.assert_close(other.params_D, plain.params_D, atol=1e-4, rtol=1e-4)
        assert other.models.keys() == plain.models.keys()
        for client, model in plain.models.items():
            for name, value in model.state_dict().items():
                torch.testing.assert_close(other.models[client].state_dict()[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"local.optimizer": {"name": "sgd", "momentum": 0.9}},
        {"uplink": [{"name": "top_k", "fraction": 0.1}], "downlink": ["delta", "half"]},
        {"secagg": {}},
        {"aggregator": "median", "attack": "sign_flip", "attackers": {"num": 2}},
        {"policy": {"name": "buffered", "size": 3, "concurrency": 6}, "devices": "fleet"},
        {
            "privacy": {"name": "central", "clip": 1.0, "sigma": 0.5, "delta": 1e-5, "test_noise": True},
            "sampler": "poisson",
        },
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_bits(digits_plan: Plan, tmp_path: Path, change: dict[str, Any]) -> None:
    plan = digits_plan.replace({**HEAD, **change})
    whole = run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 1}), out=tmp_path / "parts", report=False)
    resumed = run(plan, out=tmp_path / "parts", report=False, resume=True)
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert saved[0] == saved[1] and len(saved[0]) > 4 * len(whole.params_D)
    assert timeless(resumed.history) == timeless(whole.history)


def test_what_is_kept_is_in_no_update(digits_plan: Plan, tmp_path: Path) -> None:
    whole, head = (
        run(digits_plan.replace(each), out=tmp_path / str(i), report=False) for i, each in enumerate(({}, HEAD))
    )
    spec = build_job(digits_plan.replace(HEAD)).spec
    kept = sum(slot.size for slot in spec.kept)
    assert kept == 16 * 10 + 10 and {slot.name for slot in spec.kept} == {"5.weight", "5.bias"}
    assert whole.history[-1]["bytes_up"] - head.history[-1]["bytes_up"] == 3 * 5 * 4 * kept
    state = read_state(tmp_path / "1" / "checkpoint.safetensors", digits_plan.replace(HEAD).identity())
    assert {tuple(memory[KEPT].shape) for memory in state.clients.values()} == {(kept,)}
    assert len(head.params_D) == len(whole.params_D) - kept


def test_nobody_starts_from_the_head_of_another(digits_plan: Plan) -> None:
    """With one client a round, each client's head is its own alone."""
    plan = digits_plan.replace({**HEAD, "policy.size": 1, "rounds": 2, "sampler": "round_robin", "local.steps": 1})
    models = run(plan).models
    first = build_job(plan).model.state_dict()["5.bias"]
    moved = [float((model.state_dict()["5.bias"] - first).abs().max()) for model in models.values()]
    assert len(moved) == 2 and max(moved) <= 0.1  # one step of 0.1 along a gradient of at most 1


def test_what_noise_does_not_cover_is_not_measured(digits_plan: Plan) -> None:
    """A client's own model holds parameters without noise: how good it is would be released and not charged."""
    noise = {"name": "central", "clip": 1.0, "sigma": 0.5, "delta": 1e-5}
    plan = digits_plan.replace({**HEAD, "privacy": noise, "sampler": "poisson", "rounds": 1})
    assert "test" not in run(plan).history[-1]
    assert "test" in run(plan.replace({"privacy.test_noise": True})).history[-1]


def test_norms_are_kept_whole(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"model": "helpers:normed", "keep": "norms", "evaluation.clients_every": 1})
    job, result = build_job(plan), run(plan)
    assert {slot.name for slot in job.spec.kept} == {"norm.weight", "norm.bias"}
    assert not job.spec.buffers and set(job.local_buffers) == {"norm.running_mean", "norm.running_var"}
    means = torch.stack([model.get_buffer("norm.running_mean") for model in result.models.values()])
    assert float(means.std(0).min()) > 0  # clients' own
    shared = torch.stack([model.get_parameter("conv.weight") for model in result.models.values()])
    assert torch.equal(shared[0], shared[-1])


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_tied_weights_have_several_names() -> None:
    assert kept_names(Tied(), share=None, keep=["head.weight"]) == {"body.weight"}
    spec = spec_of(Tied(), keep={"body.weight"})
    assert [slot.name for slot in spec.slots] == ["body.bias", "head.bias"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keep": ["head.*"]}, "'head.*' matches nothing of the model: leave it out, or name some of 1.weight, 1.bias"),
        ({"share": ["body.*"]}, "share: 'body.*' matches nothing"),
        ({"keep": ["*"]}, "nothing would travel"),
        ({"keep": "norms"}, "keep: 'norms' matches nothing"),
        ({"keep": 3}, "keep"),
        ({"keep": []}, "keep is empty"),
        ({"keep": ["1.*"], "share": ["5.*"]}, "leave one out"),
        ({**HEAD, "work": "own_works:centroids"}, "matches nothing"),
        ({"keep": ["sums"], "work": "own_works:centroids"}, "which own_works:centroids replaces"),
    ],
)
def test_what_cannot_be_kept_is_refused(digits_plan: Plan, change: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError) as refused:
        run(digits_plan.replace(change))
    assert why in str(refused.value)
