"""The client's side of secure aggregation: answers the messages of a session, each step once.

The state after a step is saved before its answer leaves. After a kill, a step either was not done and is unknown to
the server, or was done and its saved answer is sent again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.commit.secure_sum import least_of, session_of, vector_of
from atoll.core.coordinator import Policy
from atoll.core.errors import RunError
from atoll.core.parts import Part
from atoll.core.wire import unpack
from atoll.network.client.home import ENDED_SESSION, PendingUpdate, RunHome, SessionState
from atoll.network.client.task import AgreedRun, Fetch, WorkRefused
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Order, Ref, RunInfo
from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.client import Client
from atoll.secagg.client_state import ClientState, Floors, Phase, Vector, config_of, limit
from atoll.secagg.encoding import Encoding
from atoll.secagg.saved import dump, load
from atoll.train.job import layout_of
from atoll.train.secure import Largest

LEAST = Floors()
"""Minimum requirements of every client."""


LONGEST_STEP = 120.0
"""Seconds that a server waits for a step, where the plan has no deadline."""


def longest_silence(plan: Mapping[str, Any]) -> float:
    """Return the seconds of silence after which a session is given up: two steps."""
    policy: Policy = Part.of(plan.get("policy", "cohort"), where="policy").build("rounds")
    return 2 * max(LONGEST_STEP, policy.deadline or 0.0)


SilentSessions = Mapping[tuple[str, int, int], float]
"""Since when sessions are silent, by run, attempt and mark of the last message."""


def end_silent_sessions(homes: Iterable[tuple[str, RunHome]], before: SilentSessions, now: float) -> SilentSessions:
    """Remove the secrets of sessions that the server left without an end; return since when the others are silent.

    Silence is measured by this process's monotonic clock, so that setting a clock ends no session too early.
    """
    seen: dict[tuple[str, int, int], float] = {}
    for run, home in homes:
        for attempt, mark in home.session_marks().items():
            seen[run, attempt, mark] = since = before.get((run, attempt, mark), now)
            if now - since > longest_silence(home.info().plan):
                home.end_sessions(only=attempt)
    return seen


@dataclass(frozen=True, kw_only=True)
class Addend(ABC):
    """What a client adds in one session, and the rules of that session, which follow from the plan and the floors."""

    agreed: AgreedRun

    @property
    @abstractmethod
    def attempt(self) -> int:
        """Return the number of the task under which the session's messages travel."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what is added, for the owner."""

    @abstractmethod
    def check(self) -> None:
        """Raise WorkRefused unless there is something to add."""

    @abstractmethod
    def begin(self, invite: wire.Invite, info: RunInfo) -> bytes:
        """Return the hash of the session's model; RunError or WorkRefused for any but the one invitation that is due.

        The state machine checks the signature.
        """

    @abstractmethod
    def floors(self, num_clients: int) -> Floors:
        """Return the minimum requirements of a session with so many clients, never by the server's word."""

    @abstractmethod
    def vector(self, encoding: Encoding, max_samples: int) -> np.ndarray:
        """Return the integers to be added."""

    @abstractmethod
    def stepped(self, phase: Phase, session: bytes) -> None:
        """Note that a step of the session was done; called before its answer leaves."""


@dataclass(frozen=True, kw_only=True)
class SecureSession:
    """What a client needs for the secure sums of a run."""

    identity: Ed25519PrivateKey
    server_key: bytes
    info: Callable[[], RunInfo]
    """Returns the server's current description of the run."""
    peers: Callable[[Mapping[str, bytes]], Mapping[int, bytes]]
    """Keys by number as the server announces them -> the keys that this client trusts."""

    def answer(self, addend: Addend, message: Ref, fetch: Fetch) -> bytes:
        """Return the answer to a message; Abort or WorkRefused if the client leaves the session."""
        home, attempt = addend.agreed.home, addend.attempt
        session = home.session(attempt)
        if session is not None and session.heard == message.name and session.answer:
            _note(addend, session)
            return session.answer
        if session == ENDED_SESSION:
            raise WorkRefused(f"the session of attempt {attempt} is over here, and its secrets are gone")
        addend.check()
        state = ClientState() if session is None else load(session.state, ClientState)
        if state.phase in (Phase.DONE, Phase.ABORTED):
            raise WorkRefused(f"the session of attempt {attempt} is {state.phase} here")
        if message.num_bytes > limit(state):
            raise WorkRefused(f"a message of {message.num_bytes:,} bytes, at most {limit(state):,} are due now")
        data = b"".join(fetch(message))
        if session is None:
            session = self._begun(addend, data)
            state = load(session.state, ClientState)
        done = set(session.once)
        machine = self._machine(addend, done, state, data)
        try:
            state, answers = machine.handle(state, data)
            if state.phase is Phase.READY:
                vector = addend.vector(config_of(state).encoding, session.max_samples)
                state, answers = machine.handle(state, Vector(vector))
        except Abort as abort:
            left = SessionState(
                heard=message.name, answer=b"", max_samples=0, state=dump(abort.state), once=tuple(done)
            )
            home.save_session(attempt, left)
            _note(addend, left)
            raise
        [answer] = answers
        session = SessionState(
            heard=message.name,
            answer=answer,
            max_samples=session.max_samples,
            state=dump(state),
            once=tuple(done),
        )
        home.save_session(attempt, session)
        _note(addend, session)
        return answer

    def _begun(self, addend: Addend, data: bytes) -> SessionState:
        """Begin a session, if keys and invitation are those that are due."""
        invite, info = _invite(data), self.info()
        keys = self.peers(info.peers)
        if keys.get(addend.agreed.number) != public_bytes(self.identity):
            raise WorkRefused("the server says another key of this client than it has")
        if len({self.server_key, *keys.values()}) <= len(keys):
            raise WorkRefused(
                "two of the keys that take part are one: somebody would be counted twice; ask the operator"
            )
        state = dump(ClientState(model=addend.begin(invite, info)))
        return SessionState(heard="", answer=b"", max_samples=info.max_samples, state=state, once=())

    def _machine(self, addend: Addend, done: set[bytes], state: ClientState, data: bytes) -> Client:
        """Return the client's state machine.

        Actions that are allowed once are added to `done`, which is saved before an answer leaves."""

        def once(what: bytes) -> bool:
            fresh = what not in done
            done.add(what)
            return fresh

        num_clients = state.cohort_size if state.config else len(wire.read_cohort(_invite(data)))
        return Client(
            client=addend.agreed.number,
            identity=self.identity,
            server_key=self.server_key,
            once=once,
            registry=self.peers({}),
            floors=addend.floors(num_clients),
        )


