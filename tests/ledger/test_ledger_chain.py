"""Test that the first changed, dropped or moved record of a ledger is named."""

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


def test_an_unchanged_ledger_is_valid() -> None:
    lines, heads = ledger(8)
    assert verify(lines) is None and verify(lines, PUBLIC, heads) is None
    record, _ = read(lines[3])
    assert record.number == 3 and record.body["version"] == 3 and Head(4, record.hash()) == heads[3]


@given(st.integers(2, 9), st.data())
def test_a_changed_letter_is_found_in_its_record(num: int, data: st.DataObject) -> None:
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


def test_a_truncated_ledger_contradicts_later_heads() -> None:
    lines, heads = ledger(6)
    assert verify(lines[:4], PUBLIC) is None
    assert verify(lines[:4], PUBLIC, [heads[1], heads[3]]) is None
    assert verify(lines[:4], PUBLIC, [heads[4]]) == Fault(4, "was dropped: 5 records were seen before")


def test_a_rewritten_ledger_contradicts_recorded_heads() -> None:
    lines, heads = ledger(5)
    forged, _ = ledger(5, word="modem")
    assert verify(forged, PUBLIC) is None
    fault = verify(forged, PUBLIC, heads[2:])
    assert fault is not None and fault.number == 2
    fault = verify(lines[:3] + forged[3:], PUBLIC)
    assert fault is not None and fault.number == 3 and "does not follow" in fault.what


def test_a_ledger_signed_with_another_key_is_invalid() -> None:
    lines, _ = ledger(4, OTHER)
    assert verify(lines) is None
    assert verify(lines, PUBLIC) == Fault(0, "was changed: its signature is invalid")


@pytest.mark.parametrize(
    "lines",
    [[], [""], ["null"], ["[]"], ["{}"], ["nonsense"], ["[" * 10_000], ['{"number":0}'], [ledger(2)[0][1]]],
)
def test_text_that_is_not_a_ledger_is_invalid(lines: list[str]) -> None:
    assert verify(lines) is not None


def test_numbers_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        add(EMPTY, "commit", {"epsilon": float("nan")}, KEY)
