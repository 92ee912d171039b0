"""Real clients on real sockets: they do what a simulation does, to the bit, whatever happens to them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import normed
from network.small_server import CUT_AFTER, CUT_BEFORE, SmallServer, WireEngine, serving

from atoll.core.plan import Plan
from atoll.engine.build import build_coordinator
from atoll.engine.guarding import guarded
from atoll.engine.inline import inline
from atoll.engine.simulation import Simulation
from atoll.ledger import chain
from atoll.network.agreement import plan_for_clients
from atoll.network.app import ClientApp
from atoll.network.client import Client, Voice
from atoll.network.connection import Connection
from atoll.network.home import Home, Server
from atoll.network.identity import public_bytes
from atoll.network.protocol import Problem, RunInfo
from atoll.privacy.ledger import Ledger
from atoll.train.federation import Federation, build_federation
from atoll.train.job import build_job

RUN = "digits"
SMALL = Plan(
    partition={"name": "dirichlet", "num_clients": 3, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 32},
    rounds=3,
    engine="inline",
)


class Crash(BaseException):
    """A process is killed here."""


class Deaths:
    """Kills the client that is at work at some of the moments when it writes or has just been answered."""

    def __init__(self, world: World, seed: int, chance: float) -> None:
        self.world, self.rng, self.chance, self.num = world, random.Random(seed), chance, 0

    def maybe(self) -> None:
        if threading.current_thread() is self.world.at_work and self.rng.random() < self.chance:
            self.num += 1
            raise Crash

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sync, once = os.fsync, Connection._once

        def deadly_sync(number: int) -> None:
            self.maybe()
            sync(number)

        def deadly_once(*args: Any, **options: Any) -> tuple[int, bytes]:
            found = once(*args, **options)
            self.maybe()
            return found

        monkeypatch.setattr(os, "fsync", deadly_sync)
        monkeypatch.setattr(Connection, "_once", deadly_once)


class World:
    """A server, three clients with the samples of a simulation's, and a simulation that they work for."""

    def __init__(self, path: Path, plan: Plan, floors: dict[str, Any] | None = None) -> None:
        self.path, self.plan, self.stack = path, plan, ExitStack()
        self.federation = build_federation(plan)
        path.mkdir(exist_ok=True)
        self.server = SmallServer(path)
        self.url = self.stack.enter_context(serving(self.server))
        self.said: list[str] = []
        self.at_work: threading.Thread | None = None
        """The thread of the client that has its turn."""
        self.clients: list[Client] = []
        self.homes = [self._enrolled(number) for number in range(self.federation.num_clients)]
        self.server.approve_all()
        self.server.add_run(info_of(plan, self.federation))
        for number in range(len(self.homes)):
            self.start(number)

    def _enrolled(self, number: int) -> Home:
        home = Home.make(self.path / f"client-{number}")
        with Connection(self.url, home.key, patient=False) as connection:
            client = connection.enrol(self.server.token(f"token {number}"), f"client {number}")
        home.enrolled(Server(self.url, public_bytes(self.server.key), client, f"client {number}"))
        return home

    def app(self, number: int) -> ClientApp:
        federation, indices = self.federation, self.federation.partition.indices(number)
        data = federation.dataset
        return ClientApp(
            train_x=data.train_x[indices],
            train_y=data.train_y[indices],
            num_classes=data.num_classes,
            scale=data.scale,
            shift=data.shift,
            tokens=data.tokens,
            attributes=dict,
            models={"helpers:normed": normed},
        )

    def start(self, number: int) -> None:
        """Start a client, or start it again after it was killed."""
        home = self.homes[number]
        server = home.server()
        connection = Connection(
            self.url, home.key, server_key=server.server_key, say=self.said.append, sleep=lambda seconds: None
        )
        self.stack.callback(connection.__exit__, None, None, None)
        voice = Voice(self.said.append, self.said.append)
        client = Client(self.app(number), home, connection, voice, sleep=lambda seconds: None)
        self.clients[number : number + 1] = [client]

    def step(self) -> None:
        """Let every client have a turn; those who are killed are started again."""
        for number in range(len(self.clients)):
            try:
                self.at_work = threading.current_thread()
                self.clients[number].turn()
            except Crash:
                self.at_work = None
                self.homes[number].close()
                self.homes[number] = Home.open(self.path / f"client-{number}")
                self.start(number)
        self.at_work = None

    def result(self) -> torch.Tensor:
        """The parameters after all rounds, trained by the clients."""
        return simulated(self.plan, self.federation, lambda job: WireEngine(job, self.server, RUN, self.step))


