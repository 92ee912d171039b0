"""The directory of a run on the server: its states, and the files for people.

It holds plan.toml, metrics.jsonl, ledger.jsonl and the report's files as any run's does. What counts is in the store,
from which the files for people are written again after a kill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll.commit.finish import measured_again
from atoll.commit.run_state import RunState, encode_state, read_state
from atoll.core.events import Evaluated, Event, RunEnded, RunStarted
from atoll.core.messages import State
from atoll.core.params import load
from atoll.core.plan import Plan
from atoll.ledger import chain
from atoll.network.protocol.blobs import write_file
from atoll.network.server.parts import ServerParts
from atoll.report.record import RunDirectory
from atoll.report.writer import RunWriter, run_info
from atoll.split.columns import VerticalParties
from atoll.train.job import Job
from atoll.train.model import final_model
from atoll.train.works.sgd import shared_tensors

LEDGER, INFO, RESULT, SITES = "ledger.jsonl", "run.json", "result.json", "sites.json"


class RunFiles:
    """Writes the files of one run."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory, self._plan, self._identity = directory, plan, plan.identity()
        exists = (directory / "plan.toml").exists()
        self._directory = RunDirectory.reopen(directory) if exists else RunDirectory.create(directory, plan)
        self._writer = RunWriter(self._directory, [])
        self.stale = False
        """Whether the files for people differ from the store."""

    def close(self) -> None:
        """Close open files."""
        self._directory.close()

    @property
    def last_row(self) -> dict[str, Any] | None:
        """Return the metrics row of the last round, if there was one."""
        history = self._writer.history
        return history[-1] if history else None

    def save_state(self, state: RunState) -> str:
        """Write the state to a file of its own; nothing refers to it until the store does."""
        parts, digest = list(encode_state(state, self._identity)), hashlib.sha256()
        for part in parts:
            digest.update(part)
        name = f"state-{state.coordinator.attempt}-{digest.hexdigest()[:16]}.safetensors"
        write_file(self.directory / name, self.directory / f".{name}.new", *parts)
        return name

    def read_state(self, name: str) -> RunState:
        """Read a state that was saved."""
        return read_state(self.directory / name, self._identity)

    def remove_other_states(self, name: str) -> None:
        """Remove all states but the one that the store refers to."""
        for path in (*self.directory.glob(".state-*.new"), *self.directory.glob("state-*.safetensors")):
            if path.name != name:
                path.unlink(missing_ok=True)

    def update(self, write: Callable[[], None]) -> None:
        """Write to the files for people unless they are stale; after an error they are, until `rewrite`."""
        if not self.stale:
            self.stale = True
            write()
            self.stale = False

    def rewrite(
        self, rows: list[dict[str, Any]], lines: list[str], parts: ServerParts, state: RunState, version: int
    ) -> None:
        """Write the files for people as the store has them, whatever a kill or a full disk has prevented."""
        self.stale = True
        self._directory.write_rows(rows)
        self._writer.history[:] = rows
        self._directory.write_text(LEDGER, "".join(f"{line}\n" for line in lines))
        if lines and not (self.directory / INFO).exists():
            self.describe(parts, version)
        if lines and not (self.directory / RESULT).exists():
            last, _ = chain.read(lines[-1])
            if last.kind == chain.END:
                self.finish(last.body["reason"], parts, state)
        self.stale = False

    def write_sites(self, result: Mapping[str, Any], row: Mapping[str, Any] | None) -> None:
        """Write what clients measured of a version, and replace its metrics row."""
        self._directory.write_json(SITES, result)
        history = self._writer.history
        places = [place for place, known in enumerate(history) if row is not None and known["round"] == row["round"]]
        for place in places:
            history[place] = dict(row or {})
            self._directory.write_rows(history)

    @property
    def given_model(self) -> Path:
        """Return the file of the model that the operator lets the run start from; there may be none."""
        return self.directory / "first.safetensors"

    def sites(self) -> dict[str, Any] | None:
        """Return what clients measured of the newest version that they have, if they did."""
        path = self.directory / SITES
        found: dict[str, Any] | None = self._directory.read_json(SITES) if path.exists() else None
        return found

    def row(self, version: int) -> dict[str, Any] | None:
        """Return the metrics row of a version, if there is one."""
        return next((row for row in reversed(self._writer.history) if row["round"] == version), None)

    def describe(self, parts: ServerParts, version: int) -> None:
        """Write what is known before the first round."""
        sizes, parties = parts.job.federation.partition.sizes(), parts.parties
        num_train = int(sizes[parties.labels] if isinstance(parties, VerticalParties) else sizes.sum())
        info = run_info(parts, name=self._plan.name or self.directory.name, setup_seconds=0.0, num_train=num_train)
        if parties is not None:
            info["split"] = parties.describe()
        self._writer.describe(info)
        title = f"{info['model']['name']} on the samples of {info['num_clients']} clients"
        self._writer(RunStarted(title=title, version=version, rounds=self._plan.rounds))

    def append(self, events: Iterable[Event], line: str = "") -> None:
        """Append events and a ledger line; what a kill prevents is written at the next start."""
        for event in events:
            self._writer(event)
        if line:
            self._directory.append(LEDGER, line)

    def finish(self, reason: str, parts: ServerParts, state: RunState) -> None:
        """Write the model, the confusion matrix and the result."""
        job, version = parts.job, state.coordinator.version
        if self.last_row is not None and not self._writer.has_confusion:  # the process that measured it is gone
            for event in measured_again(parts, state, {"round": version}):
                if isinstance(event, Evaluated):
                    self._writer(event)
        self._writer.finish(reason, state, self._tensors(job, state))
        self._writer(RunEnded(reason=reason, version=version))

    def _tensors(self, job: Job, state: RunState) -> State:
        """Return what is saved of the last version, by name: the model without what clients keep, or several models."""
        if job.work.copies is not None:
            return job.spec.views(state.params_D)
        return shared_tensors(job, load(final_model(self._plan, job), job.spec, state.params_D))
