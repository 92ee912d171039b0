"""Clients that are held out of training: who they are, that nothing of them is used, and where figures of them go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import timeless
from torch import Tensor

from atoll import Plan, run
from atoll.core.errors import PlanError
from atoll.core.events import Event, NewClientsEvaluated, RoundCommitted, RunStarted, TasksSent
from atoll.core.messages import SERVER
from atoll.core.parts import Part, members
from atoll.data.dataset import Dataset
from atoll.data.index import Partition, dealt, subset
from atoll.data.partition.iid import iid
from atoll.train.federation import Federation, build_federation

HEAD = ["5.*"]
"""The last layer of mlp_2nn."""
ENGINES: list[Any] = [{"name": "vectorised", "stack": 3}, {"name": "processes", "workers": 2, "stack": 2}]


# --- who they are, and what is left of them for others ---------------------------------------------------------------


def held(federation: Federation, clients: range) -> set[int]:
    return {int(index) for client in clients for index in federation.everybody.indices(client)}


def test_they_are_picked_by_seed_and_numbered_last(new_plan: Plan) -> None:
    federation, whole = build_federation(new_plan), build_federation(new_plan.replace({"evaluation.new_clients": None}))
    assert (federation.num_clients, list(federation.new_clients)) == (8, [8, 9, 10, 11])
    assert federation.partition.num_clients == 8 and len(federation.partition.sizes()) == 8
    others = [client for client in range(12) if client not in federation.new_numbers]
    for number, client in enumerate([*others, *federation.new_numbers]):
        assert np.array_equal(federation.everybody.indices(number), whole.partition.indices(client))
    assert federation.new_numbers == build_federation(new_plan).new_numbers != [8, 9, 10, 11]
    assert len({tuple(build_federation(new_plan.replace({"seed": seed})).new_numbers) for seed in range(5)}) > 1


def test_only_clients_with_held_out_samples_are_picked() -> None:
    """Of three samples a holdout of 0.3 takes none, so that such a client would be measured on what it adapts to."""
    federation = build_federation(Plan(partition=uneven, evaluation={"new_clients": 20, "holdout": 0.3}))
    assert federation.everybody.sizes().min() == 3
    for client in federation.new_clients:
        trained, tested = federation.train_indices(client), federation.evaluation_indices(client)
        assert len(tested) and not set(trained) & set(tested)


def uneven(dataset: Dataset, *, seed: int = 0) -> Partition:
    """Give every other client three samples."""
    whole = iid(dataset, num_clients=40, seed=seed)
    sizes = [3 if client % 2 else whole.size(client) for client in range(40)]
    samples = [whole.indices(client)[: sizes[client]] for client in range(40)]
    return dealt(np.concatenate(samples), np.cumsum([0, *sizes]))


@pytest.mark.parametrize(
    "change",
    [
        {"server.samples": 400},
        {"attack": "zero", "attackers.added": 9},
        {"public": {"name": "held_out", "fraction": 0.2}, "server.samples": 100, "server.source": "public"},
    ],
    ids=str,
)
def test_their_samples_are_nobody_elses(new_plan: Plan, change: dict[str, Any]) -> None:
    federation = build_federation(new_plan.replace(change))
    new = held(federation, federation.new_clients)
    assert new and not new & held(federation, range(federation.num_clients))
    assert not new & set(federation.train_indices(SERVER).tolist())
    if "attack" in change:
        assert list(federation.added) == list(range(8, 17)) and federation.new_clients.start == 17


WAYS = [("policy", "rounds", name) for name in members("rounds")]
WAYS += [("sampler", "rounds.samplers", name) for name in members("rounds.samplers")]


@pytest.mark.parametrize(("key", "family", "name"), WAYS, ids=lambda value: str(value))
def test_nobody_asks_them_or_trains_on_their_samples(
    key: str, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every policy and every sampler, by listing their folders, with as many clients asked as there are others."""
    plan = Plan(
        partition={"num_clients": 120},
        policy="cohort",
        local={"steps": 2, "batch_size": 4},
        rounds=2,
        engine="inline",
        evaluation={"new_clients": 20, "holdout": 0.2, "clients_every": 1},
    ).replace({key: name})
    asked, taken, rounds = set[int](), set[int](), list[int]()
    take = Federation.take

    def watched(self: Federation, indices: Tensor) -> Tensor:
        if rounds and rounds[-1] < plan.rounds:
            taken.update(indices.flatten().tolist())
        return take(self, indices)

    def watch(event: Event) -> None:
        match event:
            case RunStarted():
                rounds.append(0)
            case TasksSent():
                asked.update(event.clients)
            case RoundCommitted():
                rounds.append(event.row["round"])
            case _:
                pass

    monkeypatch.setattr(Federation, "take", watched)
    run(plan, watch=[watch])
    federation = build_federation(plan)
    assert asked and asked <= set(range(100))
    assert taken and not taken & held(federation, federation.new_clients)
    assert rounds[-1] == 2


