"""Real clients on real sockets: they do what a simulation does, to the bit, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import normed
from network.small_server import SmallServer, WireEngine, serving

from atoll.core.plan import Plan
from atoll.engine.build import build_coordinator
from atoll.engine.guarding import guarded
from atoll.engine.inline import inline
from atoll.engine.simulation import Simulation
from atoll.network.agreement import plan_for_clients
from atoll.network.app import ClientApp
from atoll.network.client import Client, Voice
from atoll.network.connection import Connection
from atoll.network.home import Home, Server
from atoll.network.identity import public_bytes
from atoll.network.protocol import RunInfo
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


class World:
    """A server, three clients with the samples of a simulation's, and a simulation that they work for."""

    def __init__(self, path: Path, plan: Plan, floors: dict[str, Any] | None = None) -> None:
        self.path, self.plan, self.stack = path, plan, ExitStack()
        self.federation = build_federation(plan)
        path.mkdir(exist_ok=True)
        self.server = SmallServer(path)
        self.url = self.stack.enter_context(serving(self.server))
        self.said: list[str] = []
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
                self.clients[number].turn()
            except Crash:
                self.homes[number].close()
                self.homes[number] = Home.open(self.path / f"client-{number}")
                self.start(number)

    def result(self) -> torch.Tensor:
        """The parameters after all rounds, trained by the clients."""
        return simulated(self.plan, self.federation, lambda job: WireEngine(job, self.server, RUN, self.step))


def info_of(plan: Plan, federation: Federation) -> RunInfo:
    num = federation.num_clients
    return RunInfo(RUN, plan_for_clients(plan), plan.identity(), num, num, 100_000, 1.0 if plan.privacy else None)


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
