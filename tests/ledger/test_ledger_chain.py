"""Whatever is done to a ledger, the first record that suffered is named."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from atoll.ledger.chain import EMPTY, Fault, Head, add, read, start, verify

KEY, OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32)), Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
PUBLIC = KEY.public_key().public_bytes_raw()


def ledger(num: int, key: Ed25519PrivateKey = KEY, word: str = "model") -> tuple[list[str], list[Head]]:
    line, head = start({"plan": "ab" * 32}, key)
    lines, heads = [line], [head]
    for number in range(1, num):
        line, head = add(head, "commit", {"version": number, word: f"{number:02x}" * 32, "epsilon": 0.5}, key)
        lines.append(line)
        heads.append(head)
    return lines, heads


def test_what_was_written_holds() -> None:
    lines, heads = ledger(8)
    assert verify(lines) is None and verify(lines, PUBLIC, heads) is None
    record, _ = read(lines[3])
    assert record.number == 3 and record.body["version"] == 3 and Head(4, record.hash()) == heads[3]


@given(st.integers(2, 9), st.data())
def test_any_changed_letter_is_found_where_it_is(num: int, data: st.DataObject) -> None:
    lines, _ = ledger(num)
    place = data.draw(st.integers(0, num - 1))
    at = data.draw(st.integers(0, len(lines[place]) - 1))
    letter = data.draw(st.sampled_from('0123456789abcdef{}": ,') | st.characters(codec="utf-8"))
    changed = lines[place][:at] + letter + lines[place][at + 1 :]
    if changed != lines[place]:
        lines[place] = changed
        fault = verify(lines, PUBLIC)
        assert fault is not None and fault.number == place


@given(st.integers(3, 9), st.data())
def test_a_dropped_record_is_named(num: int, data: st.DataObject) -> None:
    lines, heads = ledger(num)
    place = data.draw(st.integers(0, num - 1))
    fault = verify(lines[:place] + lines[place + 1 :], PUBLIC, heads)
    assert fault is not None and fault.number == place and "was dropped" in fault.what


@given(st.integers(3, 9), st.data())
def test_the_first_of_two_moved_records_is_named(num: int, data: st.DataObject) -> None:
    lines, _ = ledger(num)
    one, two = sorted(data.draw(st.lists(st.integers(0, num - 1), min_size=2, max_size=2, unique=True)))
    lines[one], lines[two] = lines[two], lines[one]
    fault = verify(lines, PUBLIC)
    assert fault is not None and fault.number == one and "was moved" in fault.what


def test_the_end_can_be_cut_off_only_where_nobody_looked() -> None:
    lines, heads = ledger(6)
    assert verify(lines[:4], PUBLIC) is None
    assert verify(lines[:4], PUBLIC, [heads[1], heads[3]]) is None
    assert verify(lines[:4], PUBLIC, [heads[4]]) == Fault(4, "was dropped: somebody has seen 5 records")


def test_a_history_that_was_written_anew_is_not_the_one_that_was_seen() -> None:
    lines, heads = ledger(5)
    forged, _ = ledger(5, word="modem")
    assert verify(forged, PUBLIC) is None
    fault = verify(forged, PUBLIC, heads[2:])
    assert fault is not None and fault.number == 2
    fault = verify(lines[:3] + forged[3:], PUBLIC)
    assert fault is not None and fault.number == 3 and "does not follow" in fault.what


def test_another_key_is_another_server() -> None:
    lines, _ = ledger(4, OTHER)
    assert verify(lines) is None
    assert verify(lines, PUBLIC) == Fault(0, "was changed: its signature does not hold")


@pytest.mark.parametrize(
    "lines",
    [[], [""], ["null"], ["[]"], ["{}"], ["nonsense"], ["[" * 10_000], ['{"number":0}'], [ledger(2)[0][1]]],
)
def test_what_is_no_ledger_is_said_to_be_none(lines: list[str]) -> None:
    assert verify(lines) is not None


def test_numbers_that_json_cannot_say_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        add(EMPTY, "commit", {"epsilon": float("nan")}, KEY)
