"""The hub: what clients and the operator ask of a server."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from atoll.core.coordinator import Command, Finish, Halt, Phase, Reason
from atoll.core.errors import RunError
from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.network.clerk import RETRY, Draft
from atoll.network.conductor import ONLINE_SECONDS, RUNNING, Conductor, Presence
from atoll.network.gate import Gate, Refused, token_hash
from atoll.network.identity import holds, load_key, make_key, public_bytes
from atoll.network.logs import log
from atoll.network.metrics import Metrics
from atoll.network.objects import Manifest, ObjectError, Objects, read_manifest
from atoll.network.protocol import Delivered, Delivery, Missing, Order, Orders, Poll, RunInfo, is_run_name, update_text
from atoll.network.remote import BadUpdate, build_parts
from atoll.network.runs import Run
from atoll.network.store import Store
from atoll.network.tables import ClientRow, Stage, Status

MAX_OFFENCES = 3
"""After so many bad updates a client is shut out until the operator approves it again."""

LARGE = 64 << 20
"""Updates of more bytes than this are looked at one after another, so that memory does not grow with their number."""


class Hub:
    """Serves clients and the operator; may be called from any thread."""

    def __init__(
        self,
        home: Path,
        store: Store,
        *,
        num_clients: int = 1,
        max_samples: int = 10_000_000,
        now: Callable[[], float] = time.time,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.now = now
        path = home / "ledger.key"  # not to be mistaken for the key of a certificate
        self.key = load_key(path) if path.exists() else make_key(path)
        self.server_key = public_bytes(self.key)
        self.gate, self.metrics = Gate(store, now), Metrics()
        self.on_shut_down: Callable[[], None] = lambda: None
        self._wanted, self._max_samples = num_clients, max_samples
        self._started = now()
        self._told_end: set[int] = set()
        self._counting, self._one_large = threading.Lock(), threading.Lock()
        self.conductor = Conductor(home, store, self.key, self.metrics, num_clients, now)
        self._clerk, self._runs, self._store = self.conductor.clerk, self.conductor.runs, store

    def start(self) -> None:
        """Begin to write down and to make."""
        self._clerk.start()
        log("started", runs=len(self._runs), clients=len(self.conductor.clients))

    def close(self) -> None:
        """End politely."""
        self.conductor.close()

    def shut_down(self) -> None:
        """Ask the process to end politely."""
        log("stopping")
        self.on_shut_down()

    def orders(self, client: ClientRow, poll: Poll) -> Orders:
        """What a client has to do now."""
        number = client.number
        assert number is not None
        self._hear(client, number, poll)
        with self._clerk.lock:
            orders = [
                order
                for run in self._runs.values()
                if (order := self._order(run, number)) is not None and (run.name, order.attempt) not in poll.busy
            ]
            ended = tuple(run.name for run in self._runs.values() if run.status != RUNNING)
            if len(ended) == len(self._runs):
                self._told_end.add(number)
            return Orders(tuple(orders), ended, len(self._runs) - len(ended))

    def info(self, run: str) -> RunInfo:
        """What a run is."""
        found = self._run(run)
        if found.parts is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the run has not begun yet", RETRY)
        return found.info({number: client.key for number, client in self.conductor.clients.items()})

    def lines(self, run: str, start: int = 0, most: int | None = None) -> list[str]:
        """Lines of a run's ledger, from one on, and at most so many."""
        self._run(run)
        with self._store.look() as book:
            return book.lines(run, start, most)

    def readable(self, client: ClientRow, run: str, name: str) -> tuple[Run, Objects]:
        """Where an object is that a client may have: versions are for all, its post is its own."""
        found = self._run(run)
        mine = found.post.waiting(client.number) if client.number is not None else None
        with self._clerk.lock:
            known = {model.ref.name for model in found.models.values()} | {news.object.name for news in found.news}
        known |= set() if mine is None else {mine.name}
        if name not in known:
            raise Refused(HTTPStatus.GONE, "there is no such object any more: poll again")
        return found, found.objects

    def sent(self, run: Run, num_bytes: int) -> None:
        """Count what was sent to a client."""
        with self._counting:
            run.bytes_down += num_bytes

    def missing(self, client: ClientRow, run: str, attempt: int, manifest: bytes) -> Missing:
        """Which chunks of an update are not here."""
        found, task = self._waited_for(client, run, attempt)
        announced = self._manifest(found, manifest)
        return Missing(tuple(digest.hex() for digest in found.uploads.missing(task, announced)))

    def put_chunk(self, client: ClientRow, run: str, attempt: int, digest: str, data: bytes, hashed: str) -> None:
        """Keep a chunk of an update, whose hash is known; nobody may send more than an update can be long."""
        found, task = self._waited_for(client, run, attempt)
        assert found.parts is not None
        if digest != hashed:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "a chunk is named by its SHA-256, and this one is not")
        if found.uploads.num_bytes(task) + len(data) > 2 * found.parts.max_bytes:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "more was sent for this task than an update can be")
        found.uploads.put(task, bytes.fromhex(digest), data)

    def deliver(self, client: ClientRow, run: str, attempt: int, told: Delivery) -> Delivered:
        """Take an update that is here in chunks; once this returns it is safe."""
        found = self._run(run)
        number = client.number
        assert number is not None
        manifest = self._manifest(found, told.manifest)
        if found.parts is None or found.parts.job.secure is not None:
            raise Refused(HTTPStatus.CONFLICT, "updates of this run are added in secret: do not send one", RETRY)
        name = manifest.name()
        with self._store.look() as book:
            row = book.task(run, attempt, number)
        if row is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this client was not asked that: poll for work")
        if row.stage in (Stage.ARRIVED, Stage.COUNTED) and row.update == name:
            return Delivered(name)  # the answer was lost
        if row.stage is not Stage.ASKED:
            raise Refused(HTTPStatus.GONE, "nobody waits for this update any more: poll for work")
        text = update_text(run, attempt, row.task.version, name, told)
        if not holds(client.key, text, told.signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the update is not signed with this client's key")
        try:
            report = self._checked(found, row.task, manifest, told)
        except (BadUpdate, ObjectError) as error:
            self._reject(client, found, row.task, str(error))
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        late = self._clerk.make(
            lambda draft: self.conductor.arrived(draft, found, row.task, name, report, told.signature)
        )
        if late:
            self.metrics.late()
            raise Refused(HTTPStatus.GONE, late)
        self.metrics.arrived()
        return Delivered(name)

    def ready(self, client: ClientRow, run: str, attempt: int) -> None:
        """A client has trained, and waits for the others to add in secret."""
        found = self._run(run)
        if found.parts is None or found.parts.job.secure is None:
            raise Refused(HTTPStatus.CONFLICT, "nothing is added in secret in this run: deliver the update")
        number = client.number
        assert number is not None
        with self._store.look() as book:
            row = book.task(run, attempt, number)
        if row is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this client was not asked that: poll for work")
        late = self._clerk.make(lambda draft: self.conductor.arrived(draft, found, row.task, "", {}, b""))
        if late:
            raise Refused(HTTPStatus.GONE, late)

    def answer(self, client: ClientRow, run: str, attempt: int, manifest: bytes) -> None:
        """A client answers a message of secure aggregation."""
        found, task = self._waited_for(client, run, attempt)
        data = b"".join(found.uploads.settle(task, self._manifest(found, manifest)))
        if not found.post.answer(task.client, data):
            raise Refused(HTTPStatus.GONE, "nobody waits for this answer any more: poll for work")

    def refuse(self, client: ClientRow, run: str, attempt: int, reason: str) -> None:
        """A client will not do a task."""
        found, task = self._waited_for(client, run, attempt)
        log("rejected", run=run, client=client.name, why=f"refused: {reason}")
        if found.post.answer(task.client, b""):  # it leaves a sum that goes on without it
            return
        self._clerk.make(lambda draft: self.conductor.fail(draft, found, [task], f"refused: {reason}"))

    def status(self) -> dict[str, Any]:
        """Where everything stands."""
        with self._clerk.lock:
            runs = [self._status_of(run) for run in self._runs.values()]
        counts = dict.fromkeys((status.value for status in Status), 0)
        for client in self.clients():
            counts[client["status"]] += 1
        server = {
            "seconds_up": round(self.now() - self._started, 1),
            "read_only": bool(self.conductor.why),
            "why": self.conductor.why,
            "key": self.server_key.hex(),
        }
        return {"server": server, "runs": runs, "clients": {**counts, "online": self.conductor.num_online()}}

    def clients(self) -> list[dict[str, Any]]:
        """Everybody who is known."""
        with self._store.look() as book:
            known = book.clients()
        found = []
        for client in known:
            present = self.conductor.present.get(client.number) if client.number is not None else None
            since = None if present is None else round(self.now() - present.heard, 1)
            found.append(
                {
                    "id": client.id,
                    "name": client.name,
                    "number": client.number,
                    "status": client.status.value,
                    "offences": client.offences,
                    "online": since is not None and since < ONLINE_SECONDS,
                    "seconds_since": since,
                }
            )
        return found

    def approve(self, names: list[str]) -> list[int]:
        """Let clients in, by name or id, in this order; their numbers."""

        def change(draft: Draft) -> list[int]:
            known = draft.book.clients()
            numbers = [draft.book.approve(_called(known, name).id) for name in names]
            self._know_clients(draft)
            return numbers

        numbers: list[int] = self._clerk.make(change)
        return numbers

    def revoke(self, name: str, status: Status = Status.REVOKED) -> None:
        """Shut a client out; what it was asked is not waited for."""

        def change(draft: Draft) -> None:
            client = _called(draft.book.clients(), name)
            draft.book.revoke(client.id, status)
            for run in self._runs.values():
                task = draft.machine(run)[0].in_flight.get(client.number) if client.number is not None else None
                if task is not None:
                    self.conductor.fail(draft, run, [task], f"client {status}")
            draft.then(lambda: self.gate.end(client.id))
            self._know_clients(draft)

        self._clerk.make(change)

    def token(self, seconds: float) -> str:
        """A token with which one client can enrol."""
        token = secrets.token_urlsafe(24)
        self._clerk.make(lambda draft: draft.book.add_token(token_hash(token), self.now() + seconds))
        return token

    def begin_with(self, run: str, plan: Plan) -> None:
        """Begin a run before the server starts, unless it has begun already."""
        known = self._runs.get(run)
        if known is not None and known.plan != plan:
            raise RunError(f"there is a run {run} with another plan: choose another --name, or serve without a plan")
        if known is None:
            made = self._new_run(run, plan)
            with self._store.change() as book:
                book.add_run(run, plan.to_toml(), json.dumps(made.machine.to_plain()))
            self._runs[run] = made

    def add_run(self, run: str, plan: Plan) -> None:
        """Begin another run as soon as there are enough clients."""
        taken = f"there is a run {run} already: choose another name"
        if run in self._runs:
            raise RunError(taken)
        made = self._new_run(run, plan)

        def change(draft: Draft) -> None:
            if run in self._runs:  # somebody was faster
                raise RunError(taken)
            draft.book.add_run(run, plan.to_toml(), json.dumps(made.machine.to_plain()))
            draft.then(lambda: self._runs.update({run: made}))

        self._clerk.make(change)

    def _new_run(self, run: str, plan: Plan) -> Run:
        if not is_run_name(run):
            raise RunError(f"a run is called by small letters, digits and hyphens, at most 64 of them: got {run!r}")
        build_parts(
            plan, [1000] * max(self._wanted, len(self.conductor.clients), 1), None
        )  # refuse early what is wrong
        return Run(run, plan, self.conductor.home, self.conductor.ring)

    def stop_run(self, run: str) -> None:
        """End a run with the last version that was made."""
        found = self._run(run)

        def change(draft: Draft) -> None:
            machine, seq = draft.machine(found)
            if found.status != RUNNING:
                return
            commands: list[Command] = [Finish(Reason.INTERRUPTED)]
            machine = machine._replace(phase=Phase.FINISHED)
            if found.parts is not None:
                machine, commands = found.parts.coordinator.step(draft.machine(found)[0], Halt(Reason.INTERRUPTED))
            draft.move(found, machine, seq)
            self.conductor.follow(draft, found, commands)

        self._clerk.make(change)

    @property
    def is_over(self) -> bool:
        """Whether all runs are over, and everybody who is there has heard of it."""
        with self._clerk.lock:
            over = bool(self._runs) and all(run.status != RUNNING for run in self._runs.values())
            there = {
                number for number, seen in self.conductor.present.items() if self.now() - seen.heard < ONLINE_SECONDS
            }
            return over and there <= self._told_end

    def _know_clients(self, draft: Draft) -> None:
        """Somebody was let in or shut out."""
        known = draft.book.clients()
        draft.then(lambda: self.conductor.know_clients(known))
        draft.then(self.gate.forget)

    def _hear(self, client: ClientRow, number: int, poll: Poll) -> None:
        """Note that a client is there, and how much it has."""
        conductor = self.conductor
        conductor.present[number] = Presence(self.now(), poll.attributes)
        known, num_samples = conductor.clients.get(number), min(poll.num_samples, self._max_samples)
        if known is None or known.num_samples == num_samples:
            return
        changed = known._replace(num_samples=num_samples)

        def change(draft: Draft) -> None:
            draft.book.set_samples(client.id, num_samples)
            draft.then(lambda: conductor.clients.update({number: changed}))

        self._clerk.make(change)

    def _order(self, run: Run, number: int) -> Order | None:
        task, mail = run.machine.in_flight.get(number), run.post.waiting(number)
        if mail is not None:
            task = next((each for each in run.machine.committing if each.client == number), None)
        if run.status != RUNNING or task is None or run.parts is None or run.state is None:
            return None
        model = run.models.get(task.version)
        if model is None:
            return None
        deadline, guard = run.parts.coordinator.policy.deadline, run.parts.guard
        return Order(
            run=run.name,
            attempt=task.attempt,
            version=task.version,
            share=task.share,
            work=task.work,
            clip=guard.orders([task], run.state.rule)[0].clip if guard is not None else None,
            model=model.ref,
            whole=model.whole,
            news=tuple(news for news in run.news if news.version <= task.version),
            counted=run.counted.get(number),
            seconds=None if deadline is None else max(0.0, run.began + deadline - self.now()),
            secure=mail,
        )

    def _run(self, name: str) -> Run:
        found = self._runs.get(name)
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such run here: poll for work")
        return found

    def _waited_for(self, client: ClientRow, run: str, attempt: int) -> tuple[Run, Task]:
        """The task of a client that is still waited for."""
        found = self._run(run)
        number = -1 if client.number is None else client.number
        with self._clerk.lock:
            task = found.machine.in_flight.get(number)
            if task is None and found.post.waiting(number) is not None:
                task = next((each for each in found.machine.committing if each.client == number), None)
        if task is None or task.attempt != attempt or found.parts is None:
            raise Refused(HTTPStatus.GONE, "nobody waits for this any more: poll for work")
        return found, task

    def _manifest(self, run: Run, data: bytes) -> Manifest:
        if run.parts is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the run is being taken up", RETRY)
        try:
            return read_manifest(data, run.parts.max_bytes)
        except ObjectError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

    def _checked(self, run: Run, task: Task, manifest: Manifest, told: Delivery) -> dict[str, Any]:
        """Look at an update before it counts; what is written down of it."""
        assert run.parts is not None
        if told.loss is None or not math.isfinite(told.loss):
            raise BadUpdate("the training loss is not a number: check the client's data and learning rate")
        if not (math.isfinite(told.weight) and told.weight >= 0):
            raise BadUpdate(f"a weight of {told.weight} makes no sense: it must be finite, and 0 or more")
        weight = min(told.weight, float(self._max_samples))
        chunks, large = run.uploads.settle(task, manifest), manifest.num_bytes > LARGE
        with self._one_large if large else contextlib.nullcontext():
            run.parts.opened(chunks, manifest.num_bytes, weight)
        # the client signed what it told; what counts is cut to what one client may weigh
        signed = {"num_samples": told.num_samples, "loss": told.loss, "weight": told.weight}
        counts = {"counts": weight, "samples": min(told.num_samples, self._max_samples)}
        return {**signed, **counts, "manifest": told.manifest.hex()}

    def _reject(self, client: ClientRow, run: Run, task: Task, why: str) -> None:
        """Leave a client's update out, and blame the client; who does it again and again is shut out."""
        self.metrics.rejected("bad update")
        log("rejected", run=run.name, client=client.name, why=why)

        def change(draft: Draft) -> int:
            self.conductor.fail(draft, run, [task], why)
            return draft.book.blame(client.id)

        if self._clerk.make(change) >= MAX_OFFENCES:
            log("rejected", client=client.name, why="quarantined after repeated offences")
            self.revoke(client.id, Status.QUARANTINED)

    def _status_of(self, run: Run) -> dict[str, Any]:
        machine, row = run.machine, run.last_row or {}
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
            "epsilon": row.get("privacy", {}).get("epsilon"),
            "seconds_waiting": round(self.now() - run.began, 1) if run.began and run.status == RUNNING else 0.0,
        }


def _called(clients: list[ClientRow], name: str) -> ClientRow:
    """The client of this name or id."""
    found = next((client for client in clients if name in (client.name, client.id)), None)
    if found is None:
        raise RunError(f"there is no client {name}: see atoll clients list")
    return found
