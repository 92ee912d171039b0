"""Runs that are tracked by Weights & Biases offline, read back from its own files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trackers.test_trackers import PLAN, interrupt_at, same_curves, written

import atoll

pytestmark = pytest.mark.slow
wandb: Any = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'atoll[wandb]'")


HEADER, BLOCK = 7, 32 * 1024
"""Bytes of the head of a file, a block and a piece: a file of Weights & Biases is a log of LevelDB."""
FULL, LAST = 1, 4


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log; those that cross blocks lie in several pieces."""
    assert data[:4] == b":W&B"
    place, record = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def records(folder: Path) -> list[Any]:
    """What the files of all offline runs hold, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert files
    return [Record.FromString(piece) for path in files for piece in pieces(path.read_bytes())]


def curves(held: list[Any]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in held:
        items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((items["_step"], value))
    return found


def test_its_files_hold_what_metrics_hold(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tracker = atoll.trackers.wandb(path, project="atoll-test", mode="offline")
    atoll.run(PLAN, out=path, watch=[tracker], report=False)
    held = records(path)
    same_curves(curves(held), written(path))
    [run] = [record.run for record in held if record.HasField("run")]
    config = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["local"]["lr"] == 0.1 and run.project == "atoll-test" and run.display_name == "run"


def test_a_resumed_run_goes_on_with_the_same_id(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def tracker() -> Any:
        return atoll.trackers.wandb(path, mode="offline")

    atoll.run(PLAN, out=path, watch=[tracker(), interrupt_at(2)], report=False)
    atoll.resume(path, watch=[tracker()])
    held = records(path)
    assert len({record.run.run_id for record in held if record.HasField("run")}) == 1
    assert curves(held)["train_loss"] == written(path)["train_loss"]
