"""The desk: what clients ask of a server. Everything here may be called from any thread."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from atoll.core.messages import Task
from atoll.network.protocol.identity import holds
from atoll.network.protocol.messages import (
    Delivered,
    Delivery,
    Missing,
    Order,
    Orders,
    Poll,
    Refusal,
    RunInfo,
    update_text,
)
from atoll.network.protocol.objects import Manifest, ObjectError, Objects, read_manifest
from atoll.network.server.auth import Refused, check_approved
from atoll.network.server.driver import RunDriver
from atoll.network.server.logs import log
from atoll.network.server.metrics import Metrics
from atoll.network.server.offences import REFUSED
from atoll.network.server.parts import BadUpdate
from atoll.network.server.runs import RUNNING, Run
from atoll.network.server.tables import ClientRow, Stage
from atoll.network.server.uploads import UploadTooLarge
from atoll.network.server.writer import RETRY, Change, Transaction

ROUNDING = 1e-6
"""How much larger than it should be a weight may be, since clients compute it in float32."""
MAX_LOSS = 1e30
"""A larger training loss is no loss: sums of it over clients and samples would overflow."""
ATTRIBUTES, ATTRIBUTE = 32, 40
"""So many attributes of a device are remembered, of names of so many letters: rules know five, and short ones."""
LARGE = 64 << 20
"""Updates of more bytes than this are looked at one after another, so that memory does not grow with their number."""


class RequestHandler:
    """Answers clients that the gate has let in."""

    def __init__(self, driver: RunDriver, metrics: Metrics, max_samples: int) -> None:
        self._driver, self._metrics, self._max_samples = driver, metrics, max_samples
        self._writer, self._runs, self._store = driver.writer, driver.runs, driver.store
        self._now = driver.now
        self._counting, self._one_large = threading.Lock(), threading.Lock()
        self.informed_of_end: set[int] = set()
        """Who knows that all runs are over, and has read their ledgers."""

    def note_poll(self, client: ClientRow, poll: Poll) -> Future[None] | None:
        """Note that a client is there, and how much it has; what to wait for if that must be written down."""
        number, presence = _number(client), self._driver.presence
        short = (each for each in poll.attributes.items() if len(each[0]) <= ATTRIBUTE)
        presence.note_poll(number, dict(islice(short, ATTRIBUTES)))
        known, num_samples = presence.clients.get(number), min(poll.num_samples, self._max_samples)
        if known is None or known.num_samples == num_samples:
            return None
        changed = known._replace(num_samples=num_samples)

        def change(transaction: Transaction) -> None:
            transaction.tables.set_samples(client.id, num_samples)
            transaction.after_commit(lambda: presence.clients.update({number: changed}))

        return self._submit(client, change)

    def orders(self, client: ClientRow, poll: Poll) -> Orders:
        """What a client has to do now."""
        number = _number(client)
        with self._writer.lock:
            orders = [
                order
                for run in self._runs.values()
                if (order := self._order(run, number)) is not None and (run.name, order.attempt) not in poll.busy
            ]
            ended = tuple(run.name for run in self._runs.values() if run.status != RUNNING)
            if len(ended) == len(self._runs) and set(ended) <= set(poll.ended):
                self.informed_of_end.add(number)
            return Orders(tuple(orders), ended, len(self._runs) - len(ended))

    def run_info(self, run: str) -> RunInfo:
        """What a run is."""
        found = self.run(run)
        if found.parts is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the run has not begun yet", RETRY)
        return found.info(self._driver.presence.keys())

    def ledger_lines(self, run: str, start: int = 0, most: int | None = None) -> list[str]:
        """Lines of a run's ledger, from one on, and at most so many."""
        self.run(run)
        with self._store.read() as tables:
            return tables.ledger_lines(run, start, most)

    def readable_objects(self, client: ClientRow, run: str, name: str) -> tuple[Run, Objects]:
        """Where an object is that a client may have: versions are for all, its post is its own."""
        found = self.run(run)
        self._driver.presence.note_request(client.number)
        mine = found.mailbox.waiting(client.number) if client.number is not None else None
        with self._writer.lock:
            known = {name for model in found.models.values() for name in model.names()}
            known |= {news.object.name for news in found.news}
        known |= {ref.name for ref in (mine, found.final_model) if ref is not None}
        if name not in known:
            raise Refused(HTTPStatus.GONE, "there is no such object any more: poll again")
        return found, found.objects

    def count_sent(self, run: Run, num_bytes: int) -> None:
        """Count what was sent to a client."""
        with self._counting:
            run.bytes_down += num_bytes

    def missing(self, client: ClientRow, run: str, attempt: int, manifest: bytes) -> Missing:
        """Which chunks of an update are not here."""
        found, task = self._awaited_task(client, run, attempt)
        announced = self._manifest(found, manifest)
        return Missing(tuple(digest.hex() for digest in found.uploads.missing(task, announced)))

    def put_chunk(self, client: ClientRow, run: str, attempt: int, digest: str, data: bytes, hashed: str) -> None:
        """Keep a chunk of an update, whose hash is known; of nobody is more kept than two updates can be long."""
        found, task = self._awaited_task(client, run, attempt)
        if digest != hashed:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "a chunk is named by its SHA-256, and this one is not")
        assert found.parts is not None
        put = partial(found.uploads.put_chunk, task, bytes.fromhex(digest), data, 2 * found.parts.max_bytes)
        try:
            put()
        except UploadTooLarge:  # what was sent for attempts that came to nothing does not count
            machine = found.machine
            found.uploads.drop_other_tasks(task.client, (task, *machine.arrived, *machine.committing))
            try:
                put()
            except UploadTooLarge as error:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error

    def deliver(
        self, client: ClientRow, run: str, attempt: int, told: Delivery, data: bytes | None = None, hashed: str = ""
    ) -> Future[Delivered | Refused] | Delivered:
        """Take an update that is here in chunks, or is this one chunk whose hash is known; at the end it is safe."""
        found, number = self.run(run), _number(client)
        manifest = self._manifest(found, told.manifest)
        if found.parts is None or found.parts.job.secure is not None:
            raise Refused(HTTPStatus.CONFLICT, "updates of this run are added in secret: do not send one", RETRY)
        if data is not None and manifest != Manifest(len(data), (bytes.fromhex(hashed),)):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "the body is not the object that the manifest names")
        name = manifest.name()
        task = self._in_flight(found, attempt, number)
        if task is None:
            self._check_already_arrived(run, attempt, number, name)  # the answer was lost
            return Delivered(name)
        text = update_text(run, attempt, task.version, name, told)
        if not holds(client.key, text, told.signature):
            raise Refused(HTTPStatus.FORBIDDEN, "the update is not signed with this client's key")
        try:
            report = self._check_update(found, task, manifest, told, data)
        except (BadUpdate, ObjectError) as error:
            self._reject(client, found, task, str(error))
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

        def change(transaction: Transaction) -> Delivered | Refused:
            late = self._driver.arrived(transaction, found, task, name, report, told.signature, data)
            transaction.after_commit(self._metrics.late if late else self._metrics.arrived)
            return Refused(HTTPStatus.GONE, late) if late else Delivered(name)

        return self._submit(client, change)

    def ready(self, client: ClientRow, run: str, attempt: int) -> None:
        """A client has trained, and waits for the others to add in secret."""
        found = self.run(run)
        if found.parts is None or found.parts.job.secure is None:
            raise Refused(HTTPStatus.CONFLICT, "nothing is added in secret in this run: deliver the update")
        number = _number(client)
        task = self._in_flight(found, attempt, number)
        if task is None:
            return self._check_already_arrived(run, attempt, number, "")
        late = self._submit(
            client, lambda transaction: self._driver.arrived(transaction, found, task, "", {}, b"")
        ).result()
        if late:
            raise Refused(HTTPStatus.GONE, late)

    def answer_secure(self, client: ClientRow, run: str, attempt: int, manifest: bytes) -> None:
        """A client answers a message of secure aggregation."""
        found, task = self._awaited_task(client, run, attempt)
        announced = self._manifest(found, manifest)
        with self._one_large if announced.num_bytes > LARGE else contextlib.nullcontext():
            self._awaited_task(client, run, attempt)  # who answers twice at once is read once
            data = b"".join(found.uploads.complete_chunks(task, announced))
            with self._writer.lock:  # nobody is shut out meanwhile
                taken = task.client in self._driver.presence.clients and found.mailbox.answer(task.client, data)
        if not taken:
            raise Refused(HTTPStatus.GONE, "nobody waits for this answer any more: poll for work")

    def refuse(self, client: ClientRow, run: str, attempt: int, refusal: Refusal) -> None:
        """A client will not do a task, or takes no part in the run at all."""
        found, task = self._awaited_task(client, run, attempt)
        log("rejected", run=run, client=client.name, why=f"{REFUSED}{refusal.reason}")
        found.mailbox.answer(task.client, b"")  # it leaves a sum that goes on without it

        def change(transaction: Transaction) -> None:
            self._driver.offences.record_refusal(transaction, found, task, refusal.reason, whole_run=refusal.whole_run)

        self._submit(client, change).result()

    def _submit(self, client: ClientRow, change: Change) -> Future[Any]:
        """Let a client change something, if it is still let in when that is written down."""

        def checked(transaction: Transaction) -> Any:
            check_approved(transaction.tables.client(client.id))
            return change(transaction)

        return self._writer.submit(checked)

    def _order(self, run: Run, number: int) -> Order | None:
        task, mail = run.machine.in_flight.get(number), run.mailbox.waiting(number)
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
            encoded=model.encoded,
            news=tuple(news for news in run.news if news.version <= task.version),
            counted=run.counted.get(number),
            seconds=None if deadline is None else max(0.0, run.began + deadline - self._now()),
            secure=mail,
        )

    def run(self, name: str) -> Run:
        """A run by its name."""
        found = self._runs.get(name)
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such run here: poll for work")
        return found

    def _in_flight(self, run: Run, attempt: int, number: int) -> Task | None:
        with self._writer.lock:
            task = run.machine.in_flight.get(number)
        return task if task is not None and task.attempt == attempt else None

    def _check_already_arrived(self, run: str, attempt: int, number: int, name: str) -> None:
        """Refuse what is not waited for, unless it has arrived before."""
        with self._store.read() as tables:
            row = tables.task(run, attempt, number)
        if row is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this client was not asked that: poll for work")
        if row.stage not in (Stage.ARRIVED, Stage.COUNTED) or row.update != name:
            raise Refused(HTTPStatus.GONE, "nobody waits for this update any more: poll for work")

    def _awaited_task(self, client: ClientRow, run: str, attempt: int) -> tuple[Run, Task]:
        """The task of a client that is still waited for."""
        found = self.run(run)
        number = -1 if client.number is None else client.number
        with self._writer.lock:
            task = found.machine.in_flight.get(number)
            if task is None and found.mailbox.waiting(number) is not None:
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

    def _check_update(
        self, run: Run, task: Task, manifest: Manifest, told: Delivery, data: bytes | None
    ) -> dict[str, Any]:
        """Look at an update before it counts; what is written down of it."""
        assert run.parts is not None
        if told.loss is None or not abs(told.loss) <= MAX_LOSS:
            raise BadUpdate("the training loss is not a number: check the client's data and learning rate")
        model = run.models.get(task.version)
        if told.broadcast is not None and (model is None or told.broadcast != model.ref.name):
            raise BadUpdate("the update was made of something else than was sent: train on the order's model")
        due = run.parts.max_weight(told.num_samples)
        if not 0 < told.weight <= due * (1 + ROUNDING):
            raise BadUpdate(
                f"a weight of {told.weight} makes no sense: an update of {told.num_samples:,} samples weighs above 0 "
                f"and at most {due:g} in this run"
            )
        most = min(
            run.parts.job.federation.num_samples(task.client), self._driver.presence.max_samples(run, task.client)
        )
        weight = min(told.weight, run.parts.max_weight(most))
        chunks = run.uploads.complete_chunks(task, manifest) if data is None else [data]
        with self._one_large if manifest.num_bytes > LARGE else contextlib.nullcontext():
            run.parts.check_acceptable(task, run.parts.decode_update(chunks, manifest.num_bytes, weight))
        # the client signed what it told; what counts is cut to what the samples weigh that it is believed to have
        signed: dict[str, Any] = {"num_samples": told.num_samples, "loss": told.loss, "weight": told.weight}
        signed |= {} if told.broadcast is None else {"broadcast": told.broadcast}
        counts = {"counts": weight, "samples": min(told.num_samples, most)}
        return {**signed, **counts, "manifest": told.manifest.hex()}

    def _reject(self, client: ClientRow, run: Run, task: Task, why: str) -> None:
        """Leave a client's update out, and blame the client; who does it again and again is shut out."""
        self._metrics.rejected("bad update")
        log("rejected", run=run.name, client=client.name, why=why)

        def change(transaction: Transaction) -> None:
            self._driver.fail(transaction, run, [task], why)
            self._driver.offences.count_offences(transaction, [task.client])

        self._submit(client, change).result()


def _number(client: ClientRow) -> int:
    """By what number an approved client is known."""
    assert client.number is not None
    return client.number
