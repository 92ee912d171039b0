"""The runs of a server: those that wait for clients, and those whose plan is built. Shapes: D parameters.

The driver decides when a waiting run is built, when clients are asked and when a version is committed.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atoll.commit.finish import Outcome, RoundWork, commit_round, measured_again
from atoll.commit.parts import open_ledger
from atoll.commit.run_state import RunState, first_state
from atoll.commit.secure_sum import Added
from atoll.commit.versions import valid_of
from atoll.core.aggregator import rows_of
from atoll.core.coordinator import CoordinatorState, Phase, Reason
from atoll.core.downlink import DecodedBroadcast
from atoll.core.events import Event
from atoll.core.messages import Payload, State, Task
from atoll.core.plan import Plan
from atoll.core.wire import packed_size, pieces
from atoll.ledger.signing import plan_hash
from atoll.network.protocol.agreement import plan_for_clients
from atoll.network.protocol.blobs import MakeBlobs
from atoll.network.protocol.messages import News, Ref, RunInfo
from atoll.network.protocol.objects import Manifest, Objects
from atoll.network.server.held import HeldRound
from atoll.network.server.parts import DeliveredUpdate, ServerParts, build_server_parts, given_params
from atoll.network.server.refusals import RefusalState, refusal_states
from atoll.network.server.run_files import RunFiles
from atoll.network.server.secure_session import Mailbox, SecureContext, sum_with_clients
from atoll.network.server.sent import FinalModel, Model, final_model_of, for_clients, parts_hold_columns
from atoll.network.server.sites import Sites, layout_of_sums
from atoll.network.server.streams import Stream, Streams
from atoll.network.server.tables import NOBODY, RefusalRow, TaskRow
from atoll.network.server.uploads import Uploads, position_of
from atoll.privacy.ledger import NAME as PRIVACY_LEDGER
from atoll.train.exchange import Told, Work, in_a_sum

FIRST = CoordinatorState()
RUNNING = "running"
"""The status of a run that is not over."""
NEVER = -1
"""The number of no version."""
NEWS = 20
"""Number of differences that are kept for clients that missed some."""

PREVIEW_SAMPLES = 1000
"""Samples of each client of a run that is described before it begins."""


class CommitResult(NamedTuple):
    """The result of a commit, before it is recorded."""

    outcome: Outcome
    state_file: str
    measured: tuple[Event, ...] = ()
    """Events of measuring the version before, if that is the last and was not measured yet."""


class WaitingRun:
    """A run whose clients gather: nothing of its plan is built, and no client was asked."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        home: Path,
        make_blobs: MakeBlobs,
        wake: Callable[[set[int]], None],
        status: str = RUNNING,
    ) -> None:
        self.name, self.plan, self.wake, self.status = name, plan, wake, status
        self.files = RunFiles(home / "runs" / name, plan)
        objects, uploads = make_blobs(name, "objects"), make_blobs(name, "uploads")
        objects.sweep()
        uploads.sweep()
        self.objects, self.uploads = Objects(objects), Uploads(uploads)
        parties = () if plan.split is None else plan.split.parties or ()
        self._has_parties = bool(parties)
        self.min_clients: int = max(plan.policy.build("rounds").min_clients, len(parties))
        self._building, self._previews = threading.Lock(), dict[int, RunInfo]()
        self._built: Run | None = None
        self.not_before = 0.0
        """When building may be tried again, after an error that may pass."""
        self.busy = False
        """Whether it is being built."""
        self.waits_for = ""
        """Why it waits for clients, as the log has said it."""

    def build(self, sizes: Sequence[int], machine: CoordinatorState = FIRST, seq: int = 0, state_file: str = "") -> Run:
        """Build the plan for clients of these sizes; begin with the first state, unless one was saved."""
        ledger = open_ledger(self.plan, self.files.directory / PRIVACY_LEDGER, begun=bool(state_file))
        if ledger is not None:
            ledger.check(machine.attempt if machine.phase is Phase.READY else 0)
        with self._building:  # models of two builds at once would be twice in memory
            parts, first_M = build_server_parts(self.plan, sizes, ledger)
            if not state_file and self.files.given_model.exists():
                first_M = given_params(self.files.given_model, parts.job)
            state = self.files.read_state(state_file) if state_file else first_state(parts.job, parts.guard, first_M)
            self._built = Run(self, parts, tuple(sizes), state, machine, seq)
        return self._built

    def preview(self, keys: Mapping[int, bytes]) -> RunInfo:
        """Describe the run as if these clients had samples alike, for clients that try it before it begins."""
        with self._building:
            if self._built is not None:
                return self._built.info(keys, NOBODY)
            num = self.min_clients if self._has_parties else max(self.min_clients, len(keys), 1)
            if num not in self._previews:
                parts, first_M = build_server_parts(self.plan, [PREVIEW_SAMPLES] * num, None)
                state = first_state(parts.job, parts.guard, first_M)
                self._previews = {num: Run(self, parts, (PREVIEW_SAMPLES,) * num, state, FIRST, 0).info(keys, NOBODY)}
                del parts, first_M, state
                gc.collect()  # parts refer to each other: the model would be there twice when the run is built
            return self._previews[num]


