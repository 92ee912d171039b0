"""Real clients on real sockets: they do what a simulation does, to the bit, whatever happens to them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from network.small_server import CUT_AFTER, CUT_BEFORE
from network.world import RUN, SMALL, Deaths, World, simulated
from safetensors.torch import load_file
from torch import Tensor

from atoll.core.errors import RunError
from atoll.core.messages import Payload
from atoll.core.params import flatten, spec_of
from atoll.core.wire import pack
from atoll.ledger import chain
from atoll.network.client.home import Home
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Problem

LOCAL = {"name": "local", "clip": 1.0, "sigma": 0.01, "delta": 1e-5, "test_noise": True}
SAMPLE = {"name": "sample", "clip": 1.0, "sigma": 0.5, "delta": 1e-5, "test_noise": True}


PLANS: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": "scaffold"},
    "losses": {"algorithm": {"name": "qffl", "q": 1.0}},
    "feedback": {"uplink": [{"name": "top_k", "fraction": 0.1}], "evaluation": {"holdout": 0.2}},
    "coins": {"uplink": [{"name": "qsgd"}], "algorithm": "fedadam", "local.lr": 0.05},
    "local noise": {"privacy": LOCAL},
    "private steps": {"privacy": SAMPLE},
    "own buffers": {"model": "helpers:normed", "local.buffers": "local", "rounds": 2},
}
FAST = ("feedback", "local noise", "own buffers")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_clients_train_as_a_simulation_does_to_the_bit(tmp_path: Path, name: str) -> None:
    plan = SMALL.replace(PLANS[name])
    world = World(tmp_path / "world", plan)
    with world.stack:
        found_D = world.result()
    assert torch.equal(found_D, simulated(plan, world.federation))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_clients_that_are_killed_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    plan = SMALL.replace({"algorithm": "scaffold", "uplink": [{"name": "top_k", "fraction": 0.1}], "rounds": 4})
    world = World(tmp_path / "world", plan)
    deaths = Deaths(world, seed, 0.08)
    with world.stack:
        deaths.watch(monkeypatch)
        found_D = world.result()
    monkeypatch.undo()
    assert deaths.num > 3
    assert torch.equal(found_D, simulated(plan, world.federation))
    assert all(len(names) == 1 for names in world.server.objects_of.values())


def test_an_update_is_never_made_twice_with_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SMALL.replace({"privacy": {**LOCAL, "test_noise": False, "sigma": 1.0}})
    world = World(tmp_path / "world", plan)
    deaths = Deaths(world, 5, 0.1)
    with world.stack:
        deaths.watch(monkeypatch)
        world.result()
    monkeypatch.undo()
    assert deaths.num > 3
    assert [len(names) for names in world.server.objects_of.values()] == [1] * 9
    assert len({name for names in world.server.objects_of.values() for name in names}) == 9
    told = [told for _, told in world.server.deliveries.values()]
    assert {(each.num_samples, each.loss, each.weight) for each in told} == {(1, 0.0, 1.0)}  # nothing unprotected


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_lost_answers_and_a_server_in_trouble_change_nothing(tmp_path: Path, seed: int) -> None:
    world, rng = World(tmp_path / "world", SMALL), random.Random(seed)
    kinds = [CUT_BEFORE, CUT_AFTER, 500, 502, 503, 429, (503, Problem("full", 3.0)), b"rubbish"]

    def trouble(method: str, path: str) -> Any:
        if rng.random() < 0.03:
            world.server.restart()
        return rng.choice(kinds) if rng.random() < 0.3 and "/objects/" not in path else None

    with world.stack:
        world.server.trouble = trouble
        found_D = world.result()
    assert torch.equal(found_D, simulated(SMALL, world.federation))
    assert all(len(names) == 1 for names in world.server.objects_of.values())
    assert sum(status != 200 for _, _, status in world.server.log) > 10


def test_clients_keep_receipts_and_take_leave(tmp_path: Path) -> None:
    world = World(tmp_path / "world", SMALL)
    with world.stack:
        found_D = world.result()
        world.server.end(RUN, found_D)
        world.server.ended = (RUN, "../elsewhere", "another")
        world.start(1)  # it was away when the run ended
        assert [client.turn() for client in world.clients] == [True] * 3
    for number, home in enumerate(world.homes):
        assert torch.equal(taken(home), found_D)
        lines = home.run(RUN).lines()
        assert lines == world.server.ledgers[RUN]
        assert chain.verify(lines, public_bytes(world.server.key)) is None
        assert home.unfinished() == [] and home.runs() == [RUN]
        assert not [path for path in (home.path / "runs" / RUN / "objects").rglob("*") if path.is_file()]
        sent = [each for each in world.server.deliveries if each[2] == number]
        assert len(sent) == 3
    assert world.said.count(f"{RUN}: version 2 counts this client's update") == 3


def taken(home: Home) -> Tensor:
    """The model that a client took home, as one vector."""
    named = load_file(home.path / "runs" / RUN / "model.safetensors")
    model = SMALL.model.build("models", input_shape=(64,), num_classes=10)
    model.load_state_dict(named)
    return flatten(model, spec_of(model))


def test_a_model_that_the_ledger_does_not_name_is_not_taken(tmp_path: Path) -> None:
    world = World(tmp_path / "world", SMALL)
    with world.stack:
        found_D = world.result()
        world.server.end(RUN, found_D)
        other = world.server.put(pack(Payload(found_D + 1)))
        world.server.infos[RUN] = msgspec.structs.replace(world.server.infos[RUN], model=other)
        with pytest.raises(RunError, match="another model than its ledger says"):
            world.clients[0].turn()
        home = world.homes[0]
        assert home.unfinished() == [RUN] and not (home.path / "runs" / RUN / "model.safetensors").exists()


def test_a_model_that_a_client_cannot_use_is_left_there(tmp_path: Path) -> None:
    world = World(tmp_path / "world", SMALL)
    with world.stack:
        found_D = world.result()
        world.server.end(RUN, found_D[1:])
        assert world.clients[0].turn()
        assert world.homes[0].unfinished() == []
    assert [text for text in world.said if "its model was left there: the last model has (681,)" in text]


def test_a_run_that_the_server_has_given_up_is_not_over(tmp_path: Path) -> None:
    world = World(tmp_path / "world", SMALL)
    with world.stack:
        found_D = world.result()
        world.server.ended = (RUN,)
        for _ in range(2):
            assert world.clients[0].turn()
        assert world.homes[0].unfinished() == [RUN]
        world.server.end(RUN, found_D)
        assert world.clients[0].turn()
        assert world.homes[0].unfinished() == [] and torch.equal(taken(world.homes[0]), found_D)
    assert len([text for text in world.said if "given it up" in text]) == 1


def test_a_run_without_a_ledger_is_not_over(tmp_path: Path) -> None:
    world = World(tmp_path / "world", SMALL)
    with world.stack:
        world.homes[0].run(RUN).agreed(world.server.infos[RUN])
        world.server.ledgers[RUN] = []
        world.server.ended = (RUN,)
        assert world.clients[0].turn()
        assert world.homes[0].unfinished() == [RUN]
