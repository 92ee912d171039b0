"""Tests of a cheating server: every honest client aborts, and its messages reveal no vector."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats
from secagg.harness import MODEL, Federation, answer, federation, identity, invite, public, run, vectors

from atoll.core.errors import PlanError
from atoll.secagg import client_state as c
from atoll.secagg import masks, tree, wire
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import ClientState, Floors, Vector
from atoll.secagg.keys import own_mask_seed
from atoll.secagg.server import Close, Out, Phase, ServerState


class Rig:
    """An honest federation that is run up to a phase, from which on the test acts as the server."""

    def __init__(self, fed: Federation, until: Phase) -> None:
        self.fed, self.inputs = fed, vectors(fed)
        self.states: dict[int, ClientState] = {n: client.begin(MODEL) for n, client in fed.clients.items()}
        self.said: dict[int, bytes] = {}
        self.state, out = fed.server.open(fed.invite)
        self.out = list(out)
        while self.state.phase is not until:
            self.deliver(self.out)
            self.state, later = fed.server.handle(self.state, Close(self.state.phase))
            self.out = list(later)

    def deliver(self, out: list[Out]) -> None:
        for number, data in out:
            self.states[number], replies = answer(
                self.fed.clients[number], self.states[number], data, self.inputs[number]
            )
            for reply in replies:
                self.said[number] = reply
                self.state, _ = self.fed.server.handle(self.state, reply)

    def lie(self, message: wire.AnyMessage) -> bytes:
        """Sign any message as the server."""
        return wire.encode(wire.sign(identity(-1), wire.SERVER, self.state.session, message))

    def refused(self, number: int, data: bytes) -> Reason:
        """Check that the client aborts, and that its state holds no secret."""
        with pytest.raises(Abort) as abort:
            self.fed.clients[number].handle(self.states[number], data)
        assert abort.value.state == ClientState(phase=c.Phase.ABORTED, session=self.states[number].session)
        return abort.value.reason


def body(data: bytes) -> wire.AnyMessage:
    return wire.read_body(wire.read_envelope(data, 1 << 30), wire.Message)


def survivors(rig: Rig, *gone: int) -> wire.Survivors:
    """Return the survivor set without some clients."""
    return wire.Survivors(wire.pack_bits(np.array([n not in gone for n in rig.state.roster])))


def test_both_shares_of_a_peer() -> None:
    """The server asks for the share of a peer's own mask, then, as if it were lost, for that of its key."""
    rig = Rig(federation(5, dropouts=0.2), Phase.CONSENT)
    victim = rig.state.roster[0]
    rig.deliver(rig.out)  # all consent that the victim survived
    for number in rig.state.roster[1:]:
        assert rig.refused(number, rig.lie(survivors(rig, victim))) is Reason.UNEXPECTED
    rig.state, out = rig.fed.server.handle(rig.state, Close(rig.state.phase))
    rig.deliver(list(out))  # all reveal
    for number in rig.state.roster[1:]:
        assert rig.refused(number, rig.lie(survivors(rig, victim))) is Reason.UNEXPECTED
        assert not rig.states[number].held


def test_both_shares_of_a_peer_from_a_client_that_crashed() -> None:
    """A client that restarts from an older state still knows that it accepted survivors."""
    rig = Rig(federation(5, dropouts=0.2), Phase.CONSENT)
    victim, before = rig.state.roster[0], dict(rig.states)
    rig.deliver(rig.out)
    rig.states = before
    for number in rig.state.roster[1:]:
        assert rig.refused(number, rig.lie(survivors(rig, victim))) is Reason.INCONSISTENT


def test_split_survivor_sets() -> None:
    """Half the clients are told that one was lost: no client finds enough consents to its own set."""
    rig = Rig(federation(6, dropouts=0.2), Phase.CONSENT)
    roster, consents = rig.state.roster, {}
    victim, misled = roster[0], roster[1:4]
    for number in roster:
        message = survivors(rig, victim) if number in misled else survivors(rig)
        rig.states[number], (reply,) = rig.fed.clients[number].handle(rig.states[number], rig.lie(message))
        consents[number] = wire.read_envelope(reply, 1 << 20).signature
    for number in roster:
        peers = [n for n in roster if n != number]
        same = [n for n in peers if (n in misled) == (number in misled)]
        everybody = wire.Consents(wire.pack_bits(np.ones(5, bool)), b"".join(consents[n] for n in peers))
        agreeing = wire.Consents(
            wire.pack_bits(np.array([n in same for n in peers])), b"".join(consents[n] for n in same)
        )
        assert rig.refused(number, rig.lie(everybody)) is Reason.BAD_SIGNATURE
        assert rig.refused(number, rig.lie(agreeing)) is Reason.INCONSISTENT


