"""All parts of a server, and the actions of its operator."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from atoll.core.coordinator import Phase, Policy
from atoll.core.errors import PlanError, RunError
from atoll.core.plan import Plan
from atoll.ledger import chain
from atoll.network.protocol.bases import MODEL, with_base_hash
from atoll.network.protocol.blobs import blobs_at, write_file
from atoll.network.protocol.identity import load_key, make_key, public_bytes, token_hash
from atoll.network.protocol.messages import is_run_name
from atoll.network.protocol.operator_endpoints import ClientStatus, Overview, RunStatus, ServerStatus
from atoll.network.server.access import Access, AccessToken, Role
from atoll.network.server.action_ledger import About, ActionLedger
from atoll.network.server.auth import SYSTEM, Authenticator, Clock
from atoll.network.server.driver import RunDriver
from atoll.network.server.handler import RequestHandler
from atoll.network.server.monitoring import Metrics, log
from atoll.network.server.parts import dry_run_for
from atoll.network.server.presence import ONLINE_SECONDS
from atoll.network.server.runs import FIRST, RUNNING, Run, WaitingRun
from atoll.network.server.store import Store
from atoll.network.server.tables import ClientRow, Status
from atoll.network.server.writer import Transaction

OPERATOR = "operator"
"""Who acts with the operator's token."""


