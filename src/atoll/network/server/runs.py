"""One run on the server: what is made in it, and kept in its directory. Shapes: D parameters.

The directory holds plan.toml, metrics.jsonl, ledger.jsonl and the report's files as any run does; what counts is in the
store, from which they are written again after a kill. Only the hub decides when something is made.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from atoll.commit.finish import Outcome, RoundWork, commit_round, measured_again
from atoll.commit.parts import open_ledger
from atoll.commit.run_state import RunState, first_state
from atoll.commit.secure_sum import Added
from atoll.commit.state_file import encode_state, read_state
from atoll.commit.versions import valid_of
from atoll.core.aggregator import rows_of
from atoll.core.coordinator import Arrived, CoordinatorState, Failed, Phase
from atoll.core.downlink import DecodedBroadcast
from atoll.core.events import Evaluated, Event, RunEnded, RunStarted
from atoll.core.messages import Payload, State, Task
from atoll.core.params import load, params_hash
from atoll.core.plan import Plan
from atoll.core.wire import packed_size, pieces
from atoll.ledger import chain
from atoll.ledger.signing import plan_hash
from atoll.network.protocol.agreement import plan_for_clients
from atoll.network.protocol.blobs import MakeBlobs, write_file
from atoll.network.protocol.messages import News, Ref, RunInfo
from atoll.network.protocol.objects import Manifest, Objects
from atoll.network.server.parts import DeliveredUpdate, ServerParts, build_server_parts
from atoll.network.server.queries import Tables
from atoll.network.server.secure_session import Mailbox, SecureContext, sum_with_clients
from atoll.network.server.tables import RefusalRow, RunRow, Stage, TaskRow
from atoll.network.server.uploads import PackPosition, Uploads
from atoll.privacy.ledger import NAME as PRIVACY_LEDGER
from atoll.report.record import RunDirectory
from atoll.report.writer import RunWriter, run_info
from atoll.train.build import final_model
from atoll.train.exchange import Report, Told, Work
from atoll.train.works.sgd import shared_tensors

FIRST = CoordinatorState()
RUNNING = "running"
"""The status of a run that is not over."""
NEVER = -1
"""Stands for a version that there never was."""
NEWS = 20
"""So many differences are kept for clients that missed some."""


FIRST_REFUSAL, LONGEST_REFUSAL = 10.0, 3600.0
"""Seconds for which a client is not asked after its first refusal; each one doubles them, up to an hour."""


class RefusalState(NamedTuple):
    """What came of a client's refusals."""

    whole_run: bool
    """Whether it takes no part in the run at all."""
    until: float
    """The monotonic time until which it is not asked."""


class Model(NamedTuple):
    """A version as clients can have it."""

    ref: Ref
    """The broadcast itself, which the ledger names."""
    encoded: Ref | None = None
    """The same through the downlink's chain, where that does not send differences."""

    def names(self) -> set[str]:
        """Return the names of its objects."""
        return {self.ref.name} if self.encoded is None else {self.ref.name, self.encoded.name}


class CommitResult(NamedTuple):
    """What came of a commit, before anybody is told."""

    outcome: Outcome
    state_file: str
    measured: tuple[Event, ...] = ()
    """What was measured of the version before, if that is the last and was not measured yet."""


