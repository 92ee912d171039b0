"""Handles requests of authenticated clients; may be called from any thread."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

import msgspec

from atoll.core.messages import Task
from atoll.network.protocol.identity import holds
from atoll.network.protocol.messages import (
    Delivered,
    Delivery,
    Missing,
    Order,
    Orders,
    Poll,
    Readiness,
    Refusal,
    RunInfo,
    SiteEvaluation,
    update_text,
)
from atoll.network.protocol.objects import Manifest, ObjectError, Objects, read_manifest
from atoll.network.protocol.secret_sums import FIRST_TASK, task_of
from atoll.network.server.auth import Refused, check_approved
from atoll.network.server.driver import RunDriver
from atoll.network.server.monitoring import Metrics, log
from atoll.network.server.parts import BadUpdate
from atoll.network.server.presence import REFUSED, number_of, number_or_nobody
from atoll.network.server.runs import RUNNING, Run, WaitingRun
from atoll.network.server.sites import SiteAnswer, evaluation_orders, read_sums
from atoll.network.server.tables import NOBODY, ClientRow, Stage
from atoll.network.server.uploads import UploadTooLarge
from atoll.network.server.writer import RETRY, Change, Transaction

WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance of weights, which clients compute in float32."""
MAX_LOSS = 1e30
"""Maximum training loss: sums of larger ones over clients and samples would overflow."""
MAX_ATTRIBUTES, MAX_ATTRIBUTE_NAME = 32, 40
"""Maximum number of a device's attributes and length of their names; eligibility rules know five short ones."""
LARGE_UPDATE = 64 << 20
"""Updates of more bytes are checked one after another, so that memory does not grow with their number."""


