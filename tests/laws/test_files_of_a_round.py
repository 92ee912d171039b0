"""A round stays easy to follow: the number of source files that it crosses does not grow."""

from __future__ import annotations

import json
import re
from pathlib import Path

from network.fork_server import ForkServer

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "count_files.py"
MOST_SIMULATION, MOST_NETWORK = 34, 73
"""What a FedAvg round crosses at most, in simulation and on the network; lower them with the figures."""
CENTRE = ("core/coordinator.py", "train/loop.py", "aggregators/mean.py")
"""What every FedAvg round crosses, in the order in which it is first entered."""


def test_a_round_crosses_few_files(processes: ForkServer, tmp_path: Path) -> None:
    counting = processes.start([str(TOOL), "--json"], tmp_path / "out", tmp_path, err=tmp_path / "err", python=True)
    assert counting.wait(240) == 0, (tmp_path / "err").read_text()
    found = json.loads(counting.said)
    for where, most in (("simulation", MOST_SIMULATION), ("network", MOST_NETWORK)):
        files = [file for file, _, _ in found[where]]
        assert [file for file in files if file in CENTRE] == list(CENTRE)
        assert len(files) <= most, f"{where}: {len(files)} files: {' '.join(files)}"
    assert {side for _, side, _ in found["simulation"]} == {""}
    assert {side for file, side, _ in found["network"] if file == "train/loop.py"} == {"client"}
    assert {side for file, side, _ in found["network"] if file == "aggregators/mean.py"} == {"server"}
    assert {file for file, _, _ in found["network"]} <= walked_files()
    assert all(calls > 0 for files in found.values() for _, _, calls in files)


def walked_files() -> set[str]:
    """Return the files that the walk through a round over a network names."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("### A round over a network\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w/]+\.py)`", section)) - {"tools/count_files.py"}


def test_the_walk_through_a_round_names_files_that_exist() -> None:
    walked = walked_files()
    assert len(walked) > 40
    assert [file for file in walked if not (ROOT / "src" / "atoll" / file).exists()] == []
