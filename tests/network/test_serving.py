"""A server as a process: that it ends when it is told to, and computes as a simulation does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from network.federation import federation
from network.nursery import Nursery
from network.operated import operated

from atoll import Plan
from atoll.core.errors import RunError
from atoll.network.store import Store


def test_a_server_that_waits_for_the_end_can_be_ended_before(processes: Nursery, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "once", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2", "--once")
        assert made.health()[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait(15) == 0


def test_two_homes_do_not_serve_one_store(processes: Nursery, certs: Path, tmp_path: Path) -> None:
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


def test_a_server_ends_when_another_has_taken_its_store(processes: Nursery, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "one", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2")
        thief = Store(f"sqlite:///{made.home}/store.db")
        with thief.change() as book:
            book.set_meta("owner", "another")
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
