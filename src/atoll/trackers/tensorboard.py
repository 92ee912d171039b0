"""Tracking by TensorBoard: event files that `tensorboard --logdir` shows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from atoll.core.plan import Plan
from atoll.trackers.tracked import NOTHING, Figures, Note, Tracker, missing


def tensorboard(directory: str | Path, *, log_dir: str | Path | None = None) -> Tracker:
    """Write figures to TensorBoard files in `log_dir`, by default the folder tensorboard of the run's directory.

    `directory` is that of the run, as `out` of `atoll.run`. A resumed run replaces its files by one with all rounds.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("TensorBoard", "tensorboard", error) from error
    directory = Path(directory)
    files = _TensorBoard(SummaryWriter, Path(log_dir or directory / "tensorboard"), Note(directory, "tensorboard.json"))
    return Tracker(files, directory)


@final
class _TensorBoard:
    """Event files in one folder."""

    def __init__(self, writer_type: Any, log_dir: Path, note: Note) -> None:
        self._writer_type, self._log_dir, self._note = writer_type, log_dir, note
        self._writer: Any = None

    def start(self, title: str, plan: Plan | None, version: int) -> int:
        """Begin a file in place of those that this run has written before; their names end with an id of the run.

        Readers order files by the second of their names, so that going on in another file could mix up rounds.
        """
        own = str(self._note.read().get("id") or secrets.token_hex(4))
        self._note.write({"id": own})
        for old in self._log_dir.glob(f"events.out.tfevents.*.{own}"):
            old.unlink(missing_ok=True)
        self._writer = self._writer_type(str(self._log_dir), filename_suffix=f".{own}")
        if plan is not None:
            text = plan.to_toml().replace("\n", "\n    ")
            self._writer.add_text("plan", f"{title}\n\n    {text}", 0)
        return NOTHING

    def log(self, rows: Sequence[Figures]) -> None:
        """Add scalars with the round as step."""
        for number, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def end(self, reason: str) -> None:
        """Close the file."""
        self._writer.add_text("end", reason, 0)
        self._writer.close()