def without_them(dataset: Dataset, *, num_clients: int, alpha: float, seed: int = 0) -> Partition:
    """Deal the data out as the plan does, and leave out the clients that it holds out of training."""
    whole = Part("dirichlet", num_clients=num_clients, alpha=alpha).build("data.partition", dataset, seed=seed)
    federation = Federation(dataset, whole, seed=seed, holdout=0.3, num_new=4)
    return subset(whole, [client for client in range(num_clients) if client not in federation.new_numbers])


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "scaffold", "policy": {"fraction": 0.5}, "engine": ENGINES[0]},
        {"algorithm": "feddyn", "engine": ENGINES[1]},
        {"attack": "sign_flip", "attackers.fraction": 0.3, "aggregator": "median"},
        {"policy": {"name": "buffered", "size": 3, "concurrency": 6}, "devices": "fleet"},
        {"sampler": "poisson", "algorithm": "ditto"},
        {"sampler": {"name": "weighted"}, "evaluation.max_clients": 3},
    ],
    ids=str,
)
def test_others_train_as_if_they_did_not_exist(new_plan: Plan, change: dict[str, Any]) -> None:
    """Whatever counts clients, or picks some of them, does not count these: the run is that of the others alone."""
    plan = new_plan.replace({"evaluation.clients_every": 1, **change})
    mine = run(plan)
    partition = Part(without_them, num_clients=12, alpha=0.5)
    other = run(Plan(**{**vars(plan.replace({"evaluation.new_clients": None})), "partition": partition}))
    assert torch.equal(mine.params_D, other.params_D)
    assert timeless(mine.history) == timeless(other.history)
    assert mine.new_clients and not other.new_clients


# --- every engine, resume, files --------------------------------------------------------------------------------------

LOOPING = [
    name
    for name in members("algorithms")
    if (work := Part(name).build("algorithms").work) is None or work.name == "clusters"
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (place % 3 > 0)) for place, name in enumerate(LOOPING)]
)
def test_every_algorithm_serves_them_here_and_in_processes(new_plan: Plan, name: str) -> None:
    plan = new_plan.replace(
        {"algorithm": name, "rounds": 1, "evaluation.validation": 0.1, "evaluation.adapt_steps": [0, 3]}
    )
    algorithm = Part(name).build("algorithms")
    plan = plan.replace({"local": {"lr": 0.05}} if "epochs" in algorithm.local else {"local.steps": 2})
    if algorithm.needs_public:
        plan = plan.replace({"public": {"name": "held_out", "fraction": 0.1}})
    if algorithm.keep == ("norms",):
        plan = plan.replace({"model": "helpers:normed"})
    if algorithm.prepare is not None:
        plan = plan.replace({"model": {"name": "lora_mlp", "hidden": 16}})
    inline = run(plan).new_clients
    assert list(inline) == [0, 3] and inline[0]["loss"] != inline[3]["loss"]
    assert all(np.isfinite(list(figures.values())).all() for figures in inline.values())
    assert run(plan.replace({"engine": {"name": "processes", "workers": 2, "stack": 0}})).new_clients == inline


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("change", [{}, {"keep": HEAD}, {"algorithm": "pfedme"}], ids=str)
def test_stacked_training_gives_the_same_figures(new_plan: Plan, engine: Any, change: dict[str, Any]) -> None:
    plan = new_plan.replace({**change, "rounds": 1})
    inline, other = run(plan).new_clients, run(plan.replace({"engine": engine})).new_clients
    for steps, figures in inline.items():
        assert other[steps]["loss"] == pytest.approx(figures["loss"], rel=1e-4), steps


