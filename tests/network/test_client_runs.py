"""Real clients on real sockets: they do what a simulation does, to the bit, whatever happens to them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from network.scripted_federation import RUN, SMALL, RandomCrashes, ScriptedFederation, simulated
from network.scripted_server import CUT_AFTER, CUT_BEFORE
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
    scripted = ScriptedFederation(tmp_path / "world", plan)
    with scripted.stack:
        found_D = scripted.result()
    assert torch.equal(found_D, simulated(plan, scripted.federation))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_clients_that_are_killed_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    plan = SMALL.replace({"algorithm": "scaffold", "uplink": [{"name": "top_k", "fraction": 0.1}], "rounds": 4})
    scripted = ScriptedFederation(tmp_path / "world", plan)
    deaths = RandomCrashes(scripted, seed, 0.08)
    with scripted.stack:
        deaths.watch(monkeypatch)
        found_D = scripted.result()
    monkeypatch.undo()
    assert deaths.num > 3
    assert torch.equal(found_D, simulated(plan, scripted.federation))
    assert all(len(names) == 1 for names in scripted.server.objects_of.values())


def test_an_update_is_never_made_twice_with_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SMALL.replace({"privacy": {**LOCAL, "test_noise": False, "sigma": 1.0}})
    scripted = ScriptedFederation(tmp_path / "world", plan)
    deaths = RandomCrashes(scripted, 5, 0.1)
    with scripted.stack:
        deaths.watch(monkeypatch)
        scripted.result()
    monkeypatch.undo()
    assert deaths.num > 3
    assert [len(names) for names in scripted.server.objects_of.values()] == [1] * 9
    assert len({name for names in scripted.server.objects_of.values() for name in names}) == 9
    told = [told for _, told in scripted.server.deliveries.values()]
    assert {(each.num_samples, each.loss, each.weight) for each in told} == {(1, 0.0, 1.0)}  # nothing unprotected


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_lost_answers_and_a_server_in_trouble_change_nothing(tmp_path: Path, seed: int) -> None:
    scripted, rng = ScriptedFederation(tmp_path / "world", SMALL), random.Random(seed)
    kinds = [CUT_BEFORE, CUT_AFTER, 500, 502, 503, 429, (503, Problem("full", 3.0)), b"rubbish"]

    def trouble(method: str, path: str) -> Any:
        if rng.random() < 0.03:
            scripted.server.restart()
        return rng.choice(kinds) if rng.random() < 0.3 and "/objects/" not in path else None

    with scripted.stack:
        scripted.server.trouble = trouble
        found_D = scripted.result()
    assert torch.equal(found_D, simulated(SMALL, scripted.federation))
    assert all(len(names) == 1 for names in scripted.server.objects_of.values())
    assert sum(status != 200 for _, _, status in scripted.server.log) > 10


def test_clients_keep_receipts_and_take_leave(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    with scripted.stack:
        found_D = scripted.result()
        scripted.server.end(RUN, found_D)
        scripted.server.ended = (RUN, "../elsewhere", "another")
        scripted.start(1)  # it was away when the run ended
        assert [client.step() for client in scripted.clients] == [True] * 3
    for number, home in enumerate(scripted.homes):
        assert torch.equal(taken(home), found_D)
        lines = home.run(RUN).ledger_lines()
        assert lines == scripted.server.ledgers[RUN]
        assert chain.verify(lines, public_bytes(scripted.server.key)) is None
        assert home.unfinished() == [] and home.runs() == [RUN]
        assert not [path for path in (home.path / "runs" / RUN / "objects").rglob("*") if path.is_file()]
        sent = [each for each in scripted.server.deliveries if each[2] == number]
        assert len(sent) == 3
    assert scripted.said.count(f"{RUN}: version 2 counts this client's update") == 3


def taken(home: Home) -> Tensor:
    """The model that a client took home, as one vector."""
    named = load_file(home.path / "runs" / RUN / "model.safetensors")
    model = SMALL.model.build("models", input_shape=(64,), num_classes=10)
    model.load_state_dict(named)
    return flatten(model, spec_of(model))


def test_a_model_that_the_ledger_does_not_name_is_not_taken(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    with scripted.stack:
        found_D = scripted.result()
        scripted.server.end(RUN, found_D)
        other = scripted.server.put(pack(Payload(found_D + 1)))
        scripted.server.infos[RUN] = msgspec.structs.replace(scripted.server.infos[RUN], model=other)
        with pytest.raises(RunError, match="another model than its ledger says"):
            scripted.clients[0].step()
        home = scripted.homes[0]
        assert home.unfinished() == [RUN] and not (home.path / "runs" / RUN / "model.safetensors").exists()


def test_a_model_that_a_client_cannot_use_is_left_there(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    with scripted.stack:
        found_D = scripted.result()
        scripted.server.end(RUN, found_D[1:])
        assert scripted.clients[0].step()
        assert scripted.homes[0].unfinished() == []
    assert [text for text in scripted.said if "its model was left there: the last model has (681,)" in text]


def test_a_run_that_the_server_has_given_up_is_not_over(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    with scripted.stack:
        found_D = scripted.result()
        scripted.server.ended = (RUN,)
        for _ in range(2):
            assert scripted.clients[0].step()
        assert scripted.homes[0].unfinished() == [RUN]
        scripted.server.end(RUN, found_D)
        assert scripted.clients[0].step()
        assert scripted.homes[0].unfinished() == [] and torch.equal(taken(scripted.homes[0]), found_D)
    assert len([text for text in scripted.said if "given it up" in text]) == 1


def test_a_run_without_a_ledger_is_not_over(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    with scripted.stack:
        scripted.homes[0].run(RUN).save_info(scripted.server.infos[RUN])
        scripted.server.ledgers[RUN] = []
        scripted.server.ended = (RUN,)
        assert scripted.clients[0].step()
        assert scripted.homes[0].unfinished() == [RUN]
