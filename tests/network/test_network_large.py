"""A model of 500 MB goes there and back in bounded memory, and what was sent before a kill is not sent again."""

from __future__ import annotations

import filecmp
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from network.federation import RUN, Federation, federation
from network.fork_server import ForkedProcess, ForkServer
from network.large_model import NAME

from atoll import Plan

NUM, ROUNDS = 2, 2
PLAN = Plan(
    seed=3,
    rounds=ROUNDS,
    partition={"name": "iid", "num_clients": NUM},
    model={"name": NAME, "width": 5580},
    local={"steps": 1, "batch_size": 2, "lr": 0.01},
)
APP, MEGABYTE = "network.large_model:client", 1 << 20
SLACK = 8 * MEGABYTE
"""Bytes beside the chunks: polls, manifests, the ledger, and a chunk that was on its way at each kill."""


def counted(made: Federation) -> tuple[int, int]:
    """Bytes that the server has received and sent since it began."""
    text = httpx2.get(f"http://127.0.0.1:{made.admin_port}/metrics", trust_env=False).text
    found = [re.search(rf"^atoll_{name}_bytes_total (\S+)$", text, re.MULTILINE) for name in ("received", "sent")]
    received, sent = (int(float(each[1])) for each in found if each is not None)
    return received, sent


def peak_of(child: ForkedProcess) -> int:
    """The most bytes that a process ever had in memory; 0 if it is gone."""
    try:
        text = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def num_files(folder: Path, start: str = "") -> int:
    return sum(name.startswith(start) for name in os.listdir(folder)) if folder.exists() else 0


@pytest.mark.slow
def test_half_a_gigabyte_there_and_back(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "f", processes, certs, PLAN) as made:
        server = made.serve("--clients", str(NUM))
        made.enrol(NUM)
        peaks = {"server": 0, "client": 0}
        chunks: dict[tuple[int, int], int] = {}
        uploads = made.directory() / "uploads"

        def wait(done: Callable[[], bool], what: str) -> None:
            """Wait for something, and see how much memory everybody takes meanwhile."""
            end = time.monotonic() + 300
            while not done():
                assert time.monotonic() < end, f"waited for {what}\n{made.said()}"
                peaks["server"] = max(peaks["server"], peak_of(server))
                peaks["client"] = max(peaks["client"], *map(peak_of, made.clients.values()))
                for place in itertools.product(range(ROUNDS), range(NUM)):
                    chunks[place] = max(chunks.get(place, 0), num_files(uploads / str(place[0]), f"{place[1]}-"))
                time.sleep(0.1)

        for number in range(NUM):
            made.join(number, app=APP)
        here = made.root / "c0" / "runs" / RUN / "objects" / "chunks"
        wait(lambda: num_files(here) >= 240, "half of the download")
        assert made.clients[0].kill() == -9
        half_down = num_files(here) * MEGABYTE
        made.join(0, app=APP)
        there = uploads / "0"
        wait(lambda: num_files(there, "0-") >= 155, "half of the upload")
        assert made.clients[0].kill() == -9
        half_up = num_files(there, "0-") * MEGABYTE
        made.join(0, app=APP)
        wait(lambda: all(child.code is not None for child in made.clients.values()), "the end")
        peaks["server"] = max(peaks["server"], peak_of(server))
        received, sent = counted(made)
        size = (made.directory() / "model.safetensors").stat().st_size
        up = MEGABYTE * sum(chunks.values())  # updates travel compressed
        print({who: f"{peak / size:.2f} models" for who, peak in peaks.items()}, f"of {size:,} bytes")
        print(f"received {received:,} for {up:,}, sent {sent:,}; there when killed: {half_down:,} down, {half_up:,} up")
        assert made.wait_for(RUN, 1) == "all rounds done"
        assert made.audited().rounds == ROUNDS
        assert 0.3 * size < half_down < 0.7 * size and 0.3 * up < NUM * ROUNDS * half_up < 0.7 * up
        assert 0 < sent - NUM * (ROUNDS + 1) * size < SLACK  # at the end each takes the model home
        for number in range(NUM):
            taken = made.root / f"c{number}" / "runs" / RUN / "model.safetensors"
            assert filecmp.cmp(taken, made.directory() / "model.safetensors", shallow=False)
        assert up <= made.rows()[-1]["bytes_up"] and -NUM * ROUNDS * MEGABYTE < received - up < SLACK
        assert peaks["server"] < 6 * size and peaks["client"] < 6 * size
