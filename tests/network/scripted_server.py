"""A small server of real parts (gate, store, objects, ledger, sockets) that does what a test tells it to."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from atoll.core.messages import Broadcast, Payload, State, Task, Update, stack
from atoll.core.params import params_hash
from atoll.core.wire import pack, unpack
from atoll.engine.base import InProcess
from atoll.ledger import chain, signing
from atoll.ledger.signing import plan_hash
from atoll.network.protocol.blobs import Disk
from atoll.network.protocol.endpoints import METADATA_HEADER
from atoll.network.protocol.identity import holds, public_bytes, read_stamp, token_hash
from atoll.network.protocol.messages import (
    About,
    Answer,
    Challenge,
    Delivered,
    Delivery,
    Done,
    Enrol,
    Enrolled,
    Hello,
    Lines,
    Message,
    Missing,
    Nonce,
    Order,
    Orders,
    Poll,
    Problem,
    Ref,
    Refusal,
    RunInfo,
    Welcome,
    update_text,
)
from atoll.network.protocol.objects import Objects, read_manifest
from atoll.network.server.auth import Authenticator, Clock, Refused
from atoll.network.server.store import Store
from atoll.network.server.web import content_length, read_body, web_server
from atoll.train.exchange import Told, Work, decoded, received
from atoll.train.job import Job, empty_update
from atoll.train.trainer import Trainer

MOST = 1 << 21
LONGEST_POLL = 0.05
MOST_TURNS = 200
"""Turns in which all clients should have delivered, whatever happens to them."""
CUT_BEFORE, CUT_AFTER = "cut before", "cut after"
"""A request that is never heard, and one that is heard but whose answer is lost."""

Fault = Callable[[str, str], str | int | bytes | Message | tuple[int, Problem] | None]


def hash_of(params_D: Tensor) -> str:
    return params_hash(params_D).hex()


def no_fault(method: str, path: str) -> None:
    return None


class ScriptedServer:
    """Knows clients and their orders; a test puts orders in and takes deliveries out."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.store, self.now = Store(f"sqlite:///{path}/store.db"), now
        self.restart()
        self.path = path
        self.objects, self.key = Objects(Disk(path / "objects")), Ed25519PrivateKey.generate()
        self.infos: dict[str, RunInfo] = {}
        self.orders: dict[int, list[Order]] = {}
        self.ended: tuple[str, ...] = ()
        self.deliveries: dict[tuple[str, int, int], tuple[str, Delivery]] = {}
        self.objects_of: dict[tuple[str, int, int], set[str]] = {}
        """Every object that a client ever announced for an attempt."""
        self.ready: set[tuple[str, int, int]] = set()
        self.answers: dict[tuple[str, int, int], list[bytes]] = {}
        """What clients said in secure aggregation, each time that they said it."""
        self.refusals: list[tuple[str, int, str]] = []
        self.polls: list[Poll] = []
        self.ledgers: dict[str, list[str]] = {}
        self.heads: dict[str, chain.Head] = {}
        self.versions: dict[str, list[str]] = {}
        """The hash of each version of a run."""
        self.attempts: dict[str, int] = {}
        """The newest attempt that a version was made of."""
        self.announced: set[tuple[str, int]] = set()
        self.asked: dict[tuple[str, int, int], int] = {}
        """The version of the orders that were delivered."""
        self.counted: set[tuple[str, int, int]] = set()
        self.strangers: dict[int, Ed25519PrivateKey] = {}
        self.log: list[tuple[str, str, int]] = []
        self.trouble: Fault = no_fault

    def restart(self) -> None:
        """Forget all sessions, as a server does that is started anew."""
        self.authenticator = Authenticator(self.store, Clock(wall=self.now, monotonic=self.now))

    def token(self, text: str = "token") -> str:
        with self.store.write() as tables:
            tables.add_token(token_hash(text), self.now() + 1000)
        return text

    def approve_all(self) -> None:
        with self.store.write() as tables:
            for client in tables.clients():
                tables.approve(client.id)
        self.authenticator.clear_cache()

    def add_run(self, info: RunInfo, params_D: Tensor) -> None:
        """Begin a run from these parameters, and its ledger."""
        self.infos[info.run] = info
        first = {"run": info.run, "plan": info.plan, "plan_hash": plan_hash(info.plan), "model": hash_of(params_D)}
        line, head = chain.start(first, self.key)
        self.ledgers[info.run], self.heads[info.run] = [line], head
        self.versions[info.run] = [hash_of(params_D)]

    def note(self, run: str, kind: str, body: Mapping[str, Any]) -> None:
        """Write a record, whatever it says."""
        line, self.heads[run] = chain.add(self.heads[run], kind, body, self.key)
        self.ledgers[run].append(line)

    def broadcast(self, run: str, name: str) -> None:
        """Say what is sent of the newest version, unless that was said."""
        version = len(self.versions[run]) - 1
        if (run, version) not in self.announced:
            self.announced.add((run, version))
            self.note(run, chain.BROADCAST, {"version": version, "object": name})

    def commit(self, run: str, params_D: Tensor, others: Iterable[tuple[int, str]] = (), **changes: Any) -> None:
        """Make a version of all that was delivered since the last one, and of what others sent who are not here."""
        models = self.versions[run]
        cohort = [
            self._entry(run, *place) for place in self.deliveries if place[0] == run and place not in self.counted
        ]
        cohort += [self._stranger(run, *other) for other in others]
        self.counted.update(self.deliveries)
        body = {
            "version": len(models),
            "attempt": max([self.attempts.get(run, -1) + 1, *(each["attempt"] for each in cohort)]),
            "model": hash_of(params_D),
            "before": models[-1],
            "rule": "mean",
            "cohort": cohort,
            "rejected": [],
            "seconds": 0,
            **changes,
        }
        models.append(hash_of(params_D))
        self.attempts[run] = body["attempt"]
        self.note(run, chain.COMMIT, body)

    def _entry(self, run: str, _: str, attempt: int, client: int) -> dict[str, Any]:
        name, told = self.deliveries[run, attempt, client]
        with self.store.read() as tables:
            row = next(each for each in tables.clients() if each.number == client)
        return {
            "client": client,
            "id": row.id,
            "key": row.key.hex(),
            "version": self.asked[run, attempt, client],
            "attempt": attempt,
            "num_samples": told.num_samples,
            "loss": told.loss,
            "weight": told.weight,
            "object": name,
            "signature": told.signature.hex(),
            "broadcast": told.broadcast,
        }

    def _stranger(self, run: str, client: int, name: str) -> dict[str, Any]:
        """What a commit says of a client that only the server has ever seen."""
        key = self.strangers.setdefault(client, Ed25519PrivateKey.generate())
        version, attempt = len(self.versions[run]) - 1, self.attempts.get(run, -1) + 1
        signature = key.sign(signing.update_text(run, attempt, version, name, 10, 0.5, 10.0))
        return {
            "client": client,
            "id": signing.client_id(public_bytes(key)),
            "key": public_bytes(key).hex(),
            "version": version,
            "attempt": attempt,
            "num_samples": 10,
            "loss": 0.5,
            "weight": 10.0,
            "object": name,
            "signature": signature.hex(),
        }

    def end(self, run: str, params_D: Tensor, name: str | None = None) -> None:
        """A run is over, and ended with these parameters; what the ledger calls them may be a lie."""
        models = self.versions[run]
        body = {"reason": "all rounds done", "version": len(models) - 1, "model": name or models[-1]}
        self.note(run, chain.END, body)
        self.infos[run] = msgspec.structs.replace(self.infos[run], model=self.put(pack(Payload(params_D))))
        self.ended = (run,)

    def put(self, data: bytes) -> Ref:
        return Ref(self.objects.put(data), len(data))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        body = await read_body(receive, content_length(headers, MOST))
        trouble = self.trouble(method, path)
        status, answer = 200, b""
        if isinstance(trouble, int):
            status, answer = trouble, b"<html>something between the two speaks</html>"
        elif isinstance(trouble, tuple):
            status, answer = trouble[0], msgspec.json.encode(trouble[1])
        elif isinstance(trouble, bytes):
            answer = trouble
        elif isinstance(trouble, Message):
            answer = msgspec.json.encode(trouble)
        elif trouble != CUT_BEFORE:
            try:
                found = await self._answer(method, path, headers, body)
                answer = found if isinstance(found, bytes) else msgspec.json.encode(found)
            except Refused as refused:
                status, answer = refused.status, msgspec.json.encode(Problem(str(refused), refused.retry))
        self.log.append((method, path, status))
        cut = isinstance(trouble, str)
        size = len(answer) + 1 if cut else len(answer)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % size)]})
        if not cut:  # else uvicorn cuts the connection
            await send({"type": "http.response.body", "body": answer})

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Message | bytes:
        match method, path:
            case "GET", "/v1/about":
                return About((1,), public_bytes(self.key), int(self.now()))
            case "POST", "/v1/enrol":
                asked = msgspec.json.decode(body, type=Enrol)
                return Enrolled(self.authenticator.enrol(asked.token, asked.name, asked.key, asked.signature))
            case "POST", "/v1/challenge":
                return Nonce(self.authenticator.challenge(msgspec.json.decode(body, type=Challenge).client))
            case "POST", "/v1/session":
                hello = msgspec.json.decode(body, type=Hello)
                epoch, row = self.authenticator.open_session(hello.client, hello.nonce, hello.signature)
                assert row.number is not None
                return Welcome(epoch, row.number, row.name)
        stamp = read_stamp(headers)
        assert stamp is not None
        row = self.authenticator.authenticate(stamp, method, path)
        assert stamp.body == hashlib.sha256(body).hexdigest()
        assert row.number is not None
        if path == "/v1/poll":
            return await self._poll(row.number, msgspec.json.decode(body, type=Poll))
        found = re.fullmatch(r"/v1/runs/([a-z0-9-]+)(?:/(ledger|objects|tasks)/(\w+))?(?:/(\w+))?(?:/(\w+))?", path)
        if found is None or found[1] not in self.infos:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such thing")
        run, kind, name, rest, digest = found.groups()
        if kind is None:
            return self.infos[run]
        if kind == "ledger":
            return Lines(tuple(self.ledgers[run][int(name) :]))
        if kind == "objects":
            manifest = self.objects.manifest(name)
            return msgspec.msgpack.encode(manifest) if rest is None else self.objects.chunk(manifest.chunks[int(rest)])
        if (method, rest) == ("PUT", "update"):  # a small one: chunk and delivery in one
            self.objects.put_chunk(hashlib.sha256(body).digest(), body)
            body = headers[METADATA_HEADER].encode()
        return self._task(run, int(name), row.number, row.key, rest, digest, body)

    def _task(self, run: str, attempt: int, client: int, key: bytes, verb: str, digest: str, body: bytes) -> Message:
        place = (run, attempt, client)
        if verb == "chunks":
            self.objects.put_chunk(bytes.fromhex(digest), body)
            return Done()
        if verb == "refuse":
            self.refusals.append((run, attempt, msgspec.json.decode(body, type=Refusal).reason))
            self._forget(place)
            return Done()
        if verb == "ready":
            self.ready.add(place)
            self._forget(place)
            return Done()
        kind: type[Answer] | type[Delivery] = Delivery if verb == "update" else Answer
        told = msgspec.json.decode(body, type=kind)
        manifest = read_manifest(told.manifest, MOST * 100)
        self.objects_of.setdefault(place, set()).add(manifest.name())
        order = next((each for each in self.orders.get(client, []) if (each.run, each.attempt) == (run, attempt)), None)
        if order is None and place not in self.deliveries:
            raise Refused(HTTPStatus.GONE, "nobody waits for this task any more")
        if verb == "secure":
            self.answers.setdefault(place, []).append(bytes(self.objects.get(self.objects.put_manifest(manifest))))
            self._forget(place)
            return Done()
        if isinstance(told, Answer):
            return Missing(tuple(digest.hex() for digest in self.objects.missing(manifest)))
        name = self.objects.put_manifest(manifest)
        if order is not None:
            assert holds(key, update_text(run, attempt, order.version, name, told), told.signature)
            assert told.broadcast == order.model.name
            self.deliveries[place], self.asked[place] = (name, told), order.version
            self._forget(place)
        assert self.deliveries[place] == (name, told), "one attempt, one update"
        return Delivered(name)

    def _forget(self, place: tuple[str, int, int]) -> None:
        run, attempt, client = place
        self.orders[client] = [each for each in self.orders[client] if (each.run, each.attempt) != (run, attempt)]

    async def _poll(self, client: int, poll: Poll) -> Orders:
        self.polls.append(poll)
        until = time.monotonic() + min(poll.wait, LONGEST_POLL)
        while not self.orders.get(client) and not self.ended and time.monotonic() < until:
            await asyncio.sleep(0.002)
        still = len(self.infos) - len(set(self.infos) & set(self.ended))
        return Orders(tuple(self.orders.get(client, ())), self.ended, still, retry=0.0, spread=0.0)


