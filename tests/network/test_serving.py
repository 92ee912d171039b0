"""A server as a process: that it ends when it is told to."""

from __future__ import annotations

import signal
from pathlib import Path

from network.federation import federation
from network.nursery import Nursery

from atoll import Plan


def test_a_server_that_waits_for_the_end_can_be_ended_before(processes: Nursery, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "once", processes, certs, Plan()) as made:
        server = made.serve("--clients", "2", "--once")
        assert made.health()[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait(15) == 0
