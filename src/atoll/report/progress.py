"""What a person sees while a run goes on."""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

from atoll.core.events import ClientReported, Event, RoundCommitted, RunEnded, RunStarted, SetupStep
from atoll.report.main_figure import main_of, shown
from atoll.report.reading import human_bytes, human_seconds, privacy_text


class Bar:
    """A reader of events: a progress bar on a terminal or in a notebook, or a line now and then on a pipe."""

    LINES = 10
    """So many lines a whole run prints to a pipe, if its rounds are short."""
    SECONDS = 10.0
    """After so many seconds a pipe gets a line with the next client or round that is done."""

    def __init__(self) -> None:
        self._screen, self._console = screen()
        self._progress: Any = None
        self._cell: Any = None
        if self._screen == "notebook":
            from atoll.report.notebook import CellOutput

            self._cell = CellOutput()
        self._said_at = time.monotonic()
        self._row: dict[str, Any] = {"round": 0}
        self._rounds, self._text = 0, ""
        if self._screen != "pipe":
            self._prepare("setting up")

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case SetupStep():
                self._prepare(event.text)
            case RunStarted():
                self._begin(event.title, event.version, event.rounds)
            case ClientReported():
                self._clients(event.num_done, event.num_expected)
            case RoundCommitted():
                self._round(event.row)
            case RunEnded():
                self.end()
            case _:
                pass

    def _prepare(self, what: str) -> None:
        """Say what is done before the first round: a bar would stand still."""
        if self._cell is not None:
            self._cell.show(0.0, what, now=True)
        elif self._screen == "terminal":
            self._console.print(what, end="\r", markup=False, highlight=False)
        else:
            self._say(what)

    def _begin(self, title: str, done: int, rounds: int) -> None:
        """Show an empty bar."""
        self._rounds, self._row, self._text = rounds, {"round": done}, title
        if self._screen == "pipe":
            self._say(f"{title}: {rounds - done} rounds")
            return
        if self._cell is not None:
            self._show(done, now=True)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console.print(" " * (self._console.width - 1), end="\r")
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

    def _clients(self, done: int, total: int) -> None:
        """Move within the round."""
        within = self._row["round"] + done / max(total, 1) * 0.99
        if self._progress is not None:
            self._progress.update(self._task, completed=within)
        elif self._cell is not None:
            self._show(within)
        elif self._is_late():
            self._say(f"round {self._row['round'] + 1}/{self._rounds}  {done} of {total} clients")

    def _round(self, row: dict[str, Any]) -> None:
        """Show the numbers of a round."""
        self._row, self._text = row, summary(row)
        number, last = row["round"], row["round"] == self._rounds
        if self._progress is not None:
            self._progress.update(self._task, completed=number, numbers=self._text)
        elif self._cell is not None:
            self._show(number, now=last)
        elif last or number % max(1, self._rounds // self.LINES) == 0 or self._is_late():
            self._say(f"round {number}/{self._rounds}  {self._text}")

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
        elif self._cell is not None:
            self._show(self._row["round"], now=True)

    def _show(self, done: float, *, now: bool = False) -> None:
        text = f"round {self._row['round']}/{self._rounds}  {self._text}"
        self._cell.show(done / max(self._rounds, 1), text, now=now)

    def _is_late(self) -> bool:
        return time.monotonic() - self._said_at >= self.SECONDS

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._said_at = time.monotonic()


class Steps:
    """Progress of work that has a few named steps: bars on a terminal, a line a step and now and then on a pipe."""

    SECONDS = 10.0

    def __init__(self) -> None:
        from rich.progress import Progress

        self._screen, console = screen()
        self._bars: Any = Progress(transient=True, console=console) if self._screen == "terminal" else None
        self._tasks: dict[str, Any] = {}
        self._said_at = 0.0

    def __enter__(self) -> Steps:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say that so much of a step is done."""
        begins = what not in self._tasks
        if self._bars is not None:
            if begins:
                self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(self._tasks[what], completed=done, total=total)
            return
        self._tasks[what] = None
        if begins or time.monotonic() - self._said_at >= self.SECONDS:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            self._said_at = time.monotonic()


def screen() -> tuple[Literal["terminal", "notebook", "pipe"], Any]:
    """Return what standard error is, and a console that writes to it."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return "notebook", console
    return ("terminal" if console.is_terminal else "pipe"), console


def summary(row: dict[str, Any]) -> str:
    """A round in one line, each number with its unit."""
    test = row.get("test", {})
    main = main_of(test)
    pieces = [f"{main.replace('_', ' ')} {shown(main, test[main])}"] if main and test[main] is not None else []
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
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        kind, console = screen()
        if kind != "terminal":
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
