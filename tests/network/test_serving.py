"""A server as a process: that it ends when it is told to, and computes as a simulation does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from network.federation import federation
from network.nursery import Nursery
from network.operated import operated

from atoll import Plan


def test_a_server_that_waits_for_the_end_can_be_ended_before(processes: Nursery, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "once", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2", "--once")
        assert made.health()[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait(15) == 0


def test_sums_of_a_server_do_not_depend_on_the_number_of_cores(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with operated(tmp_path / "home"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
    finally:
        torch.set_num_threads(before)
