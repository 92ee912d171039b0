"""A page beside a simulation: a process that is told what happens, and may ask for the run to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.coordinator import Reason
from atoll.core.errors import RunError
from atoll.core.events import (
    AttemptAbandoned,
    ClientReported,
    Event,
    RoundCommitted,
    RunEnded,
    RunStarted,
    SetupStep,
    TasksSent,
)

INTERVAL = 0.1
"""Seconds between two states that are told, at least."""
MAX_NAMED = 300
"""Clients of a cohort that the page names."""


class PageBeside:
    """A reader of events that keeps a page's process informed; `link` opens the page."""

    def __init__(self, directory: Path, run: str, port: int = 0, stop: Callable[[], None] | None = None) -> None:
        self._stop = stop or (lambda: os.kill(os.getpid(), signal.SIGINT))
        self._live: dict[str, Any] = {"phase": "setting up", "text": None, "attempt": 0, "clients": None}
        self._told = 0.0
        command = [sys.executable, "-m", "atoll.ui.serving", str(directory), run, str(port)]
        directory.mkdir(parents=True, exist_ok=True)
        # Ctrl-C is for the run: the page stays to show how it ended.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        first = self._process.stdout.readline()
        if not first:
            raise RunError("the page's process ended at once: see what it wrote above, and run without --ui")
        self.link: str = json.loads(first)["link"]
        """The address of the page, with a token for this machine."""
        threading.Thread(target=self._listen, daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Tell the page about an event."""
        match event:
            case SetupStep():
                self._live |= {"phase": "setting up", "text": event.text}
            case RunStarted():
                self._live |= {"phase": "training", "text": None}
            case TasksSent():
                hidden = not event.clients
                clients = None if hidden else list(event.clients[:MAX_NAMED])
                asked = None if hidden else len(event.clients)
                self._live |= {"attempt": event.attempt, "clients": clients, "asked": asked}
                self._live |= {"arrived": None if hidden else 0, "phase": "training", "text": None}
            case ClientReported():
                if self._live["clients"] is not None:
                    self._live |= {"asked": event.num_expected, "arrived": event.num_done}
            case AttemptAbandoned():
                self._live["text"] = f"attempt {event.attempt} was abandoned: {event.reason}"
            case RoundCommitted():
                pass
            case RunEnded():
                self._tell("stopped" if event.reason == Reason.INTERRUPTED else "ended", None)
                return
            case _:
                return
        if time.monotonic() - self._told >= INTERVAL:
            self._tell("running", self._live)

    def wait(self) -> None:
        """Keep the page until Ctrl-C."""
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """End the page's process."""
        self._process.terminate()
        self._process.wait()

    def _tell(self, status: str, live: dict[str, Any] | None) -> None:
        """Write a line of less than PIPE_BUF bytes, whole or not at all: a page that hangs does not stop the run."""
        self._told = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe, json.dumps({"status": status, "live": live}).encode() + b"\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if json.loads(line).get("do") == "stop":
                self._stop()
