"""The server's side of secure aggregation: its state machine, fed by clients' answers to messages in a mailbox.

A session is kept in memory. If the process ends, the sum is lost and the attempt is abandoned: a client never adds one
update to two sums, since their difference could reveal an update.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from atoll.commit.secure_sum import Added, groups_of, largest_of, session_of, told
from atoll.core.errors import PlanError
from atoll.core.messages import Task, Update
from atoll.core.params import params_hash
from atoll.network.protocol.messages import Ref
from atoll.network.protocol.objects import Objects
from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.scheme import Outcome, Session
from atoll.secagg.server import Close, Out, Phase, Server
from atoll.train.job import Job

STEP_SECONDS = 120.0
"""Seconds that answers of a step are waited for, where the plan has no deadline."""


class Mailbox:
    """Messages to clients, and their answers; used from several threads."""

    def __init__(self, objects: Objects, wake: Callable[[set[int]], None]) -> None:
        self._objects, self._wake = objects, wake
        self._lock = threading.Lock()
        self._messages: dict[int, Ref] = {}
        self._answers: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def waiting(self, client: int) -> Ref | None:
        """Return the message that waits for a client's answer."""
        with self._lock:
            return self._messages.get(client)

    def answer(self, client: int, data: bytes) -> bool:
        """Take an answer; return False if none is waited for."""
        with self._lock:
            if self._messages.pop(client, None) is None:
                return False
        self._answers.put((client, data))
        return True

    def close(self) -> None:
        """Stop waiting for answers."""
        self._answers.put(None)

    def exchange(self, messages: Iterable[Out], seconds: float) -> Iterator[tuple[int, bytes]]:
        """Send messages, and yield clients and answers as they arrive, until all have arrived or the time is up."""
        for message in messages:
            ref = Ref(name=self._objects.put(message.data), num_bytes=len(message.data))
            with self._lock:
                self._messages[message.client] = ref
        with self._lock:
            missing = set(self._messages)
        self._wake(missing)
        until = time.monotonic() + seconds
        try:
            while missing:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                if answer is None:
                    return
                missing.discard(answer[0])
                yield answer
        except queue.Empty:
            pass
        finally:
            with self._lock:
                self._messages.clear()


class SecureContext(NamedTuple):
    """What a server needs for secure aggregation."""

    identity: Ed25519PrivateKey
    registry: Mapping[int, bytes]
    """The public keys of all clients, by number."""
    mailbox: Mailbox
    seconds: float


def sum_with_clients(
    job: Job, run: str, params_D: Tensor, tasks: Sequence[Task], like: Update, context: SecureContext
) -> Added:
    """Sum the updates of clients that are ready, one group after another; all received these parameters."""
    assert job.secure is not None and job.secure.scheme.invite is not None
    largest, params = largest_of(job, tasks), params_hash(params_D)
    rounds: list[tuple[Session, Outcome, Update]] = []
    for number, group in enumerate(groups_of(job, tasks)):
        session = session_of(job, run, params, tasks[0], number, group, like, largest)
        rounds.append((session, hold_session(session, job.secure.scheme.invite, context, {}), like))
    return told(job, rounds, largest, len(tasks))


def hold_session(
    session: Session, invite_to: Callable[[Session], wire.Invite], context: SecureContext, rejected: dict[int, str]
) -> Outcome:
    """Hold a session with its clients; those whose answers were not taken, and why, are added to `rejected`."""
    registry = {**context.registry, wire.SERVER: context.identity.public_key().public_bytes_raw()}
    machine = Server(identity=context.identity, registry=registry)
    up = down = 0

    def counted(messages: Iterable[Out]) -> Iterator[Out]:
        nonlocal down
        for message in messages:
            down += len(message.data)
            yield message

    try:
        invite = invite_to(session)
        state, out = machine.open(invite)
        down = len(session.clients) * wire.name_padding(invite)
        while state.phase is not Phase.DONE:
            for client, answer in context.mailbox.exchange(counted(out), context.seconds):
                up += len(answer)
                try:
                    state, _ = machine.handle(state, answer)
                except Abort as abort:  # the session goes on without this answer
                    rejected.setdefault(client, str(abort))
            state, out = machine.handle(state, Close(state.phase))
    except (PlanError, Abort) as error:
        return Outcome(None, (), up, down, str(error))
    survivors = machine.survivors(state)
    if len(survivors) < session.min_survivors:
        return Outcome(None, (), up, down, f"{len(survivors)} are left, {session.min_survivors} are needed")
    return Outcome(machine.result(state), survivors, up, down)
