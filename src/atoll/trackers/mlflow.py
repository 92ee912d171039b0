"""Tracking by MLflow: a run of an experiment, with the plan's settings as parameters."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.plan import Plan
from atoll.trackers.tracked import CUT_OFF, NOTHING, Figures, Note, Tracker, missing, settings_of

MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500
"""How many metrics and parameters MLflow takes at once, and how long a parameter may be in all of its versions."""
MARK = "atoll.last_round"
"""Metric that holds the number of each round, by which a resumed run finds the last."""


def mlflow(
    directory: str | Path | None = None, *, experiment: str = "atoll", name: str = "", uri: str | None = None
) -> Tracker:
    """Log figures to MLflow at `uri`, by default that of MLFLOW_TRACKING_URI or of MLflow itself.

    With the run's `directory`, a resumed run goes on with its MLflow run, whose id is noted there in mlflow.json.
    `name` is that of the MLflow run, by default the directory's.
    """
    try:
        from mlflow import MlflowClient, entities
    except ImportError as error:
        raise missing("MLflow", "mlflow", error) from error
    path = None if directory is None else Path(directory)
    title = name or (path.resolve().name if path is not None else "")
    return Tracker(_MLflow(MlflowClient(tracking_uri=uri), entities, experiment, title, path), path)


@final
class _MLflow:
    """A run of MLflow, by its client: nothing here is global, so that several runs may be tracked in one process."""

    def __init__(self, client: Any, entities: Any, experiment: str, name: str, directory: Path | None) -> None:
        self._client, self._entities, self._experiment, self._name = client, entities, experiment, name
        self._note, self._run = Note(directory, "mlflow.json"), ""

    def start(self, title: str, plan: Plan | None, version: int) -> int:
        """Begin a run with the plan's settings as parameters, or go on with the one that was noted."""
        client, self._run = self._client, str(self._note.read().get("run", ""))
        if self._run:
            client.update_run(self._run, status="RUNNING")
            return max((round(each.value) for each in client.get_metric_history(self._run, MARK)), default=NOTHING)
        found = client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        tags = {"atoll.title": title}
        self._run = client.create_run(number, tags=tags, run_name=self._name or None).info.run_id
        self._note.write({"run": self._run})
        settings = list(settings_of(plan).items()) if plan is not None else []
        for start in range(0, len(settings), MOST_PARAMS):
            pairs = settings[start : start + MOST_PARAMS]
            client.log_batch(self._run, params=[self._entities.Param(key, text[:LONGEST]) for key, text in pairs])
        return NOTHING

    def log(self, rows: Sequence[Figures]) -> None:
        """Add metrics with the round as step."""
        now = round(1000 * time.time())
        metrics = [
            self._entities.Metric(_name(name), value, now, number)
            for number, values in rows
            for name, value in {**values, MARK: float(number)}.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MOST_METRICS])

    def end(self, reason: str) -> None:
        """Set the status of the run, and its end as a tag."""
        failed, stopped = reason in FAILURES or reason == CUT_OFF, reason == Reason.INTERRUPTED
        self._client.set_tag(self._run, "atoll.reason", reason)
        self._client.set_terminated(self._run, "FAILED" if failed else "KILLED" if stopped else "FINISHED")


def _name(name: str) -> str:
    """Return a name of the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
