"""The client's side of secure aggregation: answers the messages of a session, each step once.

The state after a step is saved before its answer leaves. After a kill, a step either was not done and is unknown to
the server, or was done and its saved answer is sent again.
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


@dataclass(frozen=True, kw_only=True)
class SecureSession:
    """What a client needs for the secure sums of a run."""

    agreed: AgreedRun
    identity: Ed25519PrivateKey
    server_key: bytes
    info: Callable[[], RunInfo]
    """Returns the server's current description of the run."""
    peers: Callable[[Mapping[str, bytes]], Mapping[int, bytes]]
    """Keys by number as the server announces them -> the keys that this client trusts."""

    def answer(self, order: Order, message: Ref, fetch: Fetch) -> bytes:
        """Return the answer to a message; Abort or WorkRefused if the client leaves the session."""
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
            left = SessionState(
                heard=message.name, answer=b"", max_samples=0, state=dump(abort.state), once=tuple(done)
            )
            home.save_session(order.attempt, left)
            raise
        [answer] = answers
        session = SessionState(
            heard=message.name,
            answer=answer,
            max_samples=session.max_samples,
            state=dump(state),
            once=tuple(done),
        )
        home.save_session(order.attempt, session)
        return answer

    def _begun(self, order: Order, pending: PendingUpdate, data: bytes) -> SessionState:
        """Begin a session, if the invitation follows from the plan."""
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
        if invite.config != due.config:  # it follows from the plan alone, whatever the state of the server
            raise RunError(
                f"the server invites to add by {invite.config}, the plan that this client agreed to says {due.config}; "
                "do not trust this server"
            )
        if not 0 <= place < groups or invite != due:
            raise WorkRefused("an invitation to add something else than the plan says, or on another model")
        state = dump(ClientState(model=session.model))
        return SessionState(heard="", answer=b"", max_samples=info.max_samples, state=state, once=())

    def _machine(self, done: set[bytes], state: ClientState, data: bytes) -> Client:
        """Return the client's state machine, with requirements from the plan and the floors, never from the server.

        Actions that are allowed once are added to `done`, which is saved before an answer leaves."""
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
        """Return the update of this attempt as the vector to be added."""
        job, delivery = self.agreed.job, pending.delivery
        like = layout_of(job)
        payload, exact = unpack(self.agreed.home.update(), max_bytes=self.agreed.max_bytes).split(like.exact())
        update = like.rebuilt(payload.carrier, exact)._replace(weight=like.weight.new_tensor(delivery.weight))
        largest = self._largest(max_samples)
        loss = math.nan if delivery.loss is None else delivery.loss
        return vector_of(job, update, delivery.num_samples, loss, largest, encoding, order.attempt, self.agreed.number)

    def _largest(self, max_samples: int) -> Largest:
        """Return the largest weight and number of samples, to which those of clients are relative."""
        mechanism = self.agreed.job.mechanism
        alike = mechanism is not None and mechanism.at_client is not None
        return Largest(1 if alike else max_samples, max_samples)


def _invite(data: bytes) -> wire.Invite:
    """Read the invitation in a message; the state machine checks its signature."""
    return wire.read_body(wire.read_envelope(data, limit(ClientState())), wire.Invite)
