"""What a person sees while a run goes on."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from atoll.report.reading import human_bytes, human_seconds, privacy_text


class Watcher(Protocol):
    """Somebody who looks on. Every method may do nothing."""

    def begin(self, title: str, done: int, rounds: int) -> None:
        """A run starts, or goes on after `done` rounds."""

    def clients(self, done: int, total: int) -> None:
        """So many clients of the cohort are trained."""

    def round(self, row: dict[str, Any]) -> None:
        """A round is committed."""

    def end(self) -> None:
        """The run is over or interrupted."""


class Nobody:
    """Looks away."""

    def begin(self, title: str, done: int, rounds: int) -> None:
        """Do nothing."""

    def clients(self, done: int, total: int) -> None:
        """Do nothing."""

    def round(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Bar:
    """A progress bar on a terminal (or in a notebook), or a line now and then where there is none."""

    LINES = 10
    """How many lines a whole run prints where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live = self._console.is_terminal or self._console.is_jupyter
        self._progress: Any = None
        self._best = 0.0

    def begin(self, title: str, done: int, rounds: int) -> None:
        """Show an empty bar."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._title, self._rounds, self._row = title, rounds, {"round": done}
        if not self._live:
            print(f"{title}: {rounds - done} rounds", file=sys.stderr, flush=True)
            return
        self._progress = Progress(
            TextColumn("[bold]round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task("", total=max(rounds, 1), completed=done, numbers=title)
        self._progress.start()

    def clients(self, done: int, total: int) -> None:
        """Move within the round."""
        if self._live:
            self._progress.update(self._task, completed=self._row["round"] + done / max(total, 1) * 0.99)

    def round(self, row: dict[str, Any]) -> None:
        """Show the numbers of a round."""
        self._row = row
        text = summary(row)
        if self._live:
            self._progress.update(self._task, completed=row["round"], numbers=text)
        elif row["round"] % max(1, self._rounds // self.LINES) == 0 or row["round"] == self._rounds:
            print(f"round {row['round']}/{self._rounds}  {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()


def summary(row: dict[str, Any]) -> str:
    """A round in one line, each number with its unit."""
    test = row.get("test", {})
    pieces = [f"accuracy {100 * test['accuracy']:.2f} %"] if "accuracy" in test else []
    pieces += [f"attack success {100 * test['attack_success']:.2f} %"] if "attack_success" in test else []
    loss = test.get("loss", row.get("train_loss"))  # what privacy hides is not there
    pieces += [f"loss {loss:.4f}"] if loss is not None else []
    pieces += [privacy_text(row["privacy"])] if "privacy" in row else []
    if "clients" in row:
        pieces.append(f"{row['clients'] / max(row['round_seconds'], 1e-9):.0f} clients/s")
    if "bytes_up" in row:
        pieces.append(f"up {human_bytes(row['bytes_up'])} down {human_bytes(row['bytes_down'])}")
    if "simulated_seconds" in row:
        pieces.append(f"simulated {human_seconds(row['simulated_seconds'])}")
    pieces.append(human_seconds(row["seconds"]))
    return "  ".join(pieces)


class CellsBar:
    """One bar over many runs, on a terminal; a line after each run where there is none, or nothing at all."""

    def __init__(self, shown: bool = True) -> None:
        self._progress: Any = None
        self._shown, self._done, self._failed = shown, 0, 0

    def begin(self, num_cells: int, num_rounds: int) -> None:
        """Show an empty bar."""
        self._num_cells = num_cells
        if not self._shown:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not (console.is_terminal or console.is_jupyter):
            print(f"{num_cells} cells to run", file=sys.stderr, flush=True)
            return
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds, left"),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(self._text(), total=max(num_rounds, 1))
        self._progress.start()

    def rounds(self, num_rounds: int) -> None:
        """Move on."""
        if self._progress is not None:
            self._progress.advance(self._task, num_rounds)

    def cell(self, name: str, why: str) -> None:
        """Count a run that is over."""
        self._done, self._failed = self._done + 1, self._failed + bool(why)
        if self._progress is not None:
            self._progress.update(self._task, description=self._text())
        elif self._shown:
            print(f"{self._text()}  {name}{f': {why}' if why else ''}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()

    def _text(self) -> str:
        bad = f", {self._failed} without result" if self._failed else ""
        return f"cell {self._done}/{self._num_cells}{bad}"