def test_a_client_refuses_a_survivor_set_without_itself() -> None:
    rig = Rig(federation(5, dropouts=0.2), Phase.CONSENT)
    for number in rig.state.roster:
        assert rig.refused(number, rig.lie(survivors(rig, number))) is Reason.INCONSISTENT


def test_survivor_that_never_shared() -> None:
    fed = federation(5, dropouts=0.2)
    rig = Rig(fed, Phase.SHARE)
    absent = rig.state.roster[2]
    rig.deliver([out for out in rig.out if out.client != absent])
    rig.state, out = fed.server.handle(rig.state, Close(Phase.SHARE))
    rig.deliver(list(out))
    for number in rig.state.roster:
        if number != absent:
            assert rig.refused(number, rig.lie(survivors(rig))) is Reason.INCONSISTENT


def test_too_few_survivors() -> None:
    rig = Rig(federation(6, dropouts=0.2), Phase.CONSENT)
    gone = rig.state.roster[1:4]
    assert rig.refused(rig.state.roster[0], rig.lie(survivors(rig, *gone))) is Reason.TOO_FEW


@pytest.mark.parametrize("num", [5, 70])
def test_forged_key(num: int) -> None:
    """The server puts keys of its own in the place of a client's, under a root that fits."""
    fed = federation(num, dropouts=0.2)
    rig = Rig(fed, Phase.SHARE)
    victim = rig.state.roster[1]
    for forger in (identity(-1), identity(-7)):
        advert = wire.Advert(*(forger.public_key().public_bytes_raw() for _ in range(3)))
        signature = wire.sign(forger, victim, rig.state.session, advert).signature
        adverts = {**rig.state.adverts, victim: wire.record(victim, advert, signature)}
        levels = tree.build([adverts[n] for n in rig.state.roster])
        forged = rig.state._replace(adverts=adverts, root=tree.root(levels, num))
        for number, data in fed.server._rosters(forged, levels):
            if number == victim:
                assert rig.refused(number, data) is Reason.BAD_ROSTER  # its own advert is missing
            elif adverts[victim] in body(data).records:
                assert rig.refused(number, data) is Reason.BAD_SIGNATURE


def test_keys_that_are_not_under_the_root() -> None:
    rig = Rig(federation(5, dropouts=0.2), Phase.SHARE)
    for number, data in rig.out:
        roster = body(data)
        for bad in (
            msgspec.structs.replace(roster, records=roster.records[::-1]),
            msgspec.structs.replace(roster, root=bytes(32)),
            msgspec.structs.replace(roster, index=(roster.index + 1) % 5),
            msgspec.structs.replace(roster, num_clients=6),
            msgspec.structs.replace(roster, proofs=roster.proofs[:-32]),
        ):
            assert rig.refused(number, rig.lie(bad)) is Reason.BAD_ROSTER


def test_key_of_low_order() -> None:
    """A colluding client's useless keys are refused even with its good signature."""
    fed = federation(4, dropouts=0.2)
    rig = Rig(fed, Phase.ADVERTISE)
    colluder, *honest = fed.clients
    rig.deliver([out for out in rig.out if out.client != colluder])
    advert = wire.Advert(bytes(32), bytes(32), bytes(32))
    data = wire.encode(wire.sign(identity(colluder), colluder, rig.state.session, advert))
    rig.state, _ = fed.server.handle(rig.state, data)
    rig.state, out = fed.server.handle(rig.state, Close(Phase.ADVERTISE))
    for number, message in out:
        if number in honest:
            assert rig.refused(number, message) is Reason.BAD_KEY


def test_unregistered_sybils_are_refused() -> None:
    fed = federation(4, dropouts=0.2)
    padded = invite((*fed.clients, 1001, 1002, 1003), fed.config)
    fooled = replace(fed, server=replace(fed.server, registry={**fed.server.registry, 1001: b"", 1002: b"", 1003: b""}))
    _, out = fooled.server.open(padded)
    for number, data in out:
        if number in fed.clients:
            with pytest.raises(Abort) as abort:
                fed.clients[number].handle(fed.clients[number].begin(MODEL), data)
            assert abort.value.reason is Reason.UNKNOWN_SENDER


def test_replayed_session() -> None:
    """The same invitation a second time, and old messages in a new session."""
    fed = federation(4, dropouts=0.2)
    old = Rig(fed, Phase.SHARE)
    _, out = fed.server.open(fed.invite)
    for number, data in out:
        with pytest.raises(Abort) as abort:
            fed.clients[number].handle(fed.clients[number].begin(MODEL), data)
        assert abort.value.reason is Reason.KEYS_SPENT
    new = Rig(replace(fed, invite=msgspec.structs.replace(fed.invite, attempt=1)), Phase.SHARE)
    for number, data in old.out:
        assert new.refused(number, data) is Reason.WRONG_SESSION
    for (number, data), (_, fresh) in zip(old.out, new.out, strict=True):
        mixed = msgspec.structs.replace(body(fresh), records=body(data).records)
        assert new.refused(number, new.lie(mixed)) is Reason.BAD_ROSTER


