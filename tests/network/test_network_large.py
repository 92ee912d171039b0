"""A model of 500 MB goes there and back in bounded memory, and what was sent before a kill is not sent again."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from network.federation import RUN, Federation, federation, until
from network.large import NAME
from network.nursery import Child, Nursery

from atoll import Plan

NUM, ROUNDS = 2, 2
PLAN = Plan(
    seed=3,
    rounds=ROUNDS,
    partition={"name": "iid", "num_clients": NUM},
    model={"name": NAME, "width": 5580},
    local={"steps": 1, "batch_size": 2, "lr": 0.01},
)
CHUNK, APP = 1 << 20, "network.large:client"


def counted(made: Federation) -> tuple[int, int]:
    """Bytes that the server has received and sent since it began."""
    text = httpx2.get(f"http://127.0.0.1:{made.admin_port}/metrics", trust_env=False).text
    found = [re.search(rf"^atoll_{name}_bytes_total (\S+)$", text, re.MULTILINE) for name in ("received", "sent")]
    received, sent = (int(float(each[1])) for each in found if each is not None)
    return received, sent


def peak_of(child: Child) -> int:
    """The most bytes that a process ever had in memory; 0 if it is gone."""
    try:
        text = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def num_files(folder: Path) -> int:
    return sum(1 for path in folder.glob("*") if path.is_file())


@pytest.mark.slow
def test_half_a_gigabyte_there_and_back(processes: Nursery, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "f", processes, certs, PLAN) as made:
        server = made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        peaks = {"server": 0, "client": 0}

        def look() -> bool:
            peaks["server"] = max(peaks["server"], peak_of(server))
            peaks["client"] = max(peaks["client"], *(peak_of(child) for child in made.clients.values()))
            return server.code is not None

        first = made.join(0, app=APP)
        made.join(1, app=APP)
        chunks = made.root / "c0" / "runs" / RUN / "objects" / "chunks"
        until(lambda: look() or num_files(chunks) >= 240, 300, f"half of the download\n{made.said()}")
        assert first.kill() == -9
        again, here = made.join(0, app=APP), num_files(chunks)
        sent = made.directory() / "uploads" / "0" / "0"
        until(lambda: look() or num_files(sent) >= 220, 300, f"half of the upload\n{made.said()}")
        assert again.kill() == -9
        there = num_files(sent)
        made.join(0, app=APP)
        received, down = 0, 0
        while not look():
            received, down = (
                counted(made) if server.code is None and made.status()["round"] < ROUNDS else (received, down)
            )
            until(lambda: True, 1)
        made.wait(60)
        size = made.directory().joinpath("model.safetensors").stat().st_size
        print({who: round(peak / size, 2) for who, peak in peaks.items()}, size, received, down, here, there)
        assert made.audited().rounds == ROUNDS