def test_a_resumed_run_has_the_same_clients_and_figures(new_plan: Plan, tmp_path: Path) -> None:
    plan = new_plan.replace({"algorithm": "apfl"})
    whole = run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 1}), out=tmp_path / "parts", report=False)
    resumed = run(plan, out=tmp_path / "parts", resume=True, report=False)
    assert resumed.new_clients == whole.new_clients
    described = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "parts")]
    assert described[0]["new_clients"] == described[1]["new_clients"] == build_federation(plan).new_numbers
    ended = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert ended[0]["new_clients"] == ended[1]["new_clients"]
    found = {int(steps): figures for steps, figures in ended[0]["new_clients"]["after_steps"].items()}
    assert (found, ended[0]["new_clients"]["metric"]) == (whole.new_clients, "accuracy")
    assert run(plan, out=tmp_path / "parts", resume=True, report=False).new_clients == whole.new_clients


def test_a_run_that_is_stopped_measures_them_when_it_goes_on(new_plan: Plan, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.row["round"] == 2:
            raise KeyboardInterrupt

    stopped = run(new_plan, out=tmp_path / "run", watch=[stop])
    assert stopped.reason == "interrupted" and not stopped.new_clients
    assert "new_clients" not in json.loads((tmp_path / "run" / "result.json").read_text())
    assert run(new_plan, out=tmp_path / "run", resume=True, report=False).new_clients == run(new_plan).new_clients


def test_watchers_hear_of_them_once(new_plan: Plan) -> None:
    heard = list[NewClientsEvaluated]()
    result = run(
        new_plan, watch=[lambda event: heard.append(event) if isinstance(event, NewClientsEvaluated) else None]
    )
    assert [(event.version, event.main, event.figures) for event in heard] == [(3, "accuracy", result.new_clients)]
    assert "new clients: accuracy" in repr(result) and "on arrival" in repr(result)


def test_other_problems_are_measured_by_their_own_figures() -> None:
    plan = Plan(data="problem_data:diabetes", rounds=2, engine="inline", evaluation={"new_clients": 3, "holdout": 0.3})
    found = run(plan).new_clients
    assert found[20]["worst_decile"] >= found[20]["mean"] > 0.3  # of errors the largest are the worst


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"adapt_steps": [0, 5]}, "no new clients: set evaluation.new_clients"),
        ({"new_clients": 2, "adapt_steps": []}, r"that rise, got \[\]"),
        ({"new_clients": 2, "adapt_steps": [5, 0]}, r"that rise, got \[5, 0\]"),
        ({"new_clients": 2, "adapt_steps": [1, 1]}, r"that rise, got \[1, 1\]"),
        ({"new_clients": 2, "adapt_steps": [-1]}, "0 is what a client gets on arrival"),
        ({"new_clients": 0}, "evaluation.new_clients must be at least 1"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_meant_is_refused(evaluation: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(evaluation=evaluation)


def test_plans_without_them_are_what_they_were() -> None:
    assert not {"new_clients", "adapt_steps"} & set(Plan().to_dict()["evaluation"])
