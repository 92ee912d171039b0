"""Test that the first record of a ledger that was changed, or that contradicts the others, is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.honest_ledger import (
    CLIENTS,
    RUN,
    SERVER,
    Body,
    Records,
    commit,
    counted,
    digest,
    honest_records,
    public,
    signed_lines,
)

from atoll.ledger.audit import Findings, Signer, audit
from atoll.ledger.chain import Fault
from atoll.ledger.signing import client_id, plan_hash

Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every plain value within JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, dict | list) and item:
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def changed(value: Any, path: Path, to: Any) -> Any:
    """Return a copy in which the value at a path is replaced."""
    result = copy.deepcopy(value)
    *parents, last = path
    place = result
    for key in parents:
        place = place[key]
    place[last] = to
    return result


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool) or value is None:
        return 1.5
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return ("1" if value[:1] == "0" else "0") + value[1:]
    return [*value, 0] if isinstance(value, list) else {**value, "more": 0}


LINES, HEADS = signed_lines(honest_records())
FIELDS = [(place, path) for place, line in enumerate(LINES) for path in leaves(json.loads(line))]


def test_an_honest_ledger_is_summarised() -> None:
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
    unfinished = audit(LINES[:4])
    assert isinstance(unfinished, Findings) and unfinished.ended is None and unfinished.rounds == 2


@pytest.mark.parametrize(("place", "path"), FIELDS, ids=lambda value: str(value).replace(" ", ""))
def test_a_change_of_any_field_is_detected(place: int, path: Path) -> None:
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
"""Fields that only the server knows, and that nothing else in the ledger contradicts."""
LATER = ("run", "model", "rule", "client")
"""Fields that only a later record contradicts."""


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (place, path[1:])
        for place, path in FIELDS
        if path[0] == "body" and not FREE & set(path) and path[1:] != ("attempt",)  # any that rises may be true
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_false_record_is_detected_although_the_server_signed_it(place: int, path: Path) -> None:
    records = honest_records()
    kind, body = records[place]
    value: Any = body
    for key in path:
        value = value[key]
    records[place] = kind, changed(body, path, other(value))
    fault = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(fault, Fault)
    assert fault.number == place or (path[-1] in LATER and place < fault.number <= place + 2)


def forged(place: int, change: Callable[[Body], object]) -> Records:
    """Return honest records of which one is changed before signing."""
    records = copy.deepcopy(honest_records())
    change(records[place][1])
    return records


@pytest.mark.parametrize(
    ("records", "number", "says"),
    [
        ([*honest_records()[:3], ("party", {})], 3, "unknown kind"),
        (honest_records()[1:], 0, "must start the run"),
        ([*honest_records(), honest_records()[-2]], 7, "follows the end"),
        ([*honest_records()[:2], honest_records()[0]], 2, "second run"),
        ([*honest_records()[:2], commit(3, 2, [])], 2, "makes version 3"),
        ([*honest_records()[:4], ("abandon", {"attempt": 2, "why": "", "rejected": []})], 4, "has ended before"),
        (forged(3, lambda body: body.update(rule="median")), 3, "aggregates by 'median'"),
        (forged(3, lambda body: body.update(epsilon=0.1)), 3, "epsilon 0.1, but 0.125"),
        (forged(3, lambda body: body.update(epsilon=None)), 3, "epsilon None"),
        (forged(3, lambda body: body.update(attempt=1)), 3, "attempt 1, but attempt 1 has ended"),
        (forged(0, lambda body: body.update(server_key="00" * 32)), 0, "another key"),
        (forged(0, lambda body: body["plan"].update(rounds=5)), 0, "plan hash"),
        (forged(4, lambda body: body["cohort"].append(counted(1, 1, 2))), 4, "client 1 twice for attempt 2"),
        (
            forged(4, lambda body: body["cohort"].append(counted(0, 0, 0))),
            4,
            "client 0 for attempt 0, after it was counted for 3",
        ),
        (forged(4, lambda body: body["cohort"].append(counted(2, 3, 3))), 4, "did not exist yet"),
        (forged(4, lambda body: body["cohort"][0].pop("signature")), 4, "client 0 without its signature"),
        (forged(4, lambda body: body["cohort"][0].pop("weight")), 4, "without all signed fields"),
        (forged(4, lambda body: body["cohort"][0].pop("loss")), 4, "invalid signature"),
        (forged(4, lambda body: body["cohort"][0].update(weight=1e6)), 4, "invalid signature"),
        (forged(4, lambda body: body["cohort"].append({**counted(2, 2, 3), "client": 7})), 4, "key of another"),
        (forged(4, lambda body: body["cohort"].append({**counted(2, 2, 3), "client": 1})), 4, "another key than"),
        (forged(4, lambda body: body["cohort"][0].update(id="0" * 32)), 4, "id that is not"),
        (forged(4, lambda body: body.pop("before")), 4, "does not have the fields"),
        (forged(6, lambda body: body.update(model=digest("mine"))), 6, "another version or model"),
    ],
)
def test_contradictory_records_are_refused(records: Records, number: int, says: str) -> None:
    fault = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == number and says in fault.what


def test_single_updates_are_refused_under_secure_aggregation() -> None:
    lines, heads = signed_lines(honest_records(secret=True))
    findings = audit(lines, public(SERVER), heads)
    assert isinstance(findings, Findings) and findings.rounds == 4 and len(findings.signers) == 3
    records = honest_records(secret=True)
    records[1] = commit(1, 0, [counted(0, 0, 0), counted(1, 0, 0)])
    fault = audit(signed_lines(records)[0])
    assert isinstance(fault, Fault) and fault.number == 1 and "secure aggregation" in fault.what


def test_the_cohort_may_be_sealed_if_the_plan_is_private() -> None:
    seal = {"cohort": [], "rejected": [], "sealed": "ab" * 32}
    records = [(kind, {**body, **seal} if kind == "commit" else body) for kind, body in honest_records()]
    fault = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 1 and "does not ask" in fault.what
    plan = {**records[0][1]["plan"], "privacy": {"name": "central"}}
    records[0][1].update(plan=plan, plan_hash=plan_hash(plan))
    findings = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(findings, Findings) and findings.signers == () and findings.rounds == 4
    records[2][1]["sealed"] = "ab" * 32
    fault = audit(signed_lines(records)[0], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 2 and "lists sealed" in fault.what


def test_a_false_record_before_a_dropped_one_is_named() -> None:
    lines, _ = signed_lines(forged(3, lambda body: body.update(rule="median")))
    fault = audit([*lines[:5], lines[6]], public(SERVER))
    assert isinstance(fault, Fault) and fault.number == 3


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
def test_random_signed_values_never_crash_the_audit(data: st.DataObject) -> None:
    records = honest_records()
    place = data.draw(st.integers(0, len(records) - 1))
    kind, body = records[place]
    if data.draw(st.integers(0, 9)) == 0:
        kind = data.draw(st.sampled_from(["start", "end", "commit", "\ud800", ""]))
    path = data.draw(st.sampled_from(list(leaves(body))))
    to = data.draw(PLAIN | st.sampled_from([10**400, -1, 1 << 64, "\ud800", 1e308, "ab" * 32]))
    records[place] = kind, changed(body, path, to)
    if place == 0 and data.draw(st.booleans()):
        records[0][1]["plan_hash"] = plan_hash(records[0][1]["plan"]) if isinstance(records[0][1]["plan"], dict) else ""
    assert isinstance(audit(signed_lines(records)[0], public(SERVER)), Findings | Fault)
