"""What the page shows on one machine: a directory of runs, or a simulation beside the others of its directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from atoll.core.errors import RunError
from atoll.network.server.access import Access, AccessToken, Role
from atoll.ui.app import Action, Named
from atoll.ui.run_files import Json
from atoll.ui.runs import Status


class LocalRuns:
    """A directory of runs of other processes: to look at."""

    kind = "runs"
    actions: Mapping[str, Action] = {}

    def __init__(self, access: Access) -> None:
        self._access = access

    def clients(self) -> list[Json] | None:
        """Return that there is no federation."""
        return None

    def operator_ledger(self) -> list[str] | None:
        """Return that there is no ledger of actions."""
        return None

    def give_access(self, name: str, role: Role, hours: float, by: str) -> tuple[str, AccessToken]:
        """Make a link to the page."""
        return self._access.add(name, role, hours * 3600)

    def revoke_access(self, token_id: str, by: str) -> None:
        """Revoke a link to the page."""
        self._access.revoke(token_id)


class WatchedSimulation(LocalRuns):
    """A simulation that tells what happens in its present round, and can be stopped."""

    kind = "simulation"

    def __init__(self, access: Access, run: str, stop: Callable[[], None]) -> None:
        super().__init__(access)
        self._run, self._stop = run, stop
        self._status, self._lock = Status("running", {"phase": "setting up"}), threading.Lock()
        self.actions = {"stop_run": Action(Named, self._stopped)}

    def update(self, status: Status) -> None:
        """Take note of the newest state."""
        with self._lock:
            self._status = status

    def states(self) -> Mapping[str, Status]:
        """Return the state of the run."""
        with self._lock:
            return {self._run: self._status}

    def _stopped(self, body: Named, by: str) -> Json:
        if body.id != self._run:
            raise RunError(f"{body.id!r:.80} is a run of another process: stop it there")
        self._stop()
        return {}
