"""The client's loop: poll for work, check it, train, deliver, and verify the server's ledger."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch

from atoll.core.errors import AtollError, DiskFull, RunError
from atoll.core.messages import Broadcast, State
from atoll.core.params import params_hash
from atoll.ledger import chain
from atoll.network.client.agreeing import agree
from atoll.network.client.app import ClientApp
from atoll.network.client.connection import Connection, Declined
from atoll.network.client.consent import Consent, asked_for
from atoll.network.client.evaluation import tell
from atoll.network.client.final_model import save_final_model
from atoll.network.client.home import Home, PendingUpdate, RunHome
from atoll.network.client.record import Record
from atoll.network.client.secret_evaluation import EvaluationAddend, KeptEvaluations
from atoll.network.client.secure_session import Addend, SecureSession, SilentSessions, UpdateAddend, end_silent_sessions
from atoll.network.client.split_session import hold_session
from atoll.network.client.task import AgreedRun, Fetch, WorkRefused, signed_delivery, why_not_trained
from atoll.network.client.witness import DISTRUST, LedgerReader
from atoll.network.protocol import endpoints
from atoll.network.protocol.agreement import IN_SECRET, NOISED, OPEN, Floors, is_working_hour
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import (
    MAX_WAIT,
    Answer,
    EvaluationOrder,
    Order,
    Poll,
    Ref,
    Refusal,
    RunInfo,
    SiteEvaluation,
    is_run_name,
)
from atoll.network.protocol.objects import manifest_of
from atoll.report.reading import human_bytes, human_seconds

SHORT_REST = 60.0
"""Seconds until a full disk, or the working hours, are checked again."""


class OwnerOutput(NamedTuple):
    """Where a client reports progress and problems to its owner."""

    info: Callable[[str], None]
    warn: Callable[[str], None]


class Client:
    """Works for one server until it is stopped; may be killed at any moment, as its state is in its home."""

    def __init__(
        self,
        app: ClientApp,
        home: Home,
        connection: Connection,
        output: OwnerOutput,
        floors: Floors | None = None,
        peers: Mapping[int, bytes] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        consent: Consent | None = None,
        now: Callable[[], float] = time.monotonic,
        record: Record | None = None,
    ) -> None:
        self._app, self._home, self._connection, self._output, self._sleep = app, home, connection, output, sleep
        self._floors = app.floors if floors is None else floors
        self._given_peers = peers
        self._consent = asked_for() if consent is None else consent
        self._server_key = home.server().server_key
        self._agreed_runs: dict[str, AgreedRun] = {}
        self._ledgers = LedgerReader(
            connection, self._server_key, public_bytes(home.key), lambda run, text: output.info(f"{run}: {text}")
        )
        self._refused_runs: dict[str, str] = {}
        self._warned: set[tuple[str, str]] = set()
        self._ended: set[str] = set()
        self._now, self._record = now, record
        self._silent_since: SilentSessions = {}
        self._last_sent: tuple[str, str, Broadcast] | None = None
        """Run, name and content of the newest broadcast of a run whose versions are evaluated here."""
        torch.set_num_threads(1)  # as in a simulation: sums must not depend on the number of cores

    def run(self, *, once: bool = False) -> None:
        """Work until stopped; with `once`, until all runs have ended."""
        self._end_silent_sessions()
        welcome = self._connection.welcome()
        self._output.info(f"joined as {welcome.name}, client {welcome.number}; {len(self._app.train_x):,} samples")
        while not (self.step() and once):
            pass
        self._connection.ask_once(endpoints.POLL, self._poll(wait=0.0))  # tells the server that it may end, too

    def step(self) -> bool:
        """Poll once and execute the orders; return whether all runs have ended."""
        hours = self._floors.hours
        if hours and not is_working_hour(hours, time.localtime().tm_hour):
            self._warn_once("", "resting: outside the hours of the floors")
            self._sleep(SHORT_REST)
            return False
        self._end_silent_sessions()
        answer = self._connection.ask(endpoints.POLL, self._poll(MAX_WAIT), wait=MAX_WAIT)
        done = [self._evaluate(order) for order in answer.evaluations if order.secure is not None]  # others wait
        done += [self._execute(order) for order in answer.orders]
        done += [self._evaluate(order) for order in answer.evaluations if order.secure is None]
        self._end([name for name in answer.ended if is_run_name(name)])
        if not any(done):
            self._sleep(answer.retry + random.uniform(0, answer.spread))  # noqa: S311
        return bool(answer.ended) and not answer.open and not done

    def _end_silent_sessions(self) -> None:
        """Remove the secrets of sessions of secure aggregation that the server left without an end."""
        homes = [(run, home) for run in self._home.runs() if (home := self._run_home(run)).session_marks()]
        self._silent_since = end_silent_sessions(homes, self._silent_since, self._now()) if homes else {}

    def _run_home(self, run: str) -> RunHome:
        return self._agreed_runs[run].home if run in self._agreed_runs else self._home.run(run)

    def _poll(self, wait: float) -> Poll:
        return Poll(
            num_samples=len(self._app.train_x),
            wait=wait,
            attributes=self._app.current_attributes(),
            ended=tuple(sorted(self._ended)),
            evaluates=self._floors.evaluation in (OPEN, NOISED),
            evaluates_in_secret=self._floors.evaluation == IN_SECRET,
        )

    def _execute(self, order: Order) -> bool:
        """Execute an order, or refuse it; return whether it was done."""

        def work(agreed: AgreedRun) -> None:
            if order.secure is not None:
                return self._answer(order.run, UpdateAddend(agreed=agreed, order=order), order.secure)
            reason = why_not_trained(agreed, self._app)
            if reason is not None:
                raise WorkRefused(reason)
            self._ledgers.check(agreed.home, order)
            (self._deliver if agreed.parties is None else self._exchange)(agreed, order)

        return self._try(order.run, work, lambda reason: self._refuse(order, reason))

    def _evaluate(self, order: EvaluationOrder) -> bool:
        """Measure a version on this client's samples and tell what the floors allow, or why nothing is told."""
        began = time.monotonic()

        def tell(told: SiteEvaluation) -> None:
            self._connection.ask(endpoints.EVALUATION, told, run=order.run, version=order.version)

        def refuse(reason: str) -> None:
            self._warn_once(order.run, f"tells nothing of version {order.version}: {reason}")
            with suppress(Declined):  # it was closed
                tell(SiteEvaluation(reason=reason[:1000]))

        def work(agreed: AgreedRun) -> None:
            if order.secure is not None:
                self._ledgers.check(agreed.home, order)
                return self._answer(order.run, EvaluationAddend(agreed=agreed, order=order), order.secure)
            tell(self._measured(agreed, order))
            took = human_seconds(time.monotonic() - began)
            self._output.info(f"{order.run}: version {order.version} evaluated in {took}")

        return self._try(order.run, work, refuse)

    def _try(self, run: str, work: Callable[[AgreedRun], None], refuse: Callable[[str], None]) -> bool:
        """Do work for a run, or refuse it with the reason; return whether it was done."""
        if not is_run_name(run):
            raise RunError(f"the server names a run {run[:70]!r}, which is no name: tell the operator")
        try:
            work(self._agreed_run(run))
        except Declined as declined:  # such as a task that was closed
            self._output.info(f"{run}: {declined}")
            return False
        except DiskFull as full:
            self._warn_once(run, str(full))
            self._sleep(SHORT_REST)
            return False
        except RunError:
            raise
        except AtollError as error:
            refuse(str(error))
            return False
        return True

    def _measured(self, agreed: AgreedRun, order: EvaluationOrder) -> SiteEvaluation:
        """Measure a version that the ledger confirms; it often was trained on just now."""
        self._ledgers.check(agreed.home, order)
        agreed.home.confirm_update(order.counted)

        def measure() -> State:
            if self._last_sent is None or self._last_sent[:2] != (order.run, order.model.name):
                sent = agreed.receive_broadcast(order, self._fetching(order.run, agreed))
                self._last_sent = (order.run, order.model.name, sent)
            return agreed.measure(self._last_sent[2])

        return tell(agreed, order, self._home.run_budget(f"{order.run} (evaluations)"), measure)

    def _agreed_run(self, run: str) -> AgreedRun:
        """Return a run that was agreed to; at first use, decide and build it."""
        if run in self._refused_runs:
            raise WorkRefused(self._refused_runs[run])
        if run not in self._agreed_runs:
            info = self._connection.ask(endpoints.RUN, None, run=run)
            self._check_consent(run, info)
            welcome = self._connection.welcome()
            try:
                self._agreed_runs[run] = agree(
                    self._app,
                    self._floors,
                    info,
                    welcome.number,
                    self._home.run(run),
                    self._home.secret(run),
                    name=welcome.name,
                    keys_known=self._given_peers is not None,
                )
            except RunError:
                raise
            except AtollError as error:
                self._refused_runs[run] = str(error)
                raise
            self._output.info(f"{run}: agreed; {self._agreed_runs[run].job.spec.num_params:,} parameters")
            self._ledgers.read(run, self._agreed_runs[run].home)  # before work is done: another may use this key
        return self._agreed_runs[run]

    def _check_consent(self, run: str, info: RunInfo) -> None:
        """Refuse a run to which the owner does not consent."""
        before = self._home.runs()
        reason = None if run in before else self._consent(info, before)
        if reason is not None:
            self._refused_runs[run] = reason
            raise WorkRefused(reason)

    def _deliver(self, agreed: AgreedRun, order: Order) -> None:
        """Train, unless a pending update exists, and deliver until the server acknowledges the update."""
        home = agreed.home
        home.confirm_update(order.counted)
        pending = home.pending()
        if pending is None or pending.attempt != order.attempt:
            attempt, version = home.last_trained()
            if order.attempt <= attempt:
                raise WorkRefused(
                    f"attempt {order.attempt} is not after {attempt}, which was done: noise is never used twice; "
                    "give a run that begins anew another name"
                )
            if order.version < version:
                raise RunError(f"{order.run} goes back from version {version} to {order.version}; {DISTRUST}")
            pending = self._train(agreed, order)
        elif (pending.version, pending.model) != (order.version, order.model.name):
            raise WorkRefused(f"attempt {order.attempt} was done on another model: noise is never used twice")
        if agreed.job.secure is not None:
            self._connection.ask(endpoints.READY, None, run=order.run, attempt=order.attempt)
            self._ledgers.witness(order.run, home).acknowledged(order.attempt, "")
            return
        began, data = time.monotonic(), home.update()
        delivered = self._connection.deliver(order.run, order.attempt, data, pending.delivery)
        if delivered.object != pending.object:
            raise RunError("the server has taken another update than was sent: tell the operator")
        self._ledgers.witness(order.run, home).acknowledged(order.attempt, delivered.object)
        took = human_seconds(time.monotonic() - began)
        self._tell_round(order, f"{human_bytes(len(data))} up in {took}")

    def _exchange(self, agreed: AgreedRun, order: Order) -> None:
        """Say that this client is ready for its session, or hold it."""
        home, began = agreed.home, time.monotonic()
        if order.session is None:
            self._connection.ask(endpoints.READY, None, run=order.run, attempt=order.attempt)
            return
        sent = list[str]()

        def note(name: str) -> None:
            home.note_sent(order.attempt, name)
            sent.append(name)

        num_bytes = hold_session(agreed, order, self._connection, self._home.key, note)
        self._ledgers.witness(order.run, home).acknowledged(order.attempt, sent[0])
        took = human_seconds(time.monotonic() - began)
        self._tell_round(order, f"{human_bytes(num_bytes)} up in a session of {took}")

    def _train(self, agreed: AgreedRun, order: Order) -> PendingUpdate:
        """Train, and save the update before anything of it leaves."""
        try:
            agreed.charge_privacy(order)
        except WorkRefused as unwilling:  # what was spent never shrinks
            self._refused_runs[order.run] = str(unwilling)
            raise
        home, start = agreed.home, time.monotonic()
        sizes = list[int]()

        def fetch(ref: Ref) -> Iterator[bytes]:
            sizes.append(ref.num_bytes)
            return iter(self._fetching(order.run, agreed)(ref))

        sent = agreed.receive_broadcast(order, fetch)
        if agreed.plan.evaluation.clients_every:
            self._last_sent = (order.run, order.model.name, sent)
        if not agreed.job.downlink.chain.transforms:  # else clients receive other parameters than the server has
            model = params_hash(agreed.job.model_of(sent)).hex()
            self._ledgers.witness(order.run, home).check_params(order.version, model)
        heard = time.monotonic()
        trained = agreed.train(order, sent)
        if self._record is not None:
            self._record(agreed, order.run, agreed.task(order), sent, trained)
        times = [human_seconds(seconds) for seconds in (heard - start, time.monotonic() - heard)]
        self._tell_round(order, f"{human_bytes(sum(sizes))} down in {times[0]}, trained in {times[1]}")
        manifest = manifest_of(*trained.data)
        pending = PendingUpdate(
            attempt=order.attempt,
            version=order.version,
            model=order.model.name,
            params=params_hash(sent.params_D).hex(),
            object=manifest.name(),
            delivery=signed_delivery(self._home.key, order, manifest, trained),
        )
        home.save_update(pending, trained.data, trained.state)
        return pending

    def _answer(self, run: str, addend: Addend, message: Ref) -> None:
        """Answer a message of secure aggregation; a repeated message gets the same answer."""
        secure_session = SecureSession(
            identity=self._home.key,
            server_key=self._server_key,
            info=lambda: self._connection.ask(endpoints.RUN, None, run=run),
            peers=self._peers,
        )
        answer = secure_session.answer(addend, message, self._fetching(run, addend.agreed))
        manifest = self._connection.upload(run, addend.attempt, answer)
        answered = Answer(msgspec.msgpack.encode(manifest))
        self._connection.ask(endpoints.SECURE, answered, run=run, attempt=addend.attempt)
        self._output.info(f"{run}: {addend.title}: {human_bytes(manifest.num_bytes)} up to add in secret")

    def _peers(self, announced: Mapping[str, bytes]) -> Mapping[int, bytes]:
        """Return the keys of all clients: those that the owner gave, or those that were seen first."""
        return self._home.peers(announced) if self._given_peers is None else self._given_peers

    def _refuse(self, order: Order, reason: str) -> None:
        self._warn_once(order.run, reason)
        try:
            refusal = Refusal(reason[:1000], whole_run=order.run in self._refused_runs)
            self._connection.ask(endpoints.REFUSE, refusal, run=order.run, attempt=order.attempt)
        except Declined as declined:  # the task was closed
            self._output.info(f"{order.run}: {declined}")

    def _end(self, names: list[str]) -> None:
        """Finish runs that have ended: read the ledger to its end and save the final model."""
        kept = set[str]()
        for run in set(names) & set(self._home.unfinished()):
            home = self._run_home(run)
            try:
                while self._ledgers.read(run, home):
                    pass
                last = next((chain.read(line)[0] for line in home.ledger_lines()[-1:]), None)
                if last is None or last.kind != chain.END:
                    self._warn_once(run, "the server has given it up, and may go on with it when it is started again")
                    continue
                pending = home.pending()
                if pending is not None and self._ledgers.witness(run, home).knows_counted(pending.attempt):
                    home.confirm_update(pending.attempt)  # no later order says so
                self._save_final_model(run, last.body)
                home.mark_ended()
                KeptEvaluations(home).forget_sums()
                self._agreed_runs.pop(run, None)
                self._output.info(f"{run}: is over")
            except (Declined, DiskFull) as error:  # the next poll names it again
                self._warn_once(run, str(error))
                kept.add(run)
        self._ended = set(names) - kept

    def _save_final_model(self, run: str, end: Mapping[str, Any]) -> None:
        """Save the final model of a run, or this side's layers of it, after a check against the ledger's end."""
        info = self._connection.ask(endpoints.RUN, None, run=run)
        try:
            agreed = self._agreed_run(run)
            path = save_final_model(agreed, info, end, self._fetching(run, agreed))
        except (Declined, DiskFull, RunError):
            raise
        except AtollError as error:
            self._warn_once(run, f"its model was left there: {error}")
            return
        self._output.info(f"{run}: {'its model is' if agreed.parties is None else 'its layers are'} in {path}")

    def _fetching(self, run: str, agreed: AgreedRun) -> Fetch:
        return lambda ref: self._connection.fetch(run, ref, agreed.home.objects)

    def _tell_round(self, order: Order, text: str) -> None:
        self._output.info(f"{order.run}: round {order.version + 1}: {text}")

    def _warn_once(self, run: str, reason: str) -> None:
        if (run, reason) not in self._warned:
            self._warned.add((run, reason))
            self._output.warn(f"{run}: {reason}" if run else reason)
