"""A client of a real federation: asks for work, looks at it, trains, delivers, and keeps the ledger's receipts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import torch

from atoll.commit.secure_sum import params_hash
from atoll.core.errors import AtollError, DiskFull, RunError
from atoll.core.params import load
from atoll.ledger import chain
from atoll.network.client.app import ClientApp
from atoll.network.client.connection import Connection, Declined
from atoll.network.client.consent import Consent, asked_for
from atoll.network.client.home import Home, PendingUpdate, RunHome
from atoll.network.client.secure_session import SecureSession, longest_silence
from atoll.network.client.task import AgreedRun, TrainedUpdate, WorkRefused, agree
from atoll.network.client.witness import DISTRUST, Witness
from atoll.network.protocol import endpoints
from atoll.network.protocol.agreement import Floors, is_working_hour
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import (
    MAX_WAIT,
    Answer,
    Delivery,
    Order,
    Poll,
    Ref,
    Refusal,
    RunInfo,
    is_run_name,
    update_text,
)
from atoll.network.protocol.objects import Manifest, manifest_of
from atoll.report.reading import human_bytes, human_seconds

SHORT_REST = 60.0
"""Seconds until somebody looks again whether there is room on the disk, or whether it is time to work."""


class Console(NamedTuple):
    """How a client speaks to its owner: of progress, and of what it cannot or will not do."""

    say: Callable[[str], None]
    warn: Callable[[str], None]


class Client:
    """Works for one server until it is stopped. All that must last is in its home: it may be killed at any moment."""

    def __init__(
        self,
        app: ClientApp,
        home: Home,
        connection: Connection,
        console: Console,
        floors: Floors | None = None,
        peers: Mapping[int, bytes] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        consent: Consent | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._home, self._connection, self._console, self._sleep = app, home, connection, console, sleep
        self._floors = app.floors if floors is None else floors
        self._given_peers = peers
        self._consent = asked_for() if consent is None else consent
        self._server_key = home.server().server_key
        self._agreed_runs: dict[str, AgreedRun] = {}
        self._witnesses: dict[str, Witness] = {}
        self._refused_runs: dict[str, str] = {}
        self._warned: set[tuple[str, str]] = set()
        self._ended: set[str] = set()
        self._now = now
        self._silent_since: dict[tuple[str, int, int], float] = {}
        """Since when nothing was said in sessions of secure aggregation, by run, attempt and what was said last."""
        torch.set_num_threads(1)  # as in a simulation: sums then never depend on the number of cores

    def run(self, *, once: bool = False) -> None:
        """Ask for work and do it; with `once` until all runs are over."""
        self._end_silent_sessions()
        welcome = self._connection.welcome()
        self._console.say(f"joined as {welcome.name}, client {welcome.number}; {len(self._app.train_y):,} samples")
        while not (self.step() and once):
            pass
        self._connection.ask_once(endpoints.POLL, self._poll(wait=0.0))  # the server may end, too

    def step(self) -> bool:
        """Ask for work once and do what there is; True if all runs are over."""
        if not is_working_hour(self._floors.hours, time.localtime().tm_hour):
            self._warn_once("", "resting: outside the hours of the floors")
            self._sleep(SHORT_REST)
            return False
        self._end_silent_sessions()
        told = self._connection.ask(endpoints.POLL, self._poll(MAX_WAIT), wait=MAX_WAIT)
        done = [self._execute(order) for order in told.orders]
        self._end([name for name in told.ended if is_run_name(name)])
        if not any(done):
            self._sleep(told.retry + random.uniform(0, told.spread))  # noqa: S311
        return bool(told.ended) and not told.open and not told.orders

    def _end_silent_sessions(self) -> None:
        """Remove the secrets of sessions of secure aggregation that came to nothing without a word.

        How long a session has been silent is measured while this process looks at it, so that no clock that is set
        ends one too early.
        """
        now, seen = self._now(), dict[tuple[str, int, int], float]()
        for run in self._home.runs():
            home = self._agreed_runs[run].home if run in self._agreed_runs else self._home.run(run)
            for attempt, mark in home.session_marks().items():
                seen[run, attempt, mark] = since = self._silent_since.get((run, attempt, mark), now)
                if now - since > longest_silence(home.info().plan):
                    home.end_sessions(only=attempt)
        self._silent_since = seen

    def _poll(self, wait: float) -> Poll:
        return Poll(len(self._app.train_y), wait, self._app.current_attributes(), ended=tuple(sorted(self._ended)))

    def _execute(self, order: Order) -> bool:
        """Do an order, or tell the server why not."""
        if not is_run_name(order.run):
            raise RunError(f"the server names a run {order.run[:70]!r}, which is no name: tell the operator")
        try:
            agreed = self._agreed_run(order.run)
            if order.secure is not None:
                self._answer(agreed, order, order.secure)
            else:
                self._deliver(agreed, order)
        except Declined as declined:  # such as a task that nobody waits for any more
            self._console.say(f"{order.run}: {declined}")
            return False
        except DiskFull as full:
            self._warn_once(order.run, str(full))
            self._sleep(SHORT_REST)
            return False
        except RunError:
            raise
        except AtollError as error:
            self._refuse(order, str(error))
            return False
        return True

    def _agreed_run(self, run: str) -> AgreedRun:
        """What is needed to work for a run: looked at once, and built once."""
        if run in self._refused_runs:
            raise WorkRefused(self._refused_runs[run])
        if run not in self._agreed_runs:
            info = self._connection.ask(endpoints.RUN, None, run=run)
            self._must_agree(run, info)
            number, secret = self._connection.welcome().number, self._home.secret(run)
            try:
                self._agreed_runs[run] = agree(
                    self._app,
                    self._floors,
                    info,
                    number,
                    self._home.run(run),
                    secret,
                    keys_known=self._given_peers is not None,
                )
            except RunError:
                raise
            except AtollError as error:
                self._refused_runs[run] = str(error)
                raise
            self._console.say(f"{run}: agreed; {self._agreed_runs[run].job.spec.num_params:,} parameters")
            self._read_ledger(
                run, self._agreed_runs[run].home
            )  # whoever else has this key is found out before work is done
        return self._agreed_runs[run]

    def _must_agree(self, run: str, info: RunInfo) -> None:
        """Refuse a run that the owner has not agreed to, now or before."""
        before = self._home.runs()
        reason = None if run in before else self._consent(info, before)
        if reason is not None:
            self._refused_runs[run] = reason
            raise WorkRefused(reason)

    def _deliver(self, agreed: AgreedRun, order: Order) -> None:
        """Train, unless that was done before, and deliver until the server says that the update is safe."""
        home = agreed.home
        reason = agreed.plan.eligibility.why_not(self._app.current_attributes())
        if reason is not None:
            raise WorkRefused(f"this device may not be asked now: {reason}")
        self._check_ledger(agreed, order)
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
            self._witness(order.run, home).acknowledged(order.attempt, "")
            return
        began, data = time.monotonic(), home.update()
        told = self._connection.deliver(order.run, order.attempt, data, pending.delivery)
        if told.object != pending.object:
            raise RunError("the server has taken another update than was sent: tell the operator")
        self._witness(order.run, home).acknowledged(order.attempt, told.object)
        took = human_seconds(time.monotonic() - began)
        self._console.say(f"{order.run}: round {order.version + 1}: {human_bytes(len(data))} up in {took}")

    def _train(self, agreed: AgreedRun, order: Order) -> PendingUpdate:
        """Train, and write everything down before anything leaves."""
        try:
            agreed.must_be_allowed(order)
        except WorkRefused as unwilling:  # what was spent only grows
            self._refused_runs[order.run] = str(unwilling)
            raise
        home, start = agreed.home, time.monotonic()
        down = 0

        def fetch(ref: Ref) -> Iterator[bytes]:
            nonlocal down
            down += ref.num_bytes
            return self._fetch(agreed, order.run, ref)

        sent = agreed.receive_broadcast(order, fetch)
        params = params_hash(sent.params_D).hex()
        if not agreed.job.downlink.chain.transforms:  # else clients hear something else than the server has
            model = params_hash(agreed.job.model_of(sent)).hex()
            self._witness(order.run, home).check_params(order.version, model)
        heard = time.monotonic()
        trained = agreed.train(order, sent)
        times = [human_seconds(seconds) for seconds in (heard - start, time.monotonic() - heard)]
        self._console.say(
            f"{order.run}: round {order.version + 1}: {human_bytes(down)} down in {times[0]}, trained in {times[1]}"
        )
        manifest = manifest_of(*trained.data)
        pending = PendingUpdate(
            attempt=order.attempt,
            version=order.version,
            model=order.model.name,
            params=params,
            object=manifest.name(),
            delivery=self._delivery(order, manifest, trained),
        )
        home.save_update(pending, trained.data, trained.state)
        return pending

    def _fetch(self, agreed: AgreedRun, run: str, ref: Ref) -> Iterator[bytes]:
        """An object of the server's; what a loss of power has spoilt here is fetched again."""
        objects = agreed.home.objects
        if not self._connection.download(run, ref, objects) and not objects.is_sound(ref.name):
            objects.keep_only(())
            self._connection.download(run, ref, objects)
        return objects.read(ref.name)

    def _answer(self, agreed: AgreedRun, order: Order, message: Ref) -> None:
        """Answer a message of secure aggregation; the same message gets the same answer."""
        secure_session = SecureSession(
            agreed=agreed,
            identity=self._home.key,
            server_key=self._server_key,
            info=lambda: self._connection.ask(endpoints.RUN, None, run=order.run),
            peers=self._peers,
        )
        answer = secure_session.answer(order, message, lambda ref: self._fetch(agreed, order.run, ref))
        manifest = self._connection.upload(order.run, order.attempt, answer)
        answered = Answer(msgspec.msgpack.encode(manifest))
        self._connection.ask(endpoints.SECURE, answered, run=order.run, attempt=order.attempt)
        self._console.say(
            f"{order.run}: round {order.version + 1}: {human_bytes(manifest.num_bytes)} up to add in secret"
        )

    def _peers(self, told: Mapping[str, bytes]) -> Mapping[int, bytes]:
        """Everybody's keys: those that the owner gave, or those that were seen first."""
        return self._home.peers(told) if self._given_peers is None else self._given_peers

    def _delivery(self, order: Order, manifest: Manifest, trained: TrainedUpdate) -> Delivery:
        told = Delivery(
            manifest=msgspec.msgpack.encode(manifest),
            num_samples=trained.num_samples,
            loss=trained.loss,
            weight=trained.weight,
            signature=bytes(64),
            broadcast=order.model.name,
        )
        text = update_text(order.run, order.attempt, order.version, manifest.name(), told)
        return msgspec.structs.replace(told, signature=self._home.key.sign(text))

    def _refuse(self, order: Order, reason: str) -> None:
        self._warn_once(order.run, reason)
        try:
            refusal = Refusal(reason[:1000], whole_run=order.run in self._refused_runs)
            self._connection.ask(endpoints.REFUSE, refusal, run=order.run, attempt=order.attempt)
        except Declined as declined:  # nobody waits for it any more
            self._console.say(f"{order.run}: {declined}")

    def _read_ledger(self, run: str, home: RunHome) -> bool:
        """Get some of the ledger's new records, and keep them if they can be true; False if there are none."""
        witness = self._witness(run, home)
        lines = self._connection.ask(endpoints.LEDGER, None, run=run, start=home.head.length).lines
        if not lines:
            witness.receipts.caught_up(witness.story.version)
            return False
        witness.hear(lines)
        return True

    def _witness(self, run: str, home: RunHome) -> Witness:
        """What this client has heard of a run's ledger."""
        if run not in self._witnesses:
            number = self._connection.welcome().number
            self._witnesses[run] = Witness(
                home,
                self._server_key,
                number,
                public_bytes(self._home.key),
                lambda text: self._console.say(f"{run}: {text}"),
            )
        return self._witnesses[run]

    def _check_ledger(self, agreed: AgreedRun, order: Order) -> None:
        """Read the ledger as far as the version that is sent, and refuse what it does not name."""
        witness = self._witness(order.run, agreed.home)
        while order.version not in witness.story.sent:
            if not self._read_ledger(order.run, agreed.home):
                raise RunError(
                    f"the ledger of {order.run} has no record that version {order.version} was sent, which the server "
                    f"wants work on; {DISTRUST}, or let its operator update it"
                )
        witness.check_sent(order.version, order.model.name)
        while order.counted is not None and not witness.knows_counted(order.counted):
            if not self._read_ledger(order.run, agreed.home):
                raise RunError(
                    f"the server says that this client's update of attempt {order.counted} counted, the ledger of "
                    f"{order.run} does not; {DISTRUST}"
                )

    def _end(self, names: list[str]) -> None:
        """Take leave of runs that are over."""
        kept = set[str]()
        for run in set(names) & set(self._home.unfinished()):
            home = self._agreed_runs[run].home if run in self._agreed_runs else self._home.run(run)
            try:
                while self._read_ledger(run, home):
                    pass
                last = next((chain.read(line)[0] for line in home.ledger_lines()[-1:]), None)
                if last is None or last.kind != chain.END:
                    self._warn_once(run, "the server has given it up, and may go on with it when it is started again")
                    continue
                self._save_final_model(run, home, last.body.get("model", ""))
                home.mark_ended()
                self._agreed_runs.pop(run, None)
                self._console.say(f"{run}: is over")
            except (Declined, DiskFull) as error:  # it is looked at again when it is told again
                self._warn_once(run, str(error))
                kept.add(run)
        self._ended = set(names) - kept

    def _save_final_model(self, run: str, home: RunHome, name: str) -> None:
        """Keep the model that a run ended with, whose name is in the ledger."""
        ref = self._connection.ask(endpoints.RUN, None, run=run).model
        try:
            if ref is None:
                raise WorkRefused("the server does not give it")
            agreed = self._agreed_run(run)
            params_D = agreed.final_params(ref, lambda ref: self._fetch(agreed, run, ref))
        except (Declined, RunError):
            raise
        except AtollError as error:
            self._warn_once(run, f"its model was left there: {error}")
            return
        if params_hash(params_D).hex() != name:
            raise RunError(f"{run} ended with another model than its ledger says; do not trust this server")
        path = home.save_model(load(agreed.job.model, agreed.job.spec, params_D).state_dict())
        self._console.say(f"{run}: its model is in {path}")

    def _warn_once(self, run: str, reason: str) -> None:
        if (run, reason) not in self._warned:
            self._warned.add((run, reason))
            self._console.warn(f"{run}: {reason}" if run else reason)