def test_adverts_of_another_session_do_not_pass_under_a_new_root() -> None:
    fed = federation(4, dropouts=0.2)
    old = Rig(fed, Phase.SHARE)
    new = Rig(replace(fed, invite=msgspec.structs.replace(fed.invite, attempt=1)), Phase.SHARE)
    for number in new.state.roster:
        adverts = {**old.state.adverts, number: new.state.adverts[number]}
        levels = tree.build([adverts[n] for n in new.state.roster])
        forged = new.state._replace(adverts=adverts, root=tree.root(levels, 4))
        data = dict(fed.server._rosters(forged, levels))[number]
        assert new.refused(number, data) is Reason.BAD_SIGNATURE


def test_second_vector() -> None:
    """Keys mask one vector, ever: neither a second event nor an older state gets another one."""
    fed = federation(3)
    rig = Rig(fed, Phase.INPUT)
    for number, data in rig.out:
        client = fed.clients[number]
        ready, _ = client.handle(rig.states[number], data)
        masked, _ = client.handle(ready, Vector(rig.inputs[number]))
        assert not masked.own_secret
        assert not masked.mask_private
        for state, reason in ((masked, Reason.UNEXPECTED), (ready, Reason.KEYS_SPENT)):
            with pytest.raises(Abort) as abort:
                client.handle(state, Vector(rig.inputs[number]))
            assert abort.value.reason is reason


def test_second_roster() -> None:
    """Shares are sealed once: a client that starts again from an older state seals no others under the same keys."""
    rig = Rig(federation(3), Phase.SHARE)
    for number, data in rig.out:
        rig.fed.clients[number].handle(rig.states[number], data)
        assert rig.refused(number, data) is Reason.KEYS_SPENT


def test_shares_for_another_client_are_refused() -> None:
    rig = Rig(federation(4, dropouts=0.2), Phase.INPUT)
    boxes = dict(rig.out)
    for number in boxes:
        other = next(n for n in boxes if n != number)
        assert rig.refused(number, boxes[other]) is Reason.BAD_SHARE


def test_mailbox_that_hides_most_neighbours() -> None:
    """A client does not mask with fewer neighbours than the threshold."""
    rig = Rig(federation(6, dropouts=0.2), Phase.INPUT)
    for number, data in rig.out:
        few = wire.Mailbox(wire.pack_bits(np.arange(5) < 2), body(data).sealed[: 2 * wire.SEALED])
        assert rig.refused(number, rig.lie(few)) is Reason.TOO_FEW


def test_changed_model() -> None:
    fed = federation(4)
    other = msgspec.structs.replace(fed.invite, model=bytes(32))
    for number, data in fed.server.open(other)[1]:
        with pytest.raises(Abort) as abort:
            fed.clients[number].handle(fed.clients[number].begin(MODEL), data)
        assert abort.value.reason is Reason.WRONG_MODEL


def test_invitation_under_another_name() -> None:
    """The session's name cannot hide what it is for."""
    fed = federation(4)
    state, _ = fed.server.open(fed.invite)
    other = msgspec.structs.replace(fed.invite, round=9)
    data = wire.encode(wire.sign(identity(-1), wire.SERVER, state.session, other))
    for client in fed.clients.values():
        with pytest.raises(Abort) as abort:
            client.handle(client.begin(MODEL), data)
        assert abort.value.reason is Reason.WRONG_SESSION


@pytest.mark.parametrize(
    ("floors", "reason"),
    [
        (Floors(min_cohort=6), Reason.SMALL_COHORT),
        (Floors(min_threshold=5), Reason.LOW_THRESHOLD),
        (Floors(min_colluding=0.3), Reason.WRONG_MODE),
        (Floors(min_survivors=6), Reason.TOO_FEW),
    ],
)
def test_floors(floors: Floors, reason: Reason) -> None:
    fed = federation(5, floors=floors, dropouts=0.2)
    with pytest.raises(Abort) as abort:
        run(fed, vectors(fed))
    assert abort.value.reason is reason


def test_weaker_mode() -> None:
    fed = federation(5, mode="curious", floors=Floors(mode="active"))
    with pytest.raises(Abort) as abort:
        run(fed, vectors(fed))
    assert abort.value.reason is Reason.WRONG_MODE


def test_cohort_that_shrinks_after_the_invitation() -> None:
    """Five clients are asked, and the server claims that only two sent keys."""
    fed = federation(5, floors=Floors(min_cohort=4), dropouts=0.2)
    rig = Rig(fed, Phase.ADVERTISE)
    rig.deliver(rig.out)
    few = {n: rig.state.adverts[n] for n in list(fed.clients)[:3]}
    _, out = fed.server.handle(rig.state._replace(adverts=few), Close(Phase.ADVERTISE))
    for number, data in out:
        assert rig.refused(number, data) is Reason.SMALL_COHORT


