"""The client's side of split learning: its machine in a session with the server's, over several requests at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.core.messages import Payload, Task
from atoll.core.wire import pieces
from atoll.ledger import signing
from atoll.network.client.connection import Connection
from atoll.network.client.lanes import Lanes
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol import endpoints
from atoll.network.protocol.exchange import SessionEnd
from atoll.network.protocol.messages import Order
from atoll.network.protocol.objects import manifest_of
from atoll.split.exchange import client_side
from atoll.split.half import Half
from atoll.split.joint import joint_load, owners_task, party_side
from atoll.split.machines import ClientMachine, ClientState
from atoll.split.messages import Kind, Message, NotFinite, SplitError
from atoll.split.parties import Parties
from atoll.split.session import Phase
from atoll.train.trainer import explained

MAX_REASON = 1000
"""Characters of a reason that is told."""


def hold_session(
    agreed: AgreedRun, order: Order, connection: Connection, key: Ed25519PrivateKey, note: Callable[[str], None]
) -> int:
    """Hold the session of an order to its end; return the bytes that went up.

    It begins anew whenever it is called: what the server has is not sent again. `note` is called with the name of the
    session's transcript before it leaves. A session that cannot go on here is left with the reason, and WorkRefused.
    """
    codec, session = agreed.own_parties.codec, order.session
    assert session is not None
    task = agreed.task(order)
    machine = _machine(agreed, task)
    layers = agreed.layers_name(order.model, lambda ref: connection.fetch(order.run, ref, agreed.home.objects))
    state, number = ClientState(), 0
    with Lanes(connection, order.run, order.attempt, session, codec.max_bytes) as lanes:
        try:
            with explained():
                while state.phase is not Phase.DONE:
                    message = codec.decode(lanes.receive())
                    if message.kind == Kind.WEIGHTS:
                        _check_weights(agreed, order, layers, message)
                    state, answers = machine.handle(state, message)
                    for answer in answers:
                        lanes.send(codec.encode(answer, task.attempt), number, last=answer.kind == Kind.WEIGHTS)
                    number += 1
            lanes.flush()
        except (SplitError, WorkRefused) as error:
            not_finite = isinstance(error, NotFinite)
            reason = SessionEnd(session=session, reason=str(error)[:MAX_REASON], not_finite=not_finite)
            connection.ask(endpoints.END_SESSION, reason, run=order.run, attempt=order.attempt)
            raise WorkRefused(f"round {order.version + 1}: this client left its session: {error}") from error
    name = lanes.transcript.name()
    note(name)
    end = _signed(agreed, order, name, float(torch.stack(state.losses).mean()) if state.losses else math.nan, key)
    connection.ask(endpoints.END_SESSION, end, run=order.run, attempt=order.attempt)
    return int(lanes.transcript.describe()["up"][1])


def _machine(agreed: AgreedRun, task: Task) -> ClientMachine:
    """Return this client's machine of a task, in whichever way the model is cut."""
    half, parties = Half(agreed.job, agreed.own_parties.cut.client), agreed.parties
    if isinstance(parties, Parties):
        return client_side(parties, task, half)
    assert parties is not None
    num_steps, load = joint_load(parties, owners_task(parties, task))
    return party_side(parties, task, half, num_steps, load, agreed.rows)


def _check_weights(agreed: AgreedRun, order: Order, name: str, message: Message) -> None:
    """Refuse layers that have another name than in the ledger, or that moved farther than the floors allow.

    Where clients train in turn, only the first gets those of the version, and nobody else knows those of the others.
    """
    parties, values = agreed.own_parties, message.values
    if not parties.way.hands_on and manifest_of(*pieces(Payload(values))).name() != name:
        raise WorkRefused("the server sends other layers than its ledger names: do not trust this server")
    agreed.check_change(order.version, values, parties.cut.client.take(agreed.job.first_D))
    if agreed.floors.max_change is not None:
        agreed.home.save_broadcast(order.version, values)


def _signed(agreed: AgreedRun, order: Order, name: str, loss: float, key: Ed25519PrivateKey) -> SessionEnd:
    """Return this client's word at the end of a session, signed."""
    num_samples = agreed.job.federation.num_samples(agreed.number)
    told = None if math.isnan(loss) else loss
    weight, broadcast = float(num_samples), order.model.name
    text = signing.update_text(order.run, order.attempt, order.version, name, num_samples, told, weight, broadcast)
    assert order.session is not None
    return SessionEnd(
        session=order.session,
        transcript=name,
        num_samples=num_samples,
        loss=told,
        weight=weight,
        signature=key.sign(text),
        broadcast=broadcast,
    )