class Run:
    """What a run is made of; `machine` and `seq` are the hub's to change."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        home: Path,
        make_blobs: MakeBlobs,
        wake: Callable[[set[int]], None],
        machine: CoordinatorState = FIRST,
        seq: int = 0,
    ) -> None:
        self.name, self.plan, self.machine, self.seq = name, plan, machine, seq
        self.directory = home / "runs" / name
        begun = (self.directory / "plan.toml").exists()
        self.files = RunDirectory.reopen(self.directory) if begun else RunDirectory.create(self.directory, plan)
        objects, uploads = make_blobs(name, "objects"), make_blobs(name, "uploads")
        objects.sweep()
        uploads.sweep()
        self.objects, self.uploads = Objects(objects), Uploads(uploads)
        self.client_plan = plan_for_clients(plan)
        self.min_clients: int = plan.policy.build("rounds").min_clients
        self.plan_hash, self._identity = plan_hash(self.client_plan), plan.identity()
        self.status = RUNNING
        self.parts: ServerParts | None = None
        self.sizes: tuple[int, ...] = ()
        self.state: RunState | None = None
        self.models: dict[int, Model] = {}
        self.news: tuple[News, ...] = ()
        self.announced = NEVER
        """The newest version of which the ledger says what was sent."""
        self.final_model: Ref | None = None
        """The parameters that it ended with, once somebody has asked for them."""
        self._lock = threading.Lock()
        self.counted: dict[int, int] = {}
        self.began = 0.0
        self.not_before = 0.0
        """When the next attempt may begin, after one that came to nothing."""
        self.busy = False
        """Whether something is being made."""
        self.file_writer = RunWriter(self.files, [])
        self.files_stale = False
        """Whether the files for people are not as the store has them."""
        self.mailbox = Mailbox(self.objects, wake)
        """Messages of secure aggregation."""
        self.lost_sum = False
        """Whether what is to be committed was being added in secret by a process that is gone."""
        self.refusals: dict[int, RefusalState] = {}
        """Clients that have refused work for it."""
        self.missing: set[int] = set()
        """Clients without which it cannot go on, as far as the log has said so."""

    def may_ask(self, client: int) -> bool:
        """Whether a client that has refused work may be asked again."""
        known = self.refusals.get(client)
        return known is None or (not known.whole_run and time.monotonic() >= known.until)

    def clear_refusals(self, clients: Iterable[int]) -> None:
        """Ask clients again, whatever they refused."""
        for client in clients:
            self.refusals.pop(client, None)

    def set_refusals(self, rows: Iterable[RefusalRow]) -> None:
        """Leave clients out that have refused, from now on, and the longer the more often they did."""
        for row in rows:
            pause = min(LONGEST_REFUSAL, FIRST_REFUSAL * 2.0 ** min(row.times - 1, 30))
            self.refusals[row.client] = RefusalState(row.whole_run, time.monotonic() + pause)

    def build(self, sizes: Sequence[int], state_file: str) -> None:
        """Build the plan for clients of these sizes, and take up the state in a file, or begin."""
        ledger = open_ledger(self.plan, self.directory / PRIVACY_LEDGER, begun=bool(state_file))
        if ledger is not None:
            ledger.check(self.machine.attempt if self.machine.phase is Phase.READY else 0)
        parts, first_M = build_server_parts(self.plan, sizes, ledger)
        if state_file:
            state = read_state(self.directory / state_file, self._identity)
        elif self.state is not None:  # others have joined since
            state = self.state
        else:
            state = first_state(parts.job, parts.guard, first_M)
        self.parts, self.sizes, self.state = parts, tuple(sizes), state

    def info(self, keys: Mapping[int, bytes]) -> RunInfo:
        """What a client must know to agree."""
        assert self.parts is not None
        job, guard, coordinator = self.parts.job, self.parts.guard, self.parts.coordinator
        epsilon = None
        if guard is not None:
            whole = guard.spent(self.plan.rounds).epsilon
            epsilon = whole if guard.mechanism.epsilon is None else min(whole, guard.mechanism.epsilon)
        return RunInfo(
            run=self.name,
            plan=self.client_plan,
            plan_hash=self.plan_hash,
            num_clients=coordinator.num_clients,
            cohort=max(coordinator.policy.min_reports, 1),
            num_bytes=packed_size(Payload(job.first_D)),
            epsilon=epsilon,
            max_samples=1 if job.secure is None else job.federation.max_samples,  # nobody else needs to know
            peers={str(number): key for number, key in keys.items()} if job.secure is not None else {},
            model=self._last_model(),
        )

    def _last_model(self) -> Ref | None:
        """The parameters of a run that is over, for all who took part; what it sent before is not needed any more."""
        if self.status == RUNNING or self.machine.phase is not Phase.FINISHED:
            return None
        assert self.state is not None
        with self._lock:
            if self.final_model is None:
                self.final_model = self._store(Payload(self.state.params_D))
                self.models, self.news = {}, ()
                self.objects.keep_only({self.final_model.name})
        return self.final_model

    def prepare_broadcast(self, machine: CoordinatorState) -> str:
        """Make the newest version ready to be sent; the file of the state, if that must be kept before it is."""
        assert self.parts is not None and self.state is not None
        state, models = self.state._replace(coordinator=machine), dict(self.models)  # others read them meanwhile
        known = {task.version for task in (*machine.in_flight.values(), *machine.arrived, *machine.committing)}
        changed = ""
        for number in sorted(known & state.sent.keys()):
            if number not in models:
                models[number] = Model(self._store(state.sent[number].plain()))
        if machine.version not in models:
            if machine.version in state.sent:
                models[machine.version] = Model(self._store(state.sent[machine.version].plain()))
            else:
                self.state, heard = self.parts.versions.broadcast(state)
                models[machine.version] = self._store_broadcast(machine.version, heard)
                if self.parts.job.downlink.chain.transforms:  # what it remembers must not be made twice
                    changed = self.save_state(self.state)
        self.models = {number: models[number] for number in models if number in known | {machine.version}}
        self.objects.keep_only(
            {*(name for model in self.models.values() for name in model.names()), *(n.object.name for n in self.news)}
        )
        return changed

    def count_down(self, tasks: Iterable[Task]) -> None:
        """Count what clients are sent for these tasks of the newest version."""
        assert self.parts is not None and self.state is not None
        self.state, _ = self.parts.versions.count_down(self.state, [task.client for task in tasks])

    def _store_broadcast(self, number: int, heard: DecodedBroadcast) -> Model:
        """Store a broadcast whole, and as it is encoded; or the difference, for those who know the version before."""
        whole = self._store(heard.broadcast.plain())
        if heard.payload is None:
            return Model(whole)
        encoded = self._store(heard.payload, compress=True)
        if not self.parts or not self.parts.job.downlink.by_difference:
            return Model(whole, encoded)
        self.news = (*self.news, News(version=number, object=encoded))[-NEWS:]
        return Model(whole)

    def _store(self, payload: Payload, *, compress: bool = False) -> Ref:
        parts = pieces(payload, compress=compress)
        return Ref(name=self.objects.put(*parts), num_bytes=sum(map(len, parts)))

    @property
    def last_row(self) -> dict[str, Any] | None:
        """The metrics row of the last round, if there was one."""
        history = self.file_writer.history
        return history[-1] if history else None

    def commit(
        self, machine: CoordinatorState, rows: Mapping[Task, TaskRow], now: float, secret: SecureContext | None
    ) -> CommitResult:
        """Make the next version of what was delivered."""
        parts = self.parts
        assert parts is not None and self.state is not None
        state = self.state._replace(coordinator=machine)
        took = max(0.0, now - self.began)
        if self.lost_sum:
            self.lost_sum = False
            did = RoundWork((), None)
        else:
            did = self._round_work(parts, state, rows, secret)
        outcome = commit_round(parts, state, did, lambda: took)
        measured = () if outcome.committed is not None else self.measure_last()
        return CommitResult(outcome, self.save_state(outcome.state), measured)

    def measure_last(self) -> tuple[Event, ...]:
        """Measure the last round that counts if it has not been; what was found."""
        assert self.parts is not None and self.state is not None
        return measured_again(self.parts, self.state, self.last_row)

    def _round_work(
        self, parts: ServerParts, state: RunState, rows: Mapping[Task, TaskRow], secret: SecureContext | None
    ) -> RoundWork:
        """Return what clients did for the round that is committed."""
        tasks, policy = state.coordinator.committing, parts.coordinator.policy
        own = parts.versions.own_update(state)
        by_client = {task.client: task for task in tasks}
        parts.engine.read = lambda task: self._delivered(parts, rows[by_client[task.client]])
        done = list(tasks) if parts.guard is None else parts.guard.orders(list(tasks), state.rule)
        added: Added | None = None
        if secret is not None:
            heard_D = state.sent[state.coordinator.version].params_D
            added = sum_with_clients(parts.job, self.name, heard_D, tasks, parts.layout, secret)
            work = Work(added.folded or {}, [without_numbers(client) for client in sorted(added.clients)], {})
        else:
            work = parts.engine.train(done, state.sent, {})
        if policy.overlaps_rounds:
            late = enumerate(by_client[report.client] for report in valid_of(work))
            each = rows_of(work.folded)
            work = work._replace(folded=parts.versions.late_rows(state, [(task, each.rows(i)) for i, task in late]))

        def fold(clients: Collection[int]) -> State:
            return parts.engine.train([task for task in done if task.client in clients], state.sent, {}).folded

        return RoundWork(tasks=tasks, work=work, own=own, added=added, fold=fold)

    def _delivered(self, parts: ServerParts, row: TaskRow) -> DeliveredUpdate:
        manifest = msgspec.msgpack.decode(bytes.fromhex(row.report["manifest"]), type=Manifest)
        loss = math.nan if row.report["loss"] is None else row.report["loss"]
        chunks = self.uploads.read(row.task, manifest, _position(row))
        update, bytes_up = parts.decode_update(chunks, manifest.num_bytes, row.report["counts"])
        return DeliveredUpdate(update, Told(row.report["samples"], loss, bytes_up))

    def save_state(self, state: RunState) -> str:
        """Write the state to a file of its own; nothing refers to it until the store does."""
        parts, digest = list(encode_state(state, self._identity)), hashlib.sha256()
        for part in parts:
            digest.update(part)
        name = f"state-{state.coordinator.attempt}-{digest.hexdigest()[:16]}.safetensors"
        write_file(self.directory / name, self.directory / f".{name}.new", *parts)
        return name

    def drop_tasks(self, tasks: tuple[Task, ...], state_file: str) -> None:
        """Remove what nobody needs any more: updates of these tasks and what else there is."""
        self.uploads.drop_tasks(tasks)
        self.remove_stale_files(state_file)

    def remove_stale_files(self, state_file: str) -> None:
        """Remove what was sent for attempts that nobody waits for any more, and all states but one."""
        self.remove_other_states(state_file)
        now = self.machine
        self.uploads.drop_other_attempts(
            {task.attempt for task in (*now.in_flight.values(), *now.arrived, *now.committing)}
        )

    def remove_other_states(self, state_file: str) -> None:
        """Remove all states but the one that the store refers to."""
        for path in (*self.directory.glob(".state-*.new"), *self.directory.glob("state-*.safetensors")):
            if path.name != state_file:
                path.unlink(missing_ok=True)

    def rewrite_files(self, rows: list[dict[str, Any]], lines: list[str]) -> None:
        """Write the files for people as the store has them, whatever a kill or a full disk has kept from being."""
        self.files_stale = True
        self.files.write_rows(rows)
        self.file_writer.history[:] = rows
        self.files.write_text("ledger.jsonl", "".join(f"{line}\n" for line in lines))
        if lines and not (self.directory / "run.json").exists():
            self.write_info()
        if lines and not (self.directory / "result.json").exists():
            last, _ = chain.read(lines[-1])
            if last.kind == chain.END:
                self.write_result(last.body["reason"])
        self.files_stale = False

    def write_files(self, work: Callable[[], None]) -> None:
        """Write to the files for people, unless they are behind; if that fails they are, until `write_down`."""
        if not self.files_stale:
            self.files_stale = True
            work()
            self.files_stale = False

    def write_info(self) -> None:
        """Write what is known before the first round."""
        if self.parts is not None:
            info = run_info(self.parts, name=self.plan.name or self.name, setup_seconds=0.0, num_train=sum(self.sizes))
            self.file_writer.describe(info)
            title = f"{info['model']['name']} on the samples of {info['num_clients']} clients"
            self.file_writer(RunStarted(title=title, version=self.machine.version, rounds=self.plan.rounds))

    def append_files(self, events: Iterable[Event], line: str = "") -> None:
        """Add what happened and a line of the ledger to the files; a kill in between is made good at the next start."""
        for event in events:
            self.file_writer(event)
        if line:
            self.files.append("ledger.jsonl", line)

    def write_result(self, reason: str) -> None:
        """Write the model, the confusion matrix and the result."""
        if self.parts is None or self.state is None:
            return
        job, version = self.parts.job, self.state.coordinator.version
        model = load(final_model(self.plan, job), job.spec, self.state.params_D)
        if self.last_row is not None and not self.file_writer.has_confusion:  # the process is gone that measured it
            for event in measured_again(self.parts, self.state, {"round": version}):
                if isinstance(event, Evaluated):
                    self.file_writer(event)
        self.file_writer.finish(reason, self.state, shared_tensors(job, model))
        self.file_writer(RunEnded(reason=reason, version=version))


def without_numbers(client: int) -> Report:
    """Return the report of a client of which only the sum of several is known."""
    return Report(client=client, num_samples=0, num_steps=0, loss=0.0, norm=0.0, bytes_up=0, valid=True)


def restore_run(
    tables: Tables, row: RunRow, home: Path, make_blobs: MakeBlobs, wake: Callable[[set[int]], None]
) -> Run:
    """A run as it was when the process before this one ended, however it did."""
    machine = CoordinatorState.from_plain(json.loads(row.machine))
    run = Run(row.id, Plan.from_toml(row.plan), home, make_blobs, wake, machine, row.seq)
    run.status, run.counted = row.status, tables.last_counted(row.id)
    lines = tables.ledger_lines(row.id)
    run.announced = _announced(lines)
    run.set_refusals(tables.refusals(row.id))
    if row.sizes:
        run.build(row.sizes, row.state)
        assert run.parts is not None
        for event in tables.task_events(row.id, row.seq):
            kind = Arrived if event.stage in (Stage.ARRIVED, Stage.COUNTED) else Failed
            run.machine, _ = run.parts.coordinator.step(run.machine, kind((event.task,)))
            run.seq = event.seq
        needed = {*run.machine.arrived, *run.machine.committing}
        for attempt in {task.attempt for task in needed}:
            for each in tables.tasks(row.id, attempt):
                position = _position(each)
                if each.task in needed and position is not None:
                    run.uploads.restore(each.task, position)
        if run.status == RUNNING and run.machine.phase is not Phase.FINISHED:
            run.prepare_broadcast(run.machine)
            assert run.state is not None
            for attempt in range(run.state.coordinator.attempt, run.machine.attempt + 1):  # since it was saved
                run.count_down(each.task for each in tables.tasks(row.id, attempt))
            run.lost_sum = run.parts.job.secure is not None and run.machine.phase is Phase.COMMITTING
    run.rewrite_files(tables.metrics_rows(row.id), lines)
    run.remove_stale_files(row.state)
    return run


def _announced(lines: Sequence[str]) -> int:
    """Return the newest version of which a ledger says what was sent."""
    for line in reversed(lines):
        record, _ = chain.read(line)
        if record.kind == chain.BROADCAST:
            return int(record.body["version"])
    return NEVER


def _position(row: TaskRow) -> PackPosition | None:
    return PackPosition(*row.report["spot"]) if "spot" in row.report else None


def hash_of(params_D: Tensor) -> str:
    """The name of a model in the ledger: SHA-256 of its parameters as they lie in memory."""
    return params_hash(params_D).hex()