@final
@dataclass(frozen=True, kw_only=True)
class UpdateAddend(Addend):
    """The update that was trained for an order, under the plan's own secure aggregation."""

    order: Order

    @property
    def attempt(self) -> int:
        """Return the attempt of the order."""
        return self.order.attempt

    @property
    def title(self) -> str:
        """Return the round that it was trained for."""
        return f"round {self.order.version + 1}"

    def check(self) -> None:
        """Refuse an attempt for which there is no update here."""
        self._pending()

    def begin(self, invite: wire.Invite, info: RunInfo) -> bytes:
        """Return the hash of model and largest weights, if the invitation follows from plan, order and update."""
        job, order = self.agreed.job, self.order
        assert job.secure is not None and job.secure.scheme.invite is not None
        if order.share != 1:
            raise WorkRefused(
                f"a share of {order.share:g}: by shares one client could outweigh all others in their sum"
            )
        groups, params = job.secure.settings.groups, bytes.fromhex(self._pending().params)
        place, group = invite.attempt - groups * order.attempt, wire.read_cohort(invite)
        session = session_of(
            job,
            order.run,
            params,
            self.agreed.task(order),
            place,
            group,
            layout_of(job),
            self._largest(info.max_samples),
        )
        due = job.secure.scheme.invite(session)
        if invite.config != due.config:  # it follows from the plan alone, whatever the state of the server
            raise distrust(invite, due)
        if not 0 <= place < groups or invite != due:
            raise WorkRefused("an invitation to add something else than the plan says, or on another model")
        return session.model

    def floors(self, num_clients: int) -> Floors:
        """Return the requirements of the plan and of this client's floors."""
        job, asked = self.agreed.job, self.agreed.floors
        assert job.secure is not None and job.secure.scheme.mode is not None
        insists = asked.secagg or self.agreed.keys_known
        least = max(asked.min_cohort, asked.min_survivors, least_of(job, num_clients))
        in_group = self.agreed.min_cohort // job.secure.settings.groups
        return LEAST._replace(
            mode="active" if insists else job.secure.scheme.mode,
            min_cohort=max(LEAST.min_cohort, least, in_group),
            min_survivors=least,
        )

    def vector(self, encoding: Encoding, max_samples: int) -> np.ndarray:
        """Return the update of this attempt as the vector to be added."""
        job, delivery = self.agreed.job, self._pending().delivery
        like = layout_of(job)
        payload, exact = unpack(self.agreed.home.update(), max_bytes=self.agreed.max_bytes).split(like.exact())
        update = like.rebuilt(payload.carrier, exact)._replace(weight=like.weight.new_tensor(delivery.weight))
        largest = self._largest(max_samples)
        loss = math.nan if delivery.loss is None else delivery.loss
        number = self.agreed.number
        return vector_of(job, update, delivery.num_samples, loss, largest, encoding, self.order.attempt, number)

    def stepped(self, phase: Phase, session: bytes) -> None:
        """Note nothing: the session's own file says enough as long as the update is there."""

    def _pending(self) -> PendingUpdate:
        pending = self.agreed.home.pending()
        if pending is None or pending.attempt != self.order.attempt:
            raise WorkRefused(f"attempt {self.order.attempt} has no update here: nothing can be added")
        return pending

    def _largest(self, max_samples: int) -> Largest:
        """Return the largest weight and number of samples, to which those of clients are relative."""
        mechanism = self.agreed.job.mechanism
        alike = mechanism is not None and mechanism.at_client is not None
        return Largest(1 if alike else max_samples, max_samples)


def distrust(invite: wire.Invite, due: wire.Invite) -> RunError:
    """Return the error of an invitation whose configuration does not follow from what this client agreed to."""
    return RunError(
        f"the server invites to add by {invite.config}, the plan that this client agreed to says {due.config}; "
        "do not trust this server"
    )


def _note(addend: Addend, session: SessionState) -> None:
    state = load(session.state, ClientState)
    addend.stepped(state.phase, state.session)


def _invite(data: bytes) -> wire.Invite:
    """Read the invitation in a message; the state machine checks its signature."""
    return wire.read_body(wire.read_envelope(data, limit(ClientState())), wire.Invite)
