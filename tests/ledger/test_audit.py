"""Whatever is done to a ledger, by others or by the server itself, the first record that suffered is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.telling import CLIENTS, RUN, SERVER, Body, Told, commit, counted, digest, public, told, written

from atoll.ledger.audit import Findings, Signer, audit
from atoll.ledger.chain import Fault
from atoll.ledger.signing import client_id, plan_hash

Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The way to every plain value within JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if isinstance(each, dict | list) and each:
            yield from leaves(each, (*path, key))
        else:
            yield (*path, key)


def changed(value: Any, path: Path, to: Any) -> Any:
    """A copy in which one value is another."""
    found = copy.deepcopy(value)
    *way, last = path
    place = found
    for key in way:
        place = place[key]
    place[last] = to
    return found


def other(value: Any) -> Any:
    """Something of the same type that is not the same."""
    if isinstance(value, bool) or value is None:
        return 1.5
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return ("1" if value[:1] == "0" else "0") + value[1:]
    return [*value, 0] if isinstance(value, list) else {**value, "more": 0}


LINES, HEADS = written(told())
FIELDS = [(place, path) for place, line in enumerate(LINES) for path in leaves(json.loads(line))]


def test_an_honest_ledger_says_who_did_what() -> None:
    ids = [client_id(public(key)) for key in CLIENTS]
    assert audit(LINES, public(SERVER), HEADS) == Findings(
        run=RUN,
        server_key=public(SERVER).hex(),
        head=HEADS[-1],
        rounds=4,
        abandoned=1,
        rejected=2,
        signers=(Signer(0, ids[0], 3), Signer(1, ids[1], 2), Signer(2, ids[2], 2)),
        ended="all rounds done",
        epsilon=0.5,
    )
    going_on = audit(LINES[:4])
    assert isinstance(going_on, Findings) and going_on.ended is None and going_on.rounds == 2


@pytest.mark.parametrize(("place", "path"), FIELDS, ids=lambda value: str(value).replace(" ", ""))
def test_every_field_is_sealed(place: int, path: Path) -> None:
    record = json.loads(LINES[place])
    value = record
    for key in path:
        value = value[key]
    line = json.dumps(changed(record, path, other(value)), sort_keys=True, separators=(",", ":"))
    fault = audit([*LINES[:place], line, *LINES[place + 1 :]], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == place


@pytest.mark.parametrize("place", range(len(LINES)))
def test_dropped_and_moved_records_are_named(place: int) -> None:
    fault = audit(LINES[:place] + LINES[place + 1 :], public(SERVER), HEADS)
    assert isinstance(fault, Fault) and fault.number == place and "dropped" in fault.what
    if place:
        fault = audit([*LINES[: place - 1], LINES[place], LINES[place - 1], *LINES[place + 1 :]], public(SERVER))
        assert isinstance(fault, Fault) and fault.number == place - 1 and "moved" in fault.what


FREE = {"seconds", "reason", "why", "rejected", "epsilon", "plan", "server_key"}
"""What a server may say of itself, and is believed only as far as its signature goes."""
LATER = ("run", "model", "rule", "client")
"""What is found to be a lie where another record contradicts it."""


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (place, path[1:])
        for place, path in FIELDS
        if path[0] == "body" and not FREE & set(path) and path[1:] != ("attempt",)  # any that rises may be true
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_server_that_signs_a_lie_is_found_out(place: int, path: Path) -> None:
    story = told()
    kind, body = story[place]
    value: Any = body
    for key in path:
        value = value[key]
    story[place] = kind, changed(body, path, other(value))
    fault = audit(written(story)[0], public(SERVER))
    assert isinstance(fault, Fault)
    assert fault.number == place or (path[-1] in LATER and place < fault.number <= place + 2)


def forged(place: int, change: Callable[[Body], object]) -> Told:
    """An honest story with one record that was told otherwise, and signed so."""
    story = copy.deepcopy(told())
    change(story[place][1])
    return story


@pytest.mark.parametrize(
    ("story", "number", "says"),
    [
        ([*told()[:3], ("party", {})], 3, "kind that there is not"),
        (told()[1:], 0, "none begins"),
        ([*told(), told()[-2]], 7, "follows the end"),
        ([*told()[:2], told()[0]], 2, "within another"),
        ([*told()[:2], commit(3, 2, [])], 2, "makes version 3"),
        ([*told()[:4], ("abandon", {"attempt": 2, "why": "", "rejected": []})], 4, "was over"),
        (forged(3, lambda body: body.update(rule="median")), 3, "aggregates by 'median'"),
        (forged(3, lambda body: body.update(epsilon=0.1)), 3, "epsilon 0.1, but 0.125"),
        (forged(3, lambda body: body.update(epsilon=None)), 3, "epsilon None"),
        (forged(3, lambda body: body.update(attempt=1)), 3, "attempt 1, but 1 was over"),
        (forged(0, lambda body: body.update(server_key="00" * 32)), 0, "another key"),
        (forged(0, lambda body: body["plan"].update(rounds=5)), 0, "plan hash"),
        (forged(4, lambda body: body["cohort"].append(counted(1, 1, 2))), 4, "client 1 twice for attempt 2"),
        (
            forged(4, lambda body: body["cohort"].append(counted(0, 0, 0))),
            4,
            "client 0 for attempt 0, after it was counted for 3",
        ),
        (forged(4, lambda body: body["cohort"].append(counted(2, 3, 3))), 4, "yet to come"),
        (forged(4, lambda body: body["cohort"][0].pop("signature")), 4, "client 0 without its signature"),
        (forged(4, lambda body: body["cohort"][0].pop("loss")), 4, "without all that it signed"),
        (forged(4, lambda body: body["cohort"][0].update(weight=1e6)), 4, "signature that does not hold"),
        (forged(4, lambda body: body["cohort"].append({**counted(2, 2, 3), "client": 7})), 4, "key of another"),
        (forged(4, lambda body: body["cohort"].append({**counted(2, 2, 3), "client": 1})), 4, "another key than"),
        (forged(4, lambda body: body["cohort"][0].update(id="0" * 32)), 4, "id that is not"),
        (forged(4, lambda body: body.pop("before")), 4, "must hold"),
        (forged(6, lambda body: body.update(model=digest("mine"))), 6, "another version or model"),
    ],
)
def test_a_story_that_cannot_be_true_is_refused(story: Told, number: int, says: str) -> None:
    fault = audit(written(story)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == number and says in fault.what


def test_added_in_secret_there_are_no_single_updates() -> None:
    lines, heads = written(told(secret=True))
    found = audit(lines, public(SERVER), heads)
    assert isinstance(found, Findings) and found.rounds == 4 and len(found.signers) == 3
    story = told(secret=True)
    story[1] = commit(1, 0, [counted(0, 0, 0), counted(1, 0, 0)])
    fault = audit(written(story)[0])
    assert isinstance(fault, Fault) and fault.number == 1 and "in secret" in fault.what


def test_who_took_part_may_be_sealed_where_privacy_rests_on_it() -> None:
    seal = {"cohort": [], "rejected": [], "sealed": "ab" * 32}
    story = [(kind, {**body, **seal} if kind == "commit" else body) for kind, body in told()]
    fault = audit(written(story)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 1 and "does not ask" in fault.what
    plan = {**story[0][1]["plan"], "privacy": {"name": "central"}}
    story[0][1].update(plan=plan, plan_hash=plan_hash(plan))
    found = audit(written(story)[0], public(SERVER))
    assert isinstance(found, Findings) and found.signers == () and found.rounds == 4
    story[2][1]["sealed"] = "ab" * 32
    fault = audit(written(story)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 2 and "all the same" in fault.what


def test_a_lie_before_a_break_is_the_first_bad_record() -> None:
    lines, _ = written(forged(3, lambda body: body.update(rule="median")))
    fault = audit([*lines[:5], lines[6]], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 3


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
def test_rubbish_that_a_server_signs_is_judged_and_breaks_nothing(data: st.DataObject) -> None:
    story = told()
    place = data.draw(st.integers(0, len(story) - 1))
    kind, body = story[place]
    if data.draw(st.integers(0, 9)) == 0:
        kind = data.draw(st.sampled_from(["start", "end", "commit", "\ud800", ""]))
    path = data.draw(st.sampled_from(list(leaves(body))))
    to = data.draw(PLAIN | st.sampled_from([10**400, -1, 1 << 64, "\ud800", 1e308, "ab" * 32]))
    story[place] = kind, changed(body, path, to)
    if place == 0 and data.draw(st.booleans()):
        story[0][1]["plan_hash"] = plan_hash(story[0][1]["plan"]) if isinstance(story[0][1]["plan"], dict) else ""
    assert isinstance(audit(written(story)[0], public(SERVER)), Findings | Fault)
