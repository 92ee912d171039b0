"""The page of a federation's server: what an operator does there is done and recorded, and a viewer does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from network.in_process_server import client_of, enrol, serving
from ui.serving import Browser

from atoll.core.events import Event, TasksSent
from atoll.core.plan import Plan
from atoll.ledger.chain import OPERATOR
from atoll.network.client.app import ClientApp
from atoll.network.server.access import Role
from atoll.network.server.admin import open_admin
from atoll.network.server.operations import Operations
from atoll.network.server.store import Store
from atoll.ui.federation import FederationPage, federation_page

PLAN = """
rounds = 2
model = "logistic"
policy = {name = "cohort", size = 2}
local = {epochs = 1, batch_size = 8, lr = 0.1}
"""
PRIVATE = (
    PLAN
    + """
sampler = "poisson"
privacy = {name = "central", clip = 1.0, sigma = 1.0, delta = 1e-5}
"""
)


@contextmanager
def page_of(home: Path) -> Iterator[tuple[Operations, str]]:
    home.mkdir(parents=True, exist_ok=True)
    operations = Operations(home, Store(f"sqlite:///{home}/store.db"), num_clients=2)
    page = federation_page(operations, home)
    server, listener = open_admin(operations, home, 0, more=page.routes())
    port = listener.getsockname()[1]
    page.serve_at(port)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    operations.start()
    thread.start()
    try:
        yield operations, f"http://127.0.0.1:{port}"
    finally:
        page.close()
        server.should_exit = True
        thread.join()
        listener.close()
        operations.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def app() -> ClientApp:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 64, generator=generator).numpy(), (torch.arange(40) % 10).numpy()
    return ClientApp(train_x=x, train_y=y, num_classes=10)


def test_an_operator_runs_a_federation_from_the_page(home: Path, tmp_path: Path) -> None:
    with page_of(home) as (operations, url), serving(operations) as address:
        operator = Browser(url, operations.access, Role.OPERATOR, "Ada")
        viewer = Browser(url, operations.access, Role.VIEWER, "partner")
        token = operator.act("enrol_token", hours=1)["token"]
        client = enrol(operations, "hospital", token)
        assert operator.get("clients")["clients"][0]["status"] == "pending"
        assert viewer.act("approve", 403, clients=[client])["error"]
        assert operator.act("approve", clients=[client], samples=40)["numbers"] == [0]
        operator.act("revoke", clients=[client])
        assert viewer.get("clients")["clients"][0]["status"] == "revoked"

        checked = operator.act("check_plan", plan=PLAN)
        assert checked["ok"] and checked["rules"]
        assert "fedavgg" in operator.act("check_plan", plan='algorithm = "fedavgg"')["problem"]
        assert viewer.act("add_run", 403, run="one", plan=PLAN)["error"]
        operator.act("add_run", run="one", plan=PLAN)
        assert viewer.get("runs")["runs"][0]["status"] == "waiting"
        with viewer.stream("one") as messages:
            workers = [client_of(operations, address, tmp_path / name, app()) for name in ("a", "b")]
            for worker in workers:
                worker.start()
            rounds: list[int] = []
            for event, _, data in messages:
                rounds += [row["round"] for row in data["rows"]] if event == "rows" else []
                if event == "runs" and any(run["status"] == "ended" for run in data["runs"] if run["id"] == "one"):
                    break
            for worker in workers:
                worker.join()
        assert rounds == [1, 2]
        assert operator.post("ledger/verify", {"id": "one"})["ok"]
        operator.act("add_run", run="two", plan=PLAN.replace("rounds = 2", "rounds = 100000"))
        operator.act("stop_run", id="two")
        made = operator.act("access_add", name="Li", role="viewer", hours=1)
        operator.act("access_revoke", id=made["id"])

        records = viewer.get("ledger", id=OPERATOR)["records"]
        done = [(each["body"].get("do"), each["body"].get("by")) for each in records[1:]]
        assert [do for do, _ in done if do not in ("make an enrolment token", "approve")] == [
            "revoke",
            "add a run",
            "add a run",
            "stop a run",
            "give access",
            "revoke access",
        ]
        assert {by for do, by in done if do in ("add a run", "revoke", "give access")} == {"Ada"}
        assert token not in str(records) and made["link"] not in str(records)
        assert operator.post("ledger/verify", {"id": OPERATOR})["ok"]
    with page_of(home) as (operations, _):
        assert len(operations.ledger_lines(OPERATOR)) == len(records), "it outlives the server"


def test_plans_that_name_code_are_refused_before_they_are_built(home: Path) -> None:
    with page_of(home) as (operations, url):
        operator = Browser(url, operations.access)
        plan = PLAN.replace('model = "logistic"', 'model = "os:getcwd"')
        assert "over a network" in operator.act("check_plan", plan=plan)["problem"]
        assert "over a network" in operator.act("add_run", 400, run="one", plan=plan)["error"]
        assert "not valid TOML" in operator.act("check_plan", plan="rounds =")["problem"]
        assert "small letters" in operator.act("add_run", 400, run="../x", plan=PLAN)["error"]


def test_actions_by_the_operators_token_are_recorded_too(home: Path) -> None:
    with page_of(home) as (operations, url):
        client = enrol(operations, "a", operations.token(60))
        operations.approve([client])
        operations.revoke("a")
        viewer = Browser(url, operations.access, Role.VIEWER)
        says = [each["says"] for each in viewer.get("ledger", id=OPERATOR)["records"]]
        assert "operator: revoke" in says[-1] and client in says[-1]


def test_who_is_asked_is_hidden_where_privacy_needs_it(home: Path, tmp_path: Path) -> None:
    for plan, hidden in ((PLAN, False), (PRIVATE, True)):
        lives: list[Any] = []
        with page_of(home / str(hidden)) as (operations, _), serving(operations) as address:
            states = FederationPage(operations).states

            def look(run: str, event: Event, states: Any = states, lives: list[Any] = lives) -> None:
                lives += [states()["one"].live] if isinstance(event, TasksSent) else []

            operations.driver.journal.watch = look
            operations.add_run("one", Plan.from_toml(plan))
            workers = [client_of(operations, address, tmp_path / f"{name}{hidden}", app()) for name in ("a", "b")]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert len(lives) >= 2
        for live in lives:
            assert (live["clients"] is None) == (live["asked"] is None) == (live["arrived"] is None) == hidden
