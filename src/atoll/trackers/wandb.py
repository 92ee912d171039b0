"""Tracking by Weights & Biases: a run of a project, online or offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

from atoll.core.coordinator import FAILURES
from atoll.core.plan import Plan
from atoll.trackers.tracked import CUT_OFF, NOTHING, Figures, Note, Tracker, missing


def wandb(
    directory: str | Path | None = None,
    *,
    project: str | None = None,
    name: str = "",
    mode: Literal["online", "offline", "disabled"] | None = None,
) -> Tracker:
    """Log figures to Weights & Biases; what is not given is taken from its settings, such as WANDB_PROJECT, WANDB_MODE.

    With the run's `directory`, its files lie there in wandb, and a resumed run goes on with the same id, which is noted
    in wandb.json. `name` is that of the run, by default the directory's.
    """
    try:
        import wandb as package
    except ImportError as error:
        raise missing("Weights & Biases", "wandb", error) from error
    path = None if directory is None else Path(directory)
    title = name or (path.resolve().name if path is not None else "")
    return Tracker(_Wandb(package, path, project, title, mode), path)


@final
class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, package: Any, directory: Path | None, project: str | None, name: str, mode: str | None) -> None:
        self._package, self._directory = package, directory
        self._project, self._name, self._mode = project, name, mode
        self._note, self._round = Note(directory, "wandb.json"), NOTHING
        self._run: Any = None

    def start(self, title: str, plan: Plan | None, version: int) -> int:
        """Begin a run with the plan as its config, or go on with the id that was noted."""
        noted = self._note.read()
        self._round = int(noted.get("round", NOTHING))
        self._run = self._package.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or "atoll",
            name=self._name or None,
            id=noted.get("id"),
            resume="allow" if noted else None,
            dir=None if self._directory is None else str(self._directory),
            config=plan.to_dict() if plan is not None else None,
            mode=self._mode,
            notes=title,
            reinit="create_new",
            settings=self._package.Settings(silent=True),
        )
        self._write()
        return self._round

    def log(self, rows: Sequence[Figures]) -> None:
        """Add figures with the round as step."""
        for number, values in rows:
            self._run.log(dict(values), step=number)
            self._round = number
        self._write()

    def end(self, reason: str) -> None:
        """Close the run; its summary says why it ended."""
        self._run.summary["reason"] = reason
        self._run.finish(exit_code=int(reason in FAILURES or reason == CUT_OFF))

    def _write(self) -> None:
        self._note.write({"id": self._run.id, "round": self._round})
