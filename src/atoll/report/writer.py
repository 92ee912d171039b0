"""The writer of run directories, for every driver: a reader of events, and the files of a run's beginning and end."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from atoll.commit.parts import RunParts
from atoll.commit.run_state import RunState
from atoll.core.events import Evaluated, Event, NewClientsEvaluated, RoundCommitted, RunEnded, RunStarted
from atoll.core.messages import State
from atoll.report.reading import model_text
from atoll.report.record import RunDirectory, plain


class RunWriter:
    """Keeps `history` and the files of a run in step with its events; without a directory, the history alone."""

    def __init__(self, directory: RunDirectory | None, history: list[dict[str, Any]]) -> None:
        self.directory, self.history = directory, history
        self.new_clients: NewClientsEvaluated | None = None
        """What was measured of new clients, once it is."""
        self._confusion: dict[str, Any] | None = None

    def __call__(self, event: Event) -> None:
        """Write down an event; what cannot be written raises."""
        match event:
            case RunStarted():
                self._log(
                    f"begins after round {event.version} of {event.rounds}: {event.title}; "
                    f"set-up took {event.setup_seconds:.1f} s"
                )
            case Evaluated():
                self._evaluated(event)
            case NewClientsEvaluated():
                self.new_clients = event
            case RoundCommitted():
                self._add_row(event.row)
            case RunEnded():
                self._log(f"ends after round {event.version}: {event.reason}")
            case _:
                pass

    def describe(self, info: Mapping[str, Any], partition: Mapping[str, Any] | None = None) -> None:
        """Write what is known before the first round; `run.json` comes last: where it is, all is."""
        if self.directory is not None:
            if partition is not None:
                self.directory.write_json("partition.json", partition)
            self.directory.write_json("run.json", info)

    def finish(self, reason: str, state: RunState, model: State | None) -> None:
        """Write how a run ended; `result.json` comes last: where it is, all is. `model` is None if it was stopped."""
        if self.directory is None:
            return
        if model is not None:
            self.directory.save_model(model)
        self.save_confusion()
        result = run_result(reason, self.history, state.contribution)
        if self.new_clients is not None:
            figures = {str(steps): each for steps, each in self.new_clients.figures.items()}
            result["new_clients"] = {"metric": self.new_clients.main, "after_steps": figures}
        self.directory.write_json("result.json", result)

    def save_confusion(self) -> None:
        """Write the newest confusion matrix, if one was measured."""
        if self.directory is not None and self._confusion is not None:
            self.directory.write_json("confusion.json", self._confusion)

    @property
    def has_confusion(self) -> bool:
        """Whether a confusion matrix was measured since this writer was made."""
        return self._confusion is not None

    def rewind(self, round_number: int) -> None:
        """Drop what was written of later rounds."""
        self.history[:] = [row for row in self.history if row["round"] <= round_number]
        if self.directory is not None:
            self.directory.keep_rows(round_number)

    def _add_row(self, row: dict[str, Any]) -> None:
        """Add a round, or more about the last one."""
        if self.history and self.history[-1]["round"] == row["round"]:
            self.rewind(row["round"] - 1)
        if self.directory is not None:
            self.directory.add_row(row)
        self.history.append(row)

    def _evaluated(self, event: Evaluated) -> None:
        if "confusion" in event.charts:
            self._confusion = {"round": event.version, **event.charts["confusion"]}
        others = {name: chart for name, chart in event.charts.items() if name != "confusion"}
        if others and self.directory is not None:
            self.directory.write_json("charts.json", {"round": event.version, **others})
        if event.scores_C2 is not None and self.directory is not None:
            main_C, loss_C = plain(event.scores_C2.T)
            clients = list(event.clients)
            scores = {"round": event.version, "clients": clients, event.main: main_C, "loss": loss_C}
            scores |= {} if event.main == "accuracy" else {"metric": event.main}
            self.directory.write_json("clients.json", scores)

    def _log(self, text: str) -> None:
        if self.directory is not None:
            self.directory.log(text)


class Checkpoints:
    """Writes the state of a run now and then; no checkpoint is ahead of what was written about its rounds."""

    def __init__(self, writer: RunWriter, identity: str, state: RunState, every_seconds: float) -> None:
        self.state = state
        """The last state that was recorded."""
        self._writer, self._identity, self._every = writer, identity, every_seconds
        self._saved_at = time.monotonic()

    def record(self, state: RunState) -> None:
        """Take note of the state after rounds whose events have been written, and write it if it is time."""
        self.state = state
        if time.monotonic() - self._saved_at >= self._every:
            self.save()

    def rewind(self) -> None:
        """Drop what was written of a round whose state was not recorded yet when something interrupted."""
        self._writer.rewind(self.state.coordinator.version)

    def save(self) -> None:
        """Write a checkpoint of the last recorded state."""
        directory = self._writer.directory
        if directory is not None:
            self._writer.save_confusion()
            directory.save(self.state, self._identity)
            self._saved_at = time.monotonic()


def run_info(parts: RunParts, *, name: str, setup_seconds: float, num_train: int) -> dict[str, Any]:
    """Describe a run before its first round, for `run.json`: the choice of engine above all."""
    job, engine = parts.job, parts.engine
    dataset = job.federation.dataset
    info: dict[str, Any] = {
        "atoll": version("atoll"),
        "name": name,
        "identity": parts.plan.identity(),
        "engine": engine.describe(),
        "setup_seconds": round(setup_seconds, 3),
        "model": {"name": model_text(parts.plan), "num_params": max(k.spec.num_params for k in job.work.jobs(job))},
        "data": {
            "name": dataset.name,
            "num_train": num_train,
            "num_test": dataset.num_test,
            "num_classes": dataset.num_classes,
            "class_names": list(dataset.class_names),
        },
        "num_clients": job.federation.num_clients,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if job.federation.new_numbers:
        info["new_clients"] = job.federation.new_numbers
    if parts.guard is not None:
        info["privacy"] = parts.guard.statement()
    if engine.trainer.alone_because is not None:
        info["one_by_one"] = engine.trainer.alone_because
    if engine.trainer.slow_because is not None:
        info["no_kernels"] = engine.trainer.slow_because
    return info


def run_result(reason: str, rows: Sequence[Mapping[str, Any]], contribution: Mapping[int, float]) -> dict[str, Any]:
    """Summarise how a run ended, for `result.json`."""
    last = rows[-1] if rows else {}
    summary: dict[str, Any] = {
        "reason": reason,
        "rounds": last.get("round", 0),
        "seconds": last.get("seconds", 0.0),
        "test": next((row["test"] for row in reversed(rows) if "test" in row), None),
    }
    detection = next((row["detection"] for row in reversed(rows) if "detection" in row), None)
    if detection is not None:
        summary["detection"] = {key: value for key, value in detection.items() if key != "clients"}
    if contribution:
        summary["contribution"] = {str(client): contribution[client] for client in sorted(contribution)}
    return summary