class Operations:
    """Actions of the operator; clients are served by its `handler`. May be called from any thread."""

    def __init__(
        self,
        home: Path,
        store: Store,
        *,
        objects: str | None = None,
        num_clients: int | None = None,
        max_samples: int = 10_000_000,
        clock: Clock = SYSTEM,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        store.claim()
        self._clock, self._now = clock, clock.monotonic
        path = home / "ledger.key"  # not the key of a certificate
        self.key = load_key(path) if path.exists() else make_key(path)
        self.server_key = public_bytes(self.key)
        self._ledger, self.access = ActionLedger(self.key, clock), Access(home, clock.wall)
        self.authenticator, self.metrics = Authenticator(store, clock), Metrics()
        self.on_shut_down: Callable[[], None] = lambda: None
        self._wanted, self._started = num_clients, self._now()
        make_blobs = blobs_at(home, objects)
        self.driver = RunDriver(
            home, make_blobs, store, self.key, self.metrics, num_clients or 1, clock, self.authenticator
        )
        self._writer, self._runs, self._store = self.driver.writer, self.driver.runs, store
        self.failure = ""
        """Why the process must end; "" if it need not."""
        self._writer.on_store_taken = self._store_taken
        self.handler = RequestHandler(self.driver, self.metrics, max_samples)

    def start(self) -> None:
        """Start the writer, which drives the runs."""
        self._writer.start()
        log("started", runs=len(self._runs), clients=len(self.driver.presence.clients))

    def close(self) -> None:
        """Finish work in progress, and close the store."""
        self.driver.close()

    def shut_down(self) -> None:
        """Ask the process to end."""
        log("stopping")
        self.on_shut_down()

    def _store_taken(self, why: str) -> None:
        """Ask the process to end, since another server has the store."""
        if not self.failure:
            self.failure = why
            self.shut_down()

    def status(self) -> Overview:
        """Return the state of the server, its runs and its clients."""
        counts = dict.fromkeys((status.value for status in Status), 0)
        for client in self.clients():
            counts[client["status"]] += 1
        server: ServerStatus = {
            "seconds_up": round(self._now() - self._started, 1),
            "read_only": bool(self.driver.read_only_reason),
            "why": self.driver.read_only_reason,
            "key": self.server_key.hex(),
        }
        return {
            "server": server,
            "runs": self.run_states(),
            "clients": {**counts, "online": len(self.driver.presence.online())},
        }

    def run_states(self) -> list[RunStatus]:
        """Return the state of every run."""
        with self._writer.lock:
            return [self._status_of(run) for run in self._runs.values()]

    def clients(self) -> list[ClientStatus]:
        """Return the state of every enrolled client."""
        with self._store.read() as tables:
            known, agreed = tables.clients(), tables.agreed_samples()
            refused = {row.client for run in self._runs for row in tables.refusals(run)}
            checked = tables.readiness()
        rows: list[ClientStatus] = []
        for client in known:
            since = self.driver.presence.seconds_since(client.number)
            rows.append(
                {
                    "id": client.id,
                    "name": client.name,
                    "number": client.number,
                    "status": client.status.value,
                    "samples": client.num_samples or None,
                    "agreed": agreed.get(client.id),
                    "offences": client.offences,
                    "refused": client.number in refused,
                    "ready": {run: json.loads(text) for run, text in checked.get(client.id, {}).items()},
                    "online": since is not None and since < ONLINE_SECONDS,
                    "seconds_since": None if since is None else round(since, 1),
                }
            )
        return rows

    def approve(self, names: list[str], samples: int | None = None, *, by: str = OPERATOR) -> list[int]:
        """Approve clients by name or id; return their numbers, in this order.

        `samples` is how many samples each of them has, as the operator knows: none is ever credited with more.
        """

        def change(transaction: Transaction) -> list[int]:
            known = transaction.tables.clients()
            clients = [_called(known, name) for name in names]
            about: dict[str, About] = {} if samples is None else {"samples": samples}
            self._ledger.add(transaction.tables, "approve", by, clients=[each.id for each in clients], **about)
            return self.driver.journal.offences.approve(transaction, clients, samples)

        numbers: list[int] = self._writer.write(change)
        return numbers

    def revoke(self, name: str, *, by: str = OPERATOR) -> None:
        """Revoke a client; its tasks are not waited for."""

        def change(transaction: Transaction) -> None:
            client = _called(transaction.tables.clients(), name)
            self._ledger.add(transaction.tables, "revoke", by, clients=[client.id])
            self.driver.journal.offences.exclude(transaction, client, Status.REVOKED)

        self._writer.write(change)

    def token(self, seconds: float, *, by: str = OPERATOR) -> str:
        """Make a token with which one client can enrol."""
        token = secrets.token_urlsafe(24)

        def change(transaction: Transaction) -> None:
            transaction.tables.add_token(token_hash(token), self._clock.wall() + seconds)
            self._ledger.add(transaction.tables, "make an enrolment token", by, hours=round(seconds / 3600, 3))

        self._writer.write(change)
        return token

    def give_access(self, name: str, role: Role, hours: float, *, by: str = OPERATOR) -> tuple[str, AccessToken]:
        """Make a link to the live page; return its token, which is kept nowhere, and what is kept of it."""
        text, token = self.access.add(name, role, hours * 3600)
        self._record("give access", by, id=token.id, name=name, role=role.value, hours=hours)
        return text, token

    def revoke_access(self, token_id: str, *, by: str = OPERATOR) -> None:
        """Revoke a link to the live page, which ends its sessions."""
        token = self.access.revoke(token_id)
        self._record("revoke access", by, id=token.id, name=token.name)

    def _record(self, do: str, by: str, **about: About) -> None:
        self._writer.write(lambda transaction: self._ledger.add(transaction.tables, do, by, **about))

    def ensure_run(self, run: str, plan: Plan, model: Path | None = None) -> None:
        """Add a run before the server starts, unless it exists; it starts from `model`, or else from the plan's."""
        known, plan = self._runs.get(run), with_base_hash(plan)
        if known is not None and known.plan != plan:
            what = "another plan, or other weights in its model.path" if plan.model.name == MODEL else "another plan"
            raise RunError(f"there is a run {run} with {what}: choose another --name, or serve without a plan")
        if known is None:
            new = self._new_run(run, plan, model)
            with self._store.write() as tables:
                tables.add_run(run, plan.to_toml(), json.dumps(FIRST.to_plain()))
            self._runs[run] = new

    def add_run(self, run: str, plan: Plan, *, by: str = OPERATOR) -> None:
        """Add a run, which begins as soon as there are enough clients."""
        taken = f"there is a run {run} already: choose another name"
        if run in self._runs:
            raise RunError(taken)
        plan = with_base_hash(plan)
        new = self._new_run(run, plan)

        def change(transaction: Transaction) -> None:
            if run in self._runs:  # another request was faster
                raise RunError(taken)
            transaction.tables.add_run(run, plan.to_toml(), json.dumps(FIRST.to_plain()))
            self._ledger.add(transaction.tables, "add a run", by, run=run, plan_hash=plan.identity())
            transaction.after_commit(lambda: self._runs.update({run: new}))

        self._writer.write(change)

    def _new_run(self, run: str, plan: Plan, model: Path | None = None) -> WaitingRun:
        if not is_run_name(run):
            raise RunError(f"a run is called by small letters, digits and hyphens, at most 64 of them: got {run!r}")
        self.check_plan(plan, model)
        new = WaitingRun(run, plan, self.driver.home, self.driver.make_blobs, self.driver.notify)
        if model is not None:
            kept = new.files.given_model
            write_file(kept, kept.with_name(f".{kept.name}.new"), model.read_bytes())
        return new

    def check_plan(self, plan: Plan, model: Path | None = None) -> None:
        """Build a plan for as many clients as a run of it would begin with, without training; refuse what is wrong."""
        policy: Policy = plan.policy.build("rounds")
        num = max(self._wanted or policy.min_clients, len(self.driver.presence.clients))
        if policy.min_clients > num:
            raise PlanError(
                f"the plan's policy asks for {policy.min_clients} clients, but the server is to begin with {num}: "
                f"start it with --clients {policy.min_clients} or without --clients, or change the plan, e.g. by "
                f"--set policy.{'concurrency' if policy.overlaps_rounds else 'size'}={num}"
            )
        dry_run_for(plan, num, model)

    def ledger_lines(self, run: str) -> list[str]:
        """Return the ledger of a run, or that of the operator's actions by `chain.OPERATOR`."""
        if run != chain.OPERATOR:
            return self.handler.ledger_lines(run)
        with self._store.read() as tables:
            return tables.ledger_lines(run)

    def plan_text(self, run: str) -> str:
        """Return the plan of a run, as TOML."""
        return self.handler.run(run).plan.to_toml()

    def stop_run(self, run: str, *, by: str = OPERATOR) -> None:
        """End a run with its newest version."""
        self.handler.run(run)

        def change(transaction: Transaction) -> None:
            known = self.handler.run(run)  # a waiting run may have been built since
            if known.status == RUNNING:
                self._ledger.add(transaction.tables, "stop a run", by, run=run)
                self.driver.journal.stop(transaction, known)

        self._writer.write(change)

    @property
    def all_runs_over(self) -> bool:
        """Return whether all runs have ended, and all clients that are online know it."""
        with self._writer.lock:
            over = bool(self._runs) and all(run.status != RUNNING for run in self._runs.values())
            presence = self.driver.presence
            there = presence.online()
            if (
                self._now() - self._started < ONLINE_SECONDS
            ):  # who worked for the server before this one may be on the way back
                worked = {number for run in self.driver.built_runs() for number in run.counted}
                there |= worked & presence.clients.keys()
            return over and there <= self.handler.informed_of_end

    @staticmethod
    def _working(run: WaitingRun | Run) -> list[int] | None:
        """Return the clients that are asked and have not answered; None where privacy hides who is asked."""
        if not isinstance(run, Run):
            return []
        guard = run.parts.guard
        return None if guard is not None and guard.mechanism.hides_cohort else sorted(run.machine.in_flight)

    def _status_of(self, run: WaitingRun | Run) -> RunStatus:
        if isinstance(run, Run):
            machine, row, began = run.machine, run.files.last_row or {}, run.began
        else:
            machine, row, began = (
                FIRST._replace(phase=Phase.READY if run.status == RUNNING else Phase.FINISHED),
                {},
                0.0,
            )
        arrived = len(machine.arrived) + len(machine.committing)
        return {
            "run": run.name,
            "status": run.status,
            "round": machine.version,
            "rounds": run.plan.rounds,
            "attempt": machine.attempt,
            "phase": str(machine.phase),
            "asked": len(machine.in_flight) + arrived,
            "arrived": arrived,
            "accuracy": row.get("test", {}).get("accuracy"),
            "test": row.get("test", {}),
            "epsilon": row.get("privacy", {}).get("epsilon"),
            "working": self._working(run),
            "sites": run.sites.result if isinstance(run, Run) else None,
            "seconds_waiting": round(self._now() - began, 1) if began and run.status == RUNNING else 0.0,
        }


def _called(clients: list[ClientRow], name: str) -> ClientRow:
    """Return the client of this id, or else of this name, which its owner chose and could be another's id."""
    named = {client.name: client for client in clients} | {client.id: client for client in clients}
    client = named.get(name)
    if client is None:
        raise RunError(f"there is no client {name}: see atoll clients list")
    return client
