"""A server as a process: that it ends when it is told to, and computes as a simulation does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from network.federation import federation, until
from network.fork_server import ForkServer
from network.in_process_server import operated

from atoll import Plan
from atoll.cli.join import enrol
from atoll.core.errors import RunError
from atoll.network.server.store import Store


def test_a_server_that_waits_for_the_end_can_be_ended_before(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    with federation(tmp_path / "once", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2", "--once")
        assert made.health()[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait(15) == 0


def test_two_homes_do_not_serve_one_store(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    with (
        federation(tmp_path / "one", processes, certs, Plan(), store) as one,
        federation(tmp_path / "two", processes, certs, Plan(), store) as two,
    ):
        first = one.serve("--clients", "2")
        second = two.serve("--clients", "2", ready=False)
        assert second.wait(60) != 0
        assert "another server uses the store" in second.said and "Traceback" not in second.said
        assert one.health()[0] == 200
        first.kill()
        two.serve("--clients", "2", plan=False)
        assert two.health()[0] == 200


def test_a_server_ends_when_another_has_taken_its_store(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "one", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2")
        thief = Store(f"sqlite:///{made.home}/store.db")
        with thief.write() as tables:
            tables.set_meta("owner", "another")
        thief.close()
        with pytest.raises(RunError):
            made.operate("POST", "/clients/token", {"seconds": 60})
        assert server.wait(30) == 5
        assert "another server uses the store" in server.said.splitlines()[-1]


def test_sums_of_a_server_do_not_depend_on_the_number_of_cores(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with operated(tmp_path / "home"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
    finally:
        torch.set_num_threads(before)


def test_a_server_begins_with_as_many_clients_as_the_plan_asks_for(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    plan = Plan(partition={"name": "iid", "num_clients": 2}, policy={"size": 2}, local={"steps": 1}, rounds=2)
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve("--once")
        made.enrol(1)
        made.join(0)
        until(lambda: made.operate("GET", "/status")["clients"]["online"] == 1, 60)
        token = made.operate("POST", "/clients/token", {"seconds": 600})["token"]
        enrol(made.url, token, "c1", made.root / "c1", made.certs / "ca.pem")
        assert made.operate("POST", "/clients/approve", {"names": ["c1"]})["numbers"] == [1]
        made.join(1)
        made.wait(60)
        assert [len(commit["cohort"]) for commit in made.commits()] == [2, 2]


@pytest.mark.parametrize(
    ("policy", "way_out"),
    [({"size": 10}, "--set policy.size=2"), ({"name": "buffered", "size": 2}, "--set policy.concurrency=2")],
    ids=["cohort", "buffered"],
)
def test_a_plan_for_more_clients_than_the_server_begins_with(
    processes: ForkServer, certs: Path, tmp_path: Path, policy: dict[str, Any], way_out: str
) -> None:
    with federation(tmp_path / "f", processes, certs, Plan(policy=policy)) as made:
        server = made.serve("--clients", "2", ready=False)
        assert server.wait(60) != 0
        asked = policy.get("size") if len(policy) == 1 else 100
        assert f"the plan's policy asks for {asked} clients, but the server is to begin with 2" in server.said
        assert f"--clients {asked}" in server.said and way_out in server.said
        assert server.said.count("\n") == 1 and "partition" not in server.said
        begun = made.serve()  # without --clients it waits for them
        assert begun.code is None and made.status()["round"] == 0


def test_settings_without_a_plan_are_refused(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "f", processes, certs, Plan()) as made:
        server = made.serve("--set", "rounds=3", plan=False, ready=False)
        assert server.wait(60) != 0
        assert "--set changes a plan, but none is named" in server.said and server.said.count("\n") == 1