def info_of(plan: Plan, federation: Federation) -> RunInfo:
    num = federation.num_clients
    sizes, epsilon = federation.partition.sizes(), 1.0 if plan.privacy else None
    return RunInfo(RUN, plan_for_clients(plan), plan.identity(), num, num, 100_000, int(sizes.max()), epsilon)


def simulated(plan: Plan, federation: Federation, engine: Callable[[Any], Any] = inline) -> torch.Tensor:
    coordinator, job, guard = build_coordinator(plan, federation), build_job(plan, federation), None
    if plan.privacy is not None:
        job, coordinator, guard = guarded(plan, job, coordinator, Ledger(job.secret))
    simulation = Simulation(plan, engine(job), coordinator, guard=guard)
    assert [done.row["round"] for done in simulation.rounds()] == list(range(1, plan.rounds + 1))
    return simulation.state.params_D


LOCAL = {"name": "local", "clip": 1.0, "sigma": 0.01, "delta": 1e-5, "test_noise": True}
SAMPLE = {"name": "sample", "clip": 1.0, "sigma": 0.5, "delta": 1e-5, "test_noise": True}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "scaffold"},
        {"algorithm": {"name": "qffl", "q": 1.0}},
        {"uplink": [{"name": "top_k", "fraction": 0.1, "error_feedback": True}], "evaluation": {"holdout": 0.2}},
        {"uplink": [{"name": "qsgd"}], "algorithm": "fedadam", "local.lr": 0.05},
        {"privacy": LOCAL},
        {"privacy": SAMPLE},
        {"model": "helpers:normed", "local.buffers": "local", "rounds": 2},
    ],
    ids=["fedavg", "scaffold", "qffl", "top_k", "qsgd", "local noise", "private steps", "own buffers"],
)
def test_clients_train_as_a_simulation_does_to_the_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    plan = SMALL.replace(settings)
    world = World(tmp_path / "world", plan)
    with world.stack:
        found_D = world.result()
    assert torch.equal(found_D, simulated(plan, world.federation))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_clients_that_are_killed_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    plan = SMALL.replace({"algorithm": "scaffold", "uplink": [{"name": "top_k", "fraction": 0.1}], "rounds": 4})
    world = World(tmp_path / "world", plan)
    deaths = Deaths(world, seed, 0.08)
    with world.stack:
        deaths.watch(monkeypatch)
        found_D = world.result()
    monkeypatch.undo()
    assert deaths.num > 10
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
    assert deaths.num > 10
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
        world.result()
        world.server.ended = (RUN, "../elsewhere", "another")
        assert [client.turn() for client in world.clients] == [True] * 3
    for number, home in enumerate(world.homes):
        lines = home.run(RUN).lines()
        assert lines == world.server.ledgers[RUN]
        assert chain.verify(lines, public_bytes(world.server.key)) is None
        assert home.unfinished() == [] and home.runs() == [RUN]
        assert not list((home.path / "runs" / RUN / "objects" / "chunks").iterdir())
        sent = [each for each in world.server.deliveries if each[2] == number]
        assert len(sent) == 3
    assert world.said.count(f"{RUN}: version 2 counts this client's update") == 3
