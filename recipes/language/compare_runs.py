"""Runs of compare.py that are made once and kept, and losses of models on rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll import Plan, run
from atoll.core.events import Evaluated, Event
from atoll.data.targets import IGNORED


class Runs:
    """Runs by name, each made once, with what they measured at clients."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def plan(self, plan: Plan, changes: Mapping[str, object]) -> Plan:
        """Return a plan for the base model, with some settings changed."""
        return plan.replace({"data.tokenizer": self.model, "model.path": self.model, **changes})

    def done(self, name: str, plan: Plan) -> Path:
        """Return the directory of a run, which is made if there is none."""
        path = self.folder / name
        if not (path / "result.json").exists():
            print(name, flush=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            watch = [_recorder(self.folder / f"{name}.jsonl")]
            run(plan, out=path, resume=(path / "plan.toml").exists(), watch=watch, report=False)
        return path

    def nats(self, name: str, plan: Plan) -> list[list[float]]:
        """Return nats a token on each client's held-out text, for every time that it was measured."""
        self.done(name, plan)
        lines = (self.folder / f"{name}.jsonl").read_text().splitlines()
        by_round = {entry["round"]: entry["nats"] for entry in map(json.loads, lines)}
        return [by_round[number] for number in sorted(by_round)]

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that was computed before, or compute it."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(make()))
            part.replace(path)
        return json.loads(path.read_text())


def _recorder(path: Path) -> Callable[[Event], None]:
    """Return a reader of events that appends what was measured at clients to a file."""

    def read(event: Event) -> None:
        if isinstance(event, Evaluated) and event.scores_C2 is not None:
            entry = {"round": event.version, "nats": np.log(event.scores_C2[:, 0]).tolist()}
            with path.open("a") as stream:
                stream.write(json.dumps(entry) + "\n")

    return read


def mean_nats(model: torch.nn.Module, x_NT: np.ndarray, y_NT: np.ndarray) -> float:
    """Return the mean cross entropy over all positions that count."""
    total, count = 0.0, int((y_NT != IGNORED).sum())
    with torch.inference_mode():
        for start in range(0, len(x_NT), 32):
            rows = slice(start, start + 32)
            scores, y = model(torch.from_numpy(x_NT[rows]).long()), torch.from_numpy(y_NT[rows]).long()
            total += float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum"))
    return total / count