@contextmanager
def serving(server: ScriptedServer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Let a server listen; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        web = web_server(server, "127.0.0.1", 0, tls)
        thread = threading.Thread(target=lambda: asyncio.run(web.serve([listener])))
        thread.start()
        try:
            while not web.started:
                time.sleep(0.01)
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            web.should_exit = True
            thread.join()


class WireEngine(InProcess):
    """Lets a simulation's clients be real ones, that train elsewhere; everything else is the simulation's own."""

    def __init__(self, job: Job, server: ScriptedServer, run: str, step: Callable[[], None]) -> None:
        super().__init__(job, Trainer(job))
        self.server, self.run, self.step = server, run, step
        self.counted: dict[int, int] = {}
        self.version = 0
        """Versions that clients have worked for; the one that came of it is known when it is sent."""

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterator[Work]:
        server, tasks = self.server, [task for group in groups for task in group]
        models = {version: server.put(pack(each.plain())) for version, each in sent.items()}
        newest = max(sent)
        self.commit(sent[newest].params_D)
        server.broadcast(self.run, models[newest].name)
        for task in tasks:
            order = Order(
                self.run,
                task.attempt,
                task.version,
                models[task.version],
                task.share,
                task.work,
                task.clip,
                counted=self.counted.get(task.client),
            )
            server.orders.setdefault(task.client, []).append(order)
        for _ in range(MOST_TURNS):
            if all((self.run, task.attempt, task.client) in server.deliveries for task in tasks):
                break
            self.step()
        else:
            raise AssertionError(f"clients do not deliver: {server.refusals}")
        for task in tasks:
            name, told = server.deliveries[self.run, task.attempt, task.client]
            payload = unpack(server.objects.get(name), max_bytes=MOST * 100)
            none = empty_update(self.job)
            aux = {each: value.new_zeros(value.shape[1:]) for each, value in none.aux.items()}
            like = Update(self.job.first_D, torch.tensor(told.weight, dtype=none.weight.dtype), aux)
            stacked = stack([decoded(self.job, like, payload)])
            self.counted[task.client] = task.attempt
            yield received(self.job, self.trainer.fold, [task], stacked, [Told(told.num_samples, told.loss, 0)])
        self.version += 1

    def commit(self, params_D: Tensor) -> None:
        """Write down the version that came of the work so far."""
        if len(self.server.versions[self.run]) <= self.version:
            self.server.commit(self.run, params_D)
