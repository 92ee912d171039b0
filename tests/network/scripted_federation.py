"""A server of real parts, real clients with the samples of a simulation's, and ways to kill them, in one process."""

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
from network.scripted_server import ScriptedServer, WireEngine, serving

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import guarded
from atoll.commit.parts import RunParts
from atoll.core.events import RoundCommitted
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.network.client.app import ClientApp
from atoll.network.client.client import Client, OwnerOutput
from atoll.network.client.connection import Connection
from atoll.network.client.home import EnrolledServer, Home
from atoll.network.protocol.agreement import plan_for_clients
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import RunInfo
from atoll.privacy.ledger import Ledger
from atoll.simulation.driver import Simulation
from atoll.train.build import build_job
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job

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


class RandomCrashes:
    """Kills the client that is at work at some of the moments when it writes or has just been answered."""

    def __init__(self, scripted: ScriptedFederation, seed: int, chance: float) -> None:
        self.scripted, self.rng, self.chance, self.num = scripted, random.Random(seed), chance, 0

    def maybe(self) -> None:
        if threading.current_thread() is self.scripted.at_work and self.rng.random() < self.chance:
            self.num += 1
            raise Crash

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sync, once = os.fsync, Connection._exchange

        def deadly_sync(number: int) -> None:
            self.maybe()
            sync(number)

        def deadly_once(*args: Any, **options: Any) -> tuple[int, bytes]:
            found = once(*args, **options)
            self.maybe()
            return found

        monkeypatch.setattr(os, "fsync", deadly_sync)
        monkeypatch.setattr(Connection, "_exchange", deadly_once)


class ScriptedFederation:
    """A server, three clients with the samples of a simulation's, and a simulation that they work for."""

    def __init__(self, path: Path, plan: Plan, floors: dict[str, Any] | None = None) -> None:
        self.path, self.plan, self.stack = path, plan, ExitStack()
        self.federation = build_federation(plan)
        path.mkdir(exist_ok=True)
        self.server = ScriptedServer(path)
        self.url = self.stack.enter_context(serving(self.server))
        self.said: list[str] = []
        self.at_work: threading.Thread | None = None
        """The thread of the client that has its turn."""
        self.clients: list[Client] = []
        self.homes = [self._enrolled(number) for number in range(self.federation.num_clients)]
        self.server.approve_all()
        self.server.add_run(info_of(plan, self.federation), build_job(plan, self.federation).first_D)
        for number in range(len(self.homes)):
            self.start(number)

    def _enrolled(self, number: int) -> Home:
        home = Home.make(self.path / f"client-{number}")
        with Connection(self.url, home.key, keep_trying=False) as connection:
            client = connection.enrol(self.server.token(f"token {number}"), f"client {number}")
        home.enrolled(EnrolledServer(self.url, public_bytes(self.server.key), client, f"client {number}"))
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
        output = OwnerOutput(self.said.append, self.said.append)
        client = Client(self.app(number), home, connection, output, sleep=lambda seconds: None)
        self.clients[number : number + 1] = [client]

    def step(self) -> None:
        """Let every client have a turn; those who are killed are started again."""
        for number in range(len(self.clients)):
            try:
                self.at_work = threading.current_thread()
                self.clients[number].step()
            except Crash:
                self.at_work = None
                self.homes[number].close()
                self.homes[number] = Home.open(self.path / f"client-{number}")
                self.start(number)
        self.at_work = None

    def result(self) -> torch.Tensor:
        """The parameters after all rounds, trained by the clients."""
        engines: list[WireEngine] = []

        def engine(job: Job) -> WireEngine:
            engines.append(WireEngine(job, self.server, RUN, self.step))
            return engines[-1]

        found_D = simulated(self.plan, self.federation, engine)
        engines[0].commit(found_D)
        return found_D


def info_of(plan: Plan, federation: Federation) -> RunInfo:
    num = federation.num_clients
    sizes, epsilon = federation.partition.sizes(), 1.0 if plan.privacy else None
    return RunInfo(RUN, plan_for_clients(plan), plan.identity(), num, num, 100_000, int(sizes.max()), epsilon)


def simulated(plan: Plan, federation: Federation, engine: Callable[[Any], Any] = inline) -> torch.Tensor:
    coordinator, job, guard = build_coordinator(plan, federation), build_job(plan, federation), None
    if plan.privacy is not None:
        job, coordinator, guard = guarded(plan, job, coordinator, Ledger(job.secret))
    parts = RunParts(plan=plan, job=job, coordinator=coordinator, guard=guard, engine=engine(job))
    simulation = Simulation(parts)
    events = [event for told in simulation.rounds() for event in told if isinstance(event, RoundCommitted)]
    assert [event.row["round"] for event in events] == list(range(1, plan.rounds + 1))
    return simulation.state.params_D