class Run:
    """A run whose plan is built; `machine` and `seq` are changed by transactions only."""

    def __init__(
        self,
        waiting: WaitingRun,
        parts: ServerParts,
        sizes: tuple[int, ...],
        state: RunState,
        machine: CoordinatorState,
        seq: int,
    ) -> None:
        self.name, self.plan, self.status = waiting.name, waiting.plan, waiting.status
        self.files, self.objects, self.uploads = waiting.files, waiting.objects, waiting.uploads
        self.parts, self.sizes, self.state, self.machine, self.seq = parts, sizes, state, machine, seq
        self.client_plan = plan_for_clients(self.plan, parts.job.problem.kind)
        self.plan_hash = plan_hash(self.client_plan)
        self.models: dict[int, Model] = {}
        self.news: tuple[News, ...] = ()
        self.announced = NEVER
        """The newest version of which the ledger says what was sent."""
        self.final: FinalModel | None = None
        """What clients take home of the model that it ended with, once one has asked for it."""
        self._lock = threading.Lock()
        self.counted: dict[int, int] = {}
        """The last attempt in which each client's update counted."""
        self.began = 0.0
        """The monotonic time at which the attempt began."""
        self.not_before = 0.0
        """When the next attempt may begin, after one that was abandoned."""
        self.busy = False
        """Whether a worker is preparing or committing a version."""
        self.mailbox = Mailbox(self.objects, waiting.wake)
        """Messages of secure aggregation."""
        self.streams = None if parts.parties is None else Streams(self.files.directory, waiting.wake)
        """Sessions of split learning; None where the plan has no cut."""
        self.lost_sum = False
        """Whether the updates to be committed were being added in secret by a process that is gone."""
        self.refusals: dict[int, RefusalState] = {}
        """Clients that have refused work for it."""
        self.sites = Sites(waiting.plan.evaluation, Mailbox(self.objects, waiting.wake), waiting.files.sites())
        """What clients measure of versions on their own samples."""
        self.halting: Reason | None = None
        """Why the run ends once its last version is measured by the clients, where it ends before its last round."""
        self.waits_for = ""
        """Why it waits for clients, as the log has said it."""

    def mail(self, client: int) -> Ref | None:
        """Return the message of secure aggregation that waits for a client's answer."""
        return None if self.parts.job.secure is None else self.mailbox.waiting(client)

    def stream(self, client: int) -> Stream | None:
        """Return the open session of a client."""
        return None if self.streams is None else self.streams.of(client)

    @property
    def holds_sessions(self) -> bool:
        """Return whether clients say that they are ready, and exchange messages once enough are."""
        return self.parts.job.secure is not None or self.parts.parties is not None

    @property
    def max_upload(self) -> int:
        """Return the maximum bytes of an update, or of an answer in a secret sum."""
        return max(self.parts.max_bytes, 0 if self.sites.adding is None else self.sites.adding[1])

    def may_ask(self, client: int) -> bool:
        """Return whether a client may be asked, with regard to its refusals."""
        known = self.refusals.get(client)
        return known is None or (not known.whole_run and time.monotonic() >= known.until)

    def clear_refusals(self, clients: Iterable[int]) -> None:
        """Forget the refusals of clients."""
        for client in clients:
            self.refusals.pop(client, None)

    def set_refusals(self, rows: Iterable[RefusalRow]) -> None:
        """Set refusals: each one of a client doubles the time for which it is not asked."""
        self.refusals.update(refusal_states(rows))

    def rebuild(self, sizes: Sequence[int]) -> None:
        """Build the plan again, for clients that have joined since; not for a private plan, whose clients are fixed."""
        self.parts, _ = build_server_parts(self.plan, sizes, None)
        self.sizes = tuple(sizes)

    def info(self, keys: Mapping[int, bytes], client: int) -> RunInfo:
        """Return what a client must know to agree, and at the end to take its model home."""
        job, guard, coordinator = self.parts.job, self.parts.guard, self.parts.coordinator
        in_secret = job.secure is not None or self.plan.evaluation.clients_every > 0  # clients may add in secret
        epsilon, final = None, None if client == NOBODY else self._last_model()
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
            peers={str(number): key for number, key in keys.items()} if in_secret else {},
            input_shape=job.federation.dataset.input_shape,
            num_outputs=job.federation.dataset.num_outputs,
            problem=job.federation.dataset.problem,
            features=job.federation.dataset.feature_names if parts_hold_columns(self.parts) else (),
            model=None if final is None else final.of(client),
            layers=None if final is None else final.layers,
        )

    def _last_model(self) -> FinalModel | None:
        """Return what clients take home of a run that has ended; earlier objects are deleted."""
        if self.status == RUNNING or self.machine.phase is not Phase.FINISHED:
            return None
        with self._lock:
            if self.final is None:
                self.final = final_model_of(self.parts, self.state.params_D, self._store)
                self.models, self.news = {}, ()
                self.objects.keep_only(self.final.names())
        return self.final

    def prepare_broadcast(self, machine: CoordinatorState) -> str:
        """Prepare the newest version for sending; return the file of the state, if that must be kept before."""
        state, models = self.state._replace(coordinator=machine), dict(self.models)  # others read them meanwhile
        known = {task.version for task in (*machine.in_flight.values(), *machine.arrived, *machine.committing)}
        known |= self.sites.answers.keys()
        changed = ""
        for number in sorted(known & state.sent.keys()):
            if number not in models:
                models[number] = Model(self._store(for_clients(self.parts, state.sent[number])))
        if machine.version not in models:
            if machine.version in state.sent:
                models[machine.version] = Model(self._store(for_clients(self.parts, state.sent[machine.version])))
            else:
                self.state, heard = self.parts.versions.broadcast(state)
                models[machine.version] = self._store_broadcast(machine.version, heard)
                if self.parts.job.downlink.chain.transforms:  # what it remembers must not be made twice
                    changed = self.files.save_state(self.state)
        self.models = {number: models[number] for number in models if number in known | {machine.version}}
        self.objects.keep_only(
            {*(name for model in self.models.values() for name in model.names()), *(n.object.name for n in self.news)}
        )
        return changed

    def prepare_sites(self) -> None:
        """Find out which sums are due of clients that evaluate: those of the plan's metrics on any samples."""
        self.sites.layout = layout_of_sums(self.parts, self.state.params_D)

    def count_down(self, tasks: Iterable[Task]) -> None:
        """Count what clients are sent for these tasks of the newest version; sessions count for themselves."""
        if self.parts.parties is None:
            self.state, _ = self.parts.versions.count_down(self.state, [task.client for task in tasks])

    def _store_broadcast(self, number: int, heard: DecodedBroadcast) -> Model:
        """Store a broadcast whole, and as it is encoded; or the difference, for those who know the version before."""
        whole = self._store(for_clients(self.parts, heard.broadcast))
        if heard.payload is None:
            return Model(whole)
        encoded = self._store(heard.payload, compress=True)
        if not self.parts.job.downlink.by_difference:
            return Model(whole, encoded)
        self.news = (*self.news, News(version=number, object=encoded))[-NEWS:]
        return Model(whole)

    def _store(self, payload: Payload, *, compress: bool = False) -> Ref:
        parts = pieces(payload, compress=compress)
        return Ref(name=self.objects.put(*parts), num_bytes=sum(map(len, parts)))

    def commit(
        self,
        machine: CoordinatorState,
        rows: Mapping[Task, TaskRow],
        now: float,
        secret: SecureContext | None,
        held: HeldRound | None = None,
    ) -> CommitResult:
        """Commit the next version from delivered updates, or from what sessions came to."""
        parts, state = self.parts, self.state._replace(coordinator=machine)
        took = max(0.0, now - self.began)
        if self.lost_sum:
            self.lost_sum = False
            did = RoundWork((), None)
        else:
            did = self._round_work(parts, state, rows, secret, held)
            if held is not None:
                state = state._replace(bytes_down=state.bytes_down + held.traffic.bytes_down)
        outcome = commit_round(parts, state, did, lambda: took)
        measured = () if outcome.committed is not None else self.measure_last()
        return CommitResult(outcome, self.files.save_state(outcome.state), measured)

    def measure_last(self) -> tuple[Event, ...]:
        """Measure the last round that counts if it has not been; return the events."""
        return measured_again(self.parts, self.state, self.files.last_row)

    def _round_work(
        self,
        parts: ServerParts,
        state: RunState,
        rows: Mapping[Task, TaskRow],
        secret: SecureContext | None,
        held: HeldRound | None,
    ) -> RoundWork:
        """Return the work of clients for the round that is committed."""
        tasks, policy = state.coordinator.committing, parts.coordinator.policy
        own = parts.versions.own_update(state)
        by_client = {task.client: task for task in tasks}
        if held is None:
            parts.engine.read = lambda task: self._delivered(parts, rows[by_client[task.client]])
        else:
            parts.engine.read = lambda task: held.work_of(by_client[task.client], parts.engine.trainer.fold)
        done = list(tasks) if parts.guard is None else parts.guard.orders(list(tasks), state.rule)
        added: Added | None = None
        if secret is not None:
            heard_D = state.sent[state.coordinator.version].params_D
            added = sum_with_clients(parts.job, self.name, heard_D, tasks, parts.layout, secret)
            work = Work(added.folded or {}, [in_a_sum(client) for client in sorted(added.clients)], {})
        else:
            work = parts.engine.train(done, state.sent, {})
        if policy.overlaps_rounds:
            late = enumerate(by_client[report.client] for report in valid_of(work))
            each = rows_of(work.folded)
            work = work._replace(folded=parts.versions.late_rows(state, [(task, each.rows(i)) for i, task in late]))

        def fold(clients: Collection[int]) -> State:
            return parts.engine.train([task for task in done if task.client in clients], state.sent, {}).folded

        counts = {} if held is None else held.traffic.counts
        extras = {name: (self.files.last_row or {}).get(name, 0) + num for name, num in counts.items()}
        return RoundWork(tasks=tasks, work=work, own=own, added=added, fold=fold, extras=extras)

    def _delivered(self, parts: ServerParts, row: TaskRow) -> DeliveredUpdate:
        manifest = msgspec.msgpack.decode(bytes.fromhex(row.report["manifest"]), type=Manifest)
        loss = math.nan if row.report["loss"] is None else row.report["loss"]
        chunks = self.uploads.read(row.task, manifest, position_of(row))
        update, bytes_up = parts.decode_update(chunks, manifest.num_bytes, row.report["counts"])
        return DeliveredUpdate(update, Told(row.report["samples"], loss, bytes_up))

    def drop_tasks(self, tasks: tuple[Task, ...], state_file: str) -> None:
        """Delete the updates of these tasks, and other files that are not needed any more."""
        self.uploads.drop_tasks(tasks)
        self.remove_stale_files(state_file)

    def remove_stale_files(self, state_file: str) -> None:
        """Delete uploads of attempts that have ended, and all states but one."""
        self.files.remove_other_states(state_file)
        now = self.machine
        self.uploads.drop_other_attempts(
            {task.attempt for task in (*now.in_flight.values(), *now.arrived, *now.committing)}
        )

    def rewrite_files(self, rows: list[dict[str, Any]], lines: list[str]) -> None:
        """Write the files for people as the store has them."""
        self.files.rewrite(rows, lines, self.parts, self.state, self.machine.version)

    def append_files(self, events: Iterable[Event], line: str = "") -> None:
        """Append events and a ledger line to the files for people."""
        self.files.update(lambda: self.files.append(events, line))

    def describe(self) -> None:
        """Write what is known before the first round."""
        self.files.update(lambda: self.files.describe(self.parts, self.machine.version))

    def write_sites(self, result: Mapping[str, Any], row: Mapping[str, Any] | None) -> None:
        """Write what clients measured of a version, and its metrics row with it."""
        self.files.update(lambda: self.files.write_sites(result, row))

    def write_result(self, reason: str) -> None:
        """Write how the run ended."""
        self.files.update(lambda: self.files.finish(reason, self.parts, self.state))


def built_runs(runs: Mapping[str, WaitingRun | Run]) -> list[Run]:
    """Return the runs whose plan is built: only they may have asked clients."""
    return [run for run in list(runs.values()) if isinstance(run, Run)]