def test_messages_not_signed_by_the_server_are_refused() -> None:
    fed = federation(3)
    fake = replace(fed.server, identity=identity(-99))
    for number, data in fake.open(fed.invite)[1]:
        with pytest.raises(Abort) as abort:
            fed.clients[number].handle(fed.clients[number].begin(MODEL), data)
        assert abort.value.reason is Reason.BAD_SIGNATURE


def test_active_mode_needs_a_registry() -> None:
    with pytest.raises(PlanError, match="registry"):
        Client(client=1, identity=identity(1), server_key=public(-1), once=in_memory())


# Clients that cheat


def test_one_client_cannot_send_for_another() -> None:
    fed = federation(3)
    rig = Rig(fed, Phase.ADVERTISE)
    a, b, _ = fed.clients
    rig.states[a], (advert,) = fed.clients[a].handle(rig.states[a], dict(rig.out)[a])
    stolen = wire.encode(msgspec.structs.replace(wire.read_envelope(advert, 1 << 20), sender=b))
    for data, reason in ((stolen, Reason.BAD_SIGNATURE), (advert, None), (advert, Reason.DUPLICATE)):
        if reason is None:
            rig.state, _ = fed.server.handle(rig.state, data)
            continue
        with pytest.raises(Abort) as abort:
            fed.server.handle(rig.state, data)
        assert abort.value.reason is reason
        assert abort.value.state == rig.state


def test_false_shares_are_detected_and_nothing_is_opened() -> None:
    fed = federation(3)
    rig = Rig(fed, Phase.UNMASK)
    rig.deliver(rig.out)
    liar = min(rig.state.reveals)
    reveals = {**rig.state.reveals, liar: bytes(len(rig.state.reveals[liar]))}
    with pytest.raises(Abort) as abort:
        fed.server.handle(rig.state._replace(reveals=reveals), Close(Phase.UNMASK))
    assert abort.value.reason is Reason.BAD_SHARE
    assert abort.value.state == ServerState(Phase.ABORTED, rig.state.session, fed.invite)


def test_consent_to_other_survivors() -> None:
    fed = federation(3)
    rig = Rig(fed, Phase.CONSENT)
    number = rig.state.roster[0]
    data = wire.encode(wire.sign(identity(number), number, rig.state.session, wire.Consent(bytes(32))))
    with pytest.raises(Abort) as abort:
        fed.server.handle(rig.state, data)
    assert abort.value.reason is Reason.INCONSISTENT


# What the server sees


def masked_inputs(fed: Federation, values: Callable[[int], np.ndarray]) -> dict[int, np.ndarray]:
    rig = Rig(fed, Phase.INPUT)
    rig.inputs = {n: values(n) for n in fed.clients}
    rig.deliver(rig.out)
    return {n: np.frombuffer(body(data).vector, fed.config.dtype) for n, data in rig.said.items()}


@pytest.mark.parametrize("mode", ["curious", "active"])
def test_masked_vectors_look_uniform(mode: str) -> None:
    fed = federation(4, mode=mode, length=100_000)
    seen = masked_inputs(fed, lambda n: np.zeros(100_000, "<u4"))
    for values in seen.values():
        counts = np.bincount(values.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-9
    vectors = list(seen.values())
    for one, other in itertools.pairwise(vectors):
        difference = np.bincount((one - other).view(np.uint8), minlength=256)
        assert stats.chisquare(difference).pvalue > 1e-9


def test_two_sessions_share_no_mask() -> None:
    fed = federation(3, length=1000)
    again = replace(fed, invite=msgspec.structs.replace(fed.invite, attempt=1))
    first = masked_inputs(fed, lambda n: np.zeros(1000, "<u4"))
    second = masked_inputs(again, lambda n: np.zeros(1000, "<u4"))
    for number in fed.clients:
        assert (first[number] == second[number]).mean() < 0.01


def test_revealed_shares_leave_every_vector_masked() -> None:
    """With all that it was given, the server can take off own masks; the masks between clients stay on each vector."""
    fed = federation(3, mode="curious", length=100_000)
    rig = Rig(fed, Phase.INPUT)
    rig.inputs = {n: np.zeros(100_000, "<u4") for n in fed.clients}
    secrets = {n: state.own_secret for n, state in rig.states.items()}
    rig.deliver(rig.out)
    for number, data in rig.said.items():
        values = np.frombuffer(body(data).vector, "<u4").copy()
        masks.apply(values, [masks.Mask(own_mask_seed(secrets[number], rig.state.session), False)])
        counts = np.bincount(values.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-9