class RequestHandler:
    """Answers requests of clients for all runs."""

    def __init__(self, driver: RunDriver, metrics: Metrics, max_samples: int) -> None:
        self._driver, self._metrics, self._max_samples = driver, metrics, max_samples
        self._writer, self._runs, self._store = driver.writer, driver.runs, driver.store
        self._now = driver.now
        self._large_lock = threading.Lock()
        self.informed_of_end: set[int] = set()
        """Clients that know that all runs have ended, and have read their ledgers."""

    def note_poll(self, client: ClientRow, poll: Poll) -> Future[None] | None:
        """Note that a client polls, and its number of samples; return a future if that must be written."""
        number, presence = number_of(client), self._driver.presence
        short = (each for each in poll.attributes.items() if len(each[0]) <= MAX_ATTRIBUTE_NAME)
        attributes, in_secret = dict(islice(short, MAX_ATTRIBUTES)), poll.evaluates_in_secret
        presence.note_poll(number, attributes, evaluates=poll.evaluates, in_secret=in_secret)
        known, num_samples = presence.clients.get(number), min(poll.num_samples, self._max_samples)
        if known is None or known.num_samples == num_samples:
            return None
        changed = known._replace(num_samples=num_samples)

        def change(transaction: Transaction) -> None:
            transaction.tables.set_samples(client.id, num_samples)
            transaction.after_commit(lambda: presence.clients.update({number: changed}))

        return self._submit(client, change)

    def orders(self, client: ClientRow, poll: Poll) -> Orders:
        """Return the orders of a client."""
        number = number_of(client)
        with self._writer.lock:
            orders = [
                order
                for run in self._driver.built_runs()
                if (order := self._order(run, number)) is not None and (run.name, order.attempt) not in poll.busy
            ]
            asked = self._driver.built_runs() if poll.evaluates or poll.evaluates_in_secret else []
            going = [run for run in asked if run.status == RUNNING and run.sites.answers]
            evaluations = tuple(each for run in going for each in evaluation_orders(run, number))
            ended = tuple(run.name for run in self._runs.values() if run.status != RUNNING)
            if len(ended) == len(self._runs) and set(ended) <= set(poll.ended):
                self.informed_of_end.add(number)
            return Orders(tuple(orders), ended, len(self._runs) - len(ended), evaluations=evaluations)

    def open_runs(self) -> tuple[RunInfo, ...]:
        """Describe the runs that have not ended, for clients that only want to try them."""
        keys = self._driver.presence.keys()
        going = [run for run in list(self._runs.values()) if run.status == RUNNING]
        return tuple(run.info(keys, NOBODY) if isinstance(run, Run) else run.preview(keys) for run in going)

    def run_info(self, client: ClientRow, run_name: str) -> RunInfo:
        """Describe a run to a client."""
        run = self.run(run_name)
        if isinstance(run, WaitingRun):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the run has not begun yet", RETRY)
        return run.info(self._driver.presence.keys(), number_or_nobody(client))

    def ledger_lines(self, run_name: str, start: int = 0, most: int | None = None) -> list[str]:
        """Return lines of a run's ledger from a number on, at most `most`."""
        self.run(run_name)
        with self._store.read() as tables:
            return tables.ledger_lines(run_name, start, most)

    def readable_objects(self, client: ClientRow, run_name: str, name: str) -> Objects:
        """Return the objects that hold this name, if the client may read it: a version, or a message to it."""
        run = self._built_run(run_name)
        self._driver.presence.note_request(client.number)
        number = number_or_nobody(client)
        mine = run.mail(number) if run.sites.adding is None else run.sites.mail(number) or run.mail(number)
        with self._writer.lock:
            known = {name for model in run.models.values() for name in model.names()}
            known |= {news.object.name for news in run.news}
        known |= set() if mine is None else {mine.name}
        known |= set() if run.final is None else run.final.readable(number)
        if name not in known:
            raise Refused(HTTPStatus.GONE, "there is no such object any more: poll again")
        return run.objects

    def missing(self, client: ClientRow, run_name: str, attempt: int, manifest: bytes) -> Missing:
        """Return the missing chunks of an announced update."""
        run, task = self._awaited_upload(client, run_name, attempt)
        announced = self._manifest(run, manifest)
        return Missing(tuple(digest.hex() for digest in run.uploads.missing(task, announced)))

    def put_chunk(
        self, client: ClientRow, run_name: str, attempt: int, digest: str, data: bytes, body_hash: str
    ) -> None:
        """Store a chunk whose hash is known; at most two updates' worth of bytes is kept of a client."""
        run, task = self._awaited_upload(client, run_name, attempt)
        if digest != body_hash:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "a chunk is named by its SHA-256, and this one is not")
        put = partial(run.uploads.put_chunk, task, bytes.fromhex(digest), data, 2 * run.max_upload)
        try:
            put()
        except UploadTooLarge:  # chunks of abandoned attempts do not count
            machine = run.machine
            run.uploads.drop_other_tasks(task.client, (task, *machine.arrived, *machine.committing))
            try:
                put()
            except UploadTooLarge as error:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error

    def deliver(
        self,
        client: ClientRow,
        run_name: str,
        attempt: int,
        delivery: Delivery,
        data: bytes | None = None,
        body_hash: str = "",
    ) -> Future[Delivered | Refused] | Delivered:
        """Take an update from stored chunks, or from `data` of a known hash; the future ends when it is committed."""
        run, number = self._built_run(run_name), number_of(client)
        manifest = self._manifest(run, delivery.manifest)
        if run.holds_sessions:
            why = "this run has sessions in place of updates, or adds them in secret: do not send one"
            raise Refused(HTTPStatus.CONFLICT, why, RETRY)
        if data is not None and manifest != Manifest(len(data), (bytes.fromhex(body_hash),)):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "the body is not the object that the manifest names")
        name = manifest.name()
        task = self._in_flight(run, attempt, number)
        if task is None:
            self._check_already_arrived(run_name, attempt, number, name)  # the answer was lost
            return Delivered(name)
        text = update_text(run_name, attempt, task.version, name, delivery)
        if not holds(client.key, text, delivery.signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the update is not signed with this client's key")
        try:
            report = self._check_update(run, task, manifest, delivery, data)
        except (BadUpdate, ObjectError) as error:
            self._reject(client, run, task, str(error))
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

        def change(transaction: Transaction) -> Delivered | Refused:
            late = self._driver.journal.arrived(transaction, run, task, name, report, delivery.signature, data)
            transaction.after_commit(self._metrics.late if late else self._metrics.arrived)
            return Refused(HTTPStatus.GONE, late) if late else Delivered(name)

        return self._submit(client, change)

    def ready(self, client: ClientRow, run_name: str, attempt: int) -> None:
        """Note that a client is ready: it has trained and waits for secure aggregation, or for its session."""
        run = self._built_run(run_name)
        if not run.holds_sessions:
            raise Refused(
                HTTPStatus.CONFLICT, "this run has no sessions, and adds nothing in secret: deliver the update"
            )
        number = number_of(client)
        task = self._in_flight(run, attempt, number)
        if task is None:
            return self._check_already_arrived(run_name, attempt, number, "")
        late = self._submit(
            client, lambda transaction: self._driver.journal.arrived(transaction, run, task, "", {}, b"")
        ).result()
        if late:
            raise Refused(HTTPStatus.GONE, late)

    def answer_secure(self, client: ClientRow, run_name: str, attempt: int, manifest: bytes) -> None:
        """Take a client's answer in secure aggregation."""
        run, task = self._awaited_upload(client, run_name, attempt)
        announced = self._manifest(run, manifest)
        with self._large_lock if announced.num_bytes > LARGE_UPDATE else contextlib.nullcontext():
            self._awaited_upload(client, run_name, attempt)  # of two answers at once, one is read
            data = b"".join(run.uploads.complete_chunks(task, announced))
            mailbox = run.sites.mailbox if task.attempt >= FIRST_TASK else run.mailbox
            with self._writer.lock:  # nobody is revoked meanwhile
                taken = task.client in self._driver.presence.clients and mailbox.answer(task.client, data)
        if not taken:
            raise Refused(HTTPStatus.GONE, "nobody waits for this answer any more: poll for work")

    def refuse(self, client: ClientRow, run_name: str, attempt: int, refusal: Refusal) -> None:
        """Note that a client refuses a task, or the whole run."""
        run, task = self._awaited_task(client, run_name, attempt)
        log("rejected", run=run_name, client=client.name, why=f"{REFUSED}{refusal.reason}")
        run.mailbox.answer(task.client, b"")  # the secure sum goes on without it

        def change(transaction: Transaction) -> None:
            offences = self._driver.journal.offences
            offences.record_refusal(transaction, run, task, refusal.reason, whole_run=refusal.whole_run)

        self._submit(client, change).result()

    def evaluated(self, client: ClientRow, run_name: str, version: int, told: SiteEvaluation) -> None:
        """Take what a client measured of a version; an answer that cannot be true is rejected, and an offence."""
        run, number = self._built_run(run_name), number_of(client)
        with self._writer.lock:
            answers, known = run.sites.answers.get(version), self._driver.presence.clients.get(number)
        if answers is None or known is None:
            raise Refused(HTTPStatus.GONE, "nobody waits for this evaluation any more: poll for work")
        if number in answers:  # the answer was lost, or it leaves a secret sum
            if told.reason:
                run.sites.leave(version, number, told.reason)
            return
        answer = SiteAnswer(SiteEvaluation(in_secret=True) if told.in_secret and not told.reason else told)
        if not told.reason and not told.in_secret:
            most = self._driver.presence.stated_samples(number)
            try:
                read_sums(told, run.sites.layout, run.parts.job.measures, most)
            except BadUpdate as error:
                answer = SiteAnswer(SiteEvaluation(), str(error))
                self._metrics.rejected("bad evaluation")
                log("rejected", run=run_name, client=client.name, why=str(error))
        record = partial(self._driver.journal.record_answer, run=run, version=version, client=number, answer=answer)
        self._submit(client, record).result()
        if answer.rejected:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, answer.rejected)

    def readiness(self, client: ClientRow, run_name: str, told: Readiness) -> None:
        """Note the result of a client's preflight."""
        self.run(run_name)
        log("checked", run=run_name, client=client.name, ready=told.ready, why=told.reason)
        text = msgspec.json.encode(told).decode()
        self._submit(client, lambda each: each.tables.set_readiness(run_name, client.id, text)).result()

    def _submit(self, client: ClientRow, change: Change) -> Future[Any]:
        """Submit a change for a client, which must still be approved when it is written."""

        def checked(transaction: Transaction) -> Any:
            check_approved(transaction.tables.client(client.id))
            return change(transaction)

        return self._writer.submit(checked)

    def _order(self, run: Run, number: int) -> Order | None:
        task, mail = run.machine.in_flight.get(number), run.mail(number)
        stream = run.stream(number)
        if stream is not None and stream.end is not None:
            return None  # its session is over, and what comes of it is not there yet
        if mail is not None or stream is not None:
            task = next((each for each in run.machine.committing if each.client == number), None)
        if run.status != RUNNING or task is None:
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
            encoded=model.encoded,
            news=tuple(news for news in run.news if news.version <= task.version),
            counted=run.counted.get(number),
            seconds=None if deadline is None else max(0.0, run.began + deadline - self._now()),
            secure=mail,
            session=None if stream is None else stream.session,
        )

    def run(self, name: str) -> WaitingRun | Run:
        """Return a run by its name."""
        run = self._runs.get(name)
        if run is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such run here: poll for work")
        return run

    def _built_run(self, name: str) -> Run:
        """Return a run that may have asked clients."""
        run = self.run(name)
        if isinstance(run, WaitingRun):
            raise Refused(HTTPStatus.GONE, "the run has not begun, and waits for nothing: poll for work")
        return run

    def _in_flight(self, run: Run, attempt: int, number: int) -> Task | None:
        with self._writer.lock:
            task = run.machine.in_flight.get(number)
        return task if task is not None and task.attempt == attempt else None

    def _check_already_arrived(self, run_name: str, attempt: int, number: int, name: str) -> None:
        """Refuse an update that is not waited for, unless it arrived before: its answer may have been lost."""
        with self._store.read() as tables:
            row = tables.task(run_name, attempt, number)
        if row is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this client was not asked that: poll for work")
        if row.stage not in (Stage.ARRIVED, Stage.COUNTED) or row.update != name:
            raise Refused(HTTPStatus.GONE, "nobody waits for this update any more: poll for work")

    def _awaited_task(self, client: ClientRow, run_name: str, attempt: int) -> tuple[Run, Task]:
        """Return the task of a client, if it is still waited for."""
        run = self._built_run(run_name)
        number = number_or_nobody(client)
        with self._writer.lock:
            task = run.machine.in_flight.get(number)
            if task is None and run.mail(number) is not None:
                task = next((each for each in run.machine.committing if each.client == number), None)
        if task is None or task.attempt != attempt:
            raise Refused(HTTPStatus.GONE, "nobody waits for this any more: poll for work")
        return run, task

    def _awaited_upload(self, client: ClientRow, run_name: str, attempt: int) -> tuple[Run, Task]:
        """Return the task for which a client may send chunks: one of its own, or that of a secret sum."""
        run, number = self._built_run(run_name), number_or_nobody(client)
        version = attempt - FIRST_TASK
        if run.sites.adding is not None and run.sites.adding[0] == version and run.sites.mail(number) is not None:
            return run, task_of(number, version)
        return self._awaited_task(client, run_name, attempt)

    def _manifest(self, run: Run, data: bytes) -> Manifest:
        try:
            return read_manifest(data, run.max_upload)
        except ObjectError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

    def _check_update(
        self, run: Run, task: Task, manifest: Manifest, delivery: Delivery, data: bytes | None
    ) -> dict[str, Any]:
        """Check an update before it counts; return the report that is written of it."""
        optional = not run.parts.job.work.always_has_loss
        if not (optional if delivery.loss is None else abs(delivery.loss) <= MAX_LOSS):
            raise BadUpdate("the training loss is not a number: check the client's data and learning rate")
        model = run.models.get(task.version)
        if delivery.broadcast is not None and (model is None or delivery.broadcast != model.ref.name):
            raise BadUpdate("the update was made of something else than was sent: train on the order's model")
        due = run.parts.max_weight(delivery.num_samples)
        if not 0 < delivery.weight <= due * (1 + WEIGHT_TOLERANCE):
            raise BadUpdate(
                f"a weight of {delivery.weight} makes no sense: an update of {delivery.num_samples:,} samples weighs "
                f"above 0 and at most {due:g} in this run"
            )
        most = min(
            run.parts.job.federation.num_samples(task.client), self._driver.presence.max_samples(run, task.client)
        )
        weight = min(delivery.weight, run.parts.max_weight(most))
        chunks = run.uploads.complete_chunks(task, manifest) if data is None else [data]
        with self._large_lock if manifest.num_bytes > LARGE_UPDATE else contextlib.nullcontext():
            update, _ = run.parts.decode_update(chunks, manifest.num_bytes, weight)
            run.parts.check_acceptable(task, update)
        # the client signed its own numbers; what counts is capped by the samples that it is credited with
        signed: dict[str, Any] = {"num_samples": delivery.num_samples, "loss": delivery.loss, "weight": delivery.weight}
        signed |= {} if delivery.broadcast is None else {"broadcast": delivery.broadcast}
        counts = {"counts": weight, "samples": min(delivery.num_samples, most)}
        return {**signed, **counts, "manifest": delivery.manifest.hex()}

    def _reject(self, client: ClientRow, run: Run, task: Task, why: str) -> None:
        """Reject a client's update, and count an offence; repeated offences exclude the client."""
        self._metrics.rejected("bad update")
        log("rejected", run=run.name, client=client.name, why=why)

        def change(transaction: Transaction) -> None:
            self._driver.journal.fail(transaction, run, [task], why)
            self._driver.journal.offences.count_offences(transaction, [task.client])

        self._submit(client, change).result()
