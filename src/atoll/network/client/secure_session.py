"""A client's side of adding in secret: it answers the messages of a session, and never says two things at one step.

What a step changes is written down whole before its answer leaves. Whatever is killed when, a step was not done and
nobody has heard of it, or it was done and its answer is still there to be sent again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.commit.secure_sum import least_of, session_of, vector_of
from atoll.core.coordinator import Policy
from atoll.core.errors import RunError
from atoll.core.parts import Part
from atoll.core.wire import unpack
from atoll.network.client.home import ENDED_SESSION, PendingUpdate, SessionState
from atoll.network.client.task import AgreedRun, Fetch, WorkRefused
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Order, Ref, RunInfo
from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.client import Client
from atoll.secagg.client_state import ClientState, Floors, Phase, Vector, config_of, limit
from atoll.secagg.encoding import Encoding
from atoll.secagg.saved import dump, load
from atoll.train.layout import layout_of
from atoll.train.secure import Largest

LEAST = Floors()
"""What every client insists on."""


LONGEST_STEP = 120.0
"""Seconds that a server waits for one step of a session, where the plan has no deadline."""


def longest_silence(plan: Mapping[str, Any]) -> float:
    """Return the seconds after which a session is given up in which the server has said nothing: two steps."""
    policy: Policy = Part.of(plan.get("policy", "cohort"), where="policy").build("rounds")
    return 2 * max(LONGEST_STEP, policy.deadline or 0.0)


@dataclass(frozen=True, kw_only=True)
class SecureSession:
    """What a client needs to take part in the sums of a run."""

    agreed: AgreedRun
    identity: Ed25519PrivateKey
    server_key: bytes
    info: Callable[[], RunInfo]
    """What the server says of the run now."""
    peers: Callable[[Mapping[str, bytes]], Mapping[int, bytes]]
    """Keys by number, as the server tells them -> those that this client trusts."""

    def answer(self, order: Order, message: Ref, fetch: Fetch) -> bytes:
        """What this client says to a message; Abort or Unwilling if it leaves the session."""
        home = self.agreed.home
        session, pending = home.session(order.attempt), home.pending()
        if session is not None and session.heard == message.name and session.answer:
            return session.answer
        if session == ENDED_SESSION:
            raise WorkRefused(f"the session of attempt {order.attempt} is over here, and its secrets are gone")
        if pending is None or pending.attempt != order.attempt:
            raise WorkRefused(f"attempt {order.attempt} has no update here: nothing can be added")
        state = ClientState() if session is None else load(session.state, ClientState)
        if state.phase in (Phase.DONE, Phase.ABORTED):
            raise WorkRefused(f"the session of attempt {order.attempt} is {state.phase} here")
        if message.num_bytes > limit(state):
            raise WorkRefused(f"a message of {message.num_bytes:,} bytes, at most {limit(state):,} are due now")
        data = b"".join(fetch(message))
        if session is None:
            session = self._begun(order, pending, data)
            state = load(session.state, ClientState)
        done = set(session.once)
        machine = self._machine(done, state, data)
        try:
            state, answers = machine.handle(state, data)
            if state.phase is Phase.READY:
                vector = self._vector(order, pending, config_of(state).encoding, session.max_samples)
                state, answers = machine.handle(state, Vector(vector))
        except Abort as abort:
            home.save_session(order.attempt, SessionState(message.name, b"", 0, dump(abort.state), tuple(done)))
            raise
        [answer] = answers
        home.save_session(
            order.attempt, SessionState(message.name, answer, session.max_samples, dump(state), tuple(done))
        )
        return answer

    def _begun(self, order: Order, pending: PendingUpdate, data: bytes) -> SessionState:
        """A session in which the client waits for this invitation, if that is what the plan leads to."""
        job, number = self.agreed.job, self.agreed.number
        assert job.secure is not None and job.secure.scheme.invite is not None
        invite, info = _invite(data), self.info()
        keys = self.peers(info.peers)
        if keys.get(number) != public_bytes(self.identity):
            raise WorkRefused("the server says another key of this client than it has")
        if len({self.server_key, *keys.values()}) <= len(keys):
            raise WorkRefused(
                "two of the keys that take part are one: somebody would be counted twice; ask the operator"
            )
        if order.share != 1:
            raise WorkRefused(
                f"a share of {order.share:g}: by shares one client could outweigh all others in their sum"
            )
        groups, params = job.secure.settings.groups, bytes.fromhex(pending.params)
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
        if invite.config != due.config:  # it follows from the plan alone: no other server state explains another
            raise RunError(
                f"the server invites to add by {invite.config}, the plan that this client agreed to says {due.config}; "
                "do not trust this server"
            )
        if not 0 <= place < groups or invite != due:
            raise WorkRefused("an invitation to add something else than the plan says, or on another model")
        return SessionState("", b"", info.max_samples, dump(ClientState(model=session.model)), ())

    def _machine(self, done: set[bytes], state: ClientState, data: bytes) -> Client:
        """The client's machine; what it does once is added to `done`, which is on disk before an answer leaves.

        What it insists on follows from the plan and the floors, and not from what the server says."""
        job, asked = self.agreed.job, self.agreed.floors
        assert job.secure is not None and job.secure.scheme.mode is not None
        num_clients = state.cohort_size if state.config else len(wire.read_cohort(_invite(data)))

        def once(what: bytes) -> bool:
            fresh = what not in done
            done.add(what)
            return fresh

        insists = asked.secagg or self.agreed.keys_known
        least = max(asked.min_cohort, asked.min_survivors, least_of(job, num_clients))
        in_group = self.agreed.min_cohort // job.secure.settings.groups
        floors = LEAST._replace(
            mode="active" if insists else job.secure.scheme.mode,
            min_cohort=max(LEAST.min_cohort, least, in_group),
            min_survivors=least,
        )
        return Client(
            client=self.agreed.number,
            identity=self.identity,
            server_key=self.server_key,
            once=once,
            registry=self.peers({}),
            floors=floors,
        )

    def _vector(self, order: Order, pending: PendingUpdate, encoding: Encoding, max_samples: int) -> np.ndarray:
        """The update of this attempt as it is added."""
        job, told = self.agreed.job, pending.delivery
        payload = unpack(self.agreed.home.update(), max_bytes=self.agreed.max_bytes)
        like = layout_of(job)
        update = like.rebuilt(payload.carrier)._replace(weight=like.weight.new_tensor(told.weight))
        largest = self._largest(max_samples)
        loss = math.nan if told.loss is None else told.loss
        return vector_of(job, update, told.num_samples, loss, largest, encoding, order.attempt, self.agreed.number)

    def _largest(self, max_samples: int) -> Largest:
        """What weights and sizes are shares of, where nobody has a share of its own."""
        mechanism = self.agreed.job.mechanism
        alike = mechanism is not None and mechanism.at_client is not None
        return Largest(1 if alike else max_samples, max_samples)


def _invite(data: bytes) -> wire.Invite:
    """The invitation in a message; who signed it is looked at by the machine."""
    return wire.read_body(wire.read_envelope(data, limit(ClientState())), wire.Invite)
