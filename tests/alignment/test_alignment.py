"""Joining records: the right rows in one order, nothing else learnt, and every broken message has a clear end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.alignment.curve import POINT, AlignmentError, in_order
from atoll.alignment.ids import read_ids, salted
from atoll.alignment.local import align
from atoll.alignment.machines import Answerer, AnswererState, Asker, AskerState, Phase, committed_tag, must_be_same
from atoll.alignment.messages import Answer, Chosen, Committed, Done, Hello, Request, Terms, decode, encode
from atoll.alignment.workers import spread_over
from atoll.cli.main import app
from atoll.core.errors import DataError

psi = pytest.importorskip("private_set_intersection", reason="joining records needs: pip install 'atoll[psi]'")
TERMS = Terms(rule="folded", count_only=False)
COUNT = Terms(rule="folded", count_only=True)
BANK = ["P1", "P2", "P3", "P4"]
SHOP = ["p4 ", "p9", "p2"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(0, 25), min_size=1, unique=True), min_size=2, max_size=4), st.randoms())
def test_all_parties_get_the_common_rows_in_one_order(sets: list[list[int]], rng: random.Random) -> None:
    common = set.intersection(*map(set, sets))
    tables = {f"party {number}": [f"id {each}" for each in ids] for number, ids in enumerate(sets)}
    if not common:
        with pytest.raises(AlignmentError, match="no id is held by all"):
            align(tables, "party 0")
        return
    found = align(tables, "party 0")
    rows = {name: [tables[name][row] for row in aligned.rows] for name, aligned in found.aligned.items()}
    assert set(rows["party 0"]) == {f"id {each}" for each in common}
    assert len({tuple(each) for each in rows.values()}) == 1
    assert len({aligned.tag for aligned in found.aligned.values()}) == 1
    assert found.sizes == {f"party {n}": len(set(sets[0]) & set(s)) for n, s in enumerate(sets) if n}


def test_the_order_is_no_partys_own_and_another_in_every_session() -> None:
    ids = [f"id {number}" for number in range(40)]
    orders = [align({"a": ids, "b": ids[::-1]}, "a").aligned["a"].rows for _ in range(2)]
    assert sorted(orders[0]) == list(range(40)) and orders[0] != orders[1] and list(orders[0]) != list(range(40))


def test_work_is_shared_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.alignment.curve.PART", 20)
    a, b = ([f"id {number}" for number in range(start, start + 90)] for start in (0, 45))
    with spread_over(2) as spread:
        assert align({"a": a, "b": b}, "a", spread=spread).sizes == {"b": 45}
        assert align({"a": a, "b": b}, "a", spread=spread, count_only=True).sizes == {"b": 45}


def test_only_the_number_is_learnt_where_no_more_is_wanted() -> None:
    found = align({"a": BANK, "b": SHOP}, "a", count_only=True)
    assert found.sizes == {"b": 2} and not found.aligned
    _, asked = talk(COUNT)
    assert [type(message) for _, message in asked] == [Hello, Hello, Request, Answer, Done]
    answer = asked[3][1]
    assert isinstance(answer, Answer)
    points = [answer.asked[start : start + POINT] for start in range(0, len(answer.asked), POINT)]
    assert points == sorted(points)  # so that no place says which id it is


def test_an_answerer_does_not_open_ids_where_only_the_number_was_agreed() -> None:
    """A request that would reveal the intersection is refused by the terms, before any point is sent."""
    with pytest.raises(AlignmentError, match="wants the common ids, this party only the number"):
        answerer(COUNT).handle(AnswererState(), hello())


Spoken = list[tuple[str, object]]


def asker(terms: Terms = TERMS, ids: list[str] | None = None, **more: object) -> Asker:
    return Asker(ids=read_ids(ids or BANK, "folded", "bank"), others=["shop"], terms=terms, **more)  # type: ignore[arg-type]


def answerer(terms: Terms = TERMS, ids: list[str] | None = None, **more: object) -> Answerer:
    return Answerer(ids=read_ids(ids or SHOP, "folded", "shop"), terms=terms, asker="bank", **more)  # type: ignore[arg-type]


def hello(terms: Terms = TERMS) -> bytes:
    [(_, data)] = asker(terms).begin()[1]
    return data


def talk(
    terms: Terms = TERMS,
    change: Callable[[str, bytes], bytes] = lambda who, data: data,
    one: Asker | None = None,
    other: Answerer | None = None,
) -> tuple[tuple[AskerState, AnswererState], Spoken]:
    """Let both sides talk; `change` is somebody between them."""
    one, other = one or asker(terms), other or answerer(terms)
    state, sent = one.begin()
    answering, spoken = AnswererState(), list[tuple[str, object]]()
    kind = msgspec.msgpack.Decoder(Hello | Request | Answer | Chosen | Committed | Done)
    while sent:
        data = change("bank", sent.pop(0)[1])
        answering, answers = other.handle(answering, data)
        spoken.append(("bank", kind.decode(data)))
        for answer in answers:
            answer = change("shop", answer)
            state, more = one.handle(state, "shop", answer)
            spoken.append(("shop", kind.decode(answer)))
            sent += more
    return (state, answering), spoken


def test_both_sides_end_and_messages_name_no_id() -> None:
    ids = [f"patient number {number:06}" for number in range(8)]
    heard = list[bytes]()

    def hear(who: str, data: bytes) -> bytes:
        heard.append(data)
        return data

    one, other = asker(ids=ids), answerer(ids=ids[4:])
    (state, answering), spoken = talk(change=hear, one=one, other=other)
    assert state.is_done and answering.phase == Phase.DONE and answering.aligned is not None
    salt = spoken[0][1].salt  # type: ignore[attr-defined]
    whole = b"".join(heard)
    for each, hashed in zip(ids, salted(ids, salt), strict=True):
        assert each.encode() not in whole and hashed.encode() not in whole and bytes.fromhex(hashed) not in whole
    assert state.aligned is not None and state.aligned.key not in whole


def flipped(data: bytes, kind: type, **fields: object) -> bytes:
    """Return a message with other fields, if it is of a kind."""
    message = msgspec.msgpack.decode(data, type=Hello | Request | Answer | Chosen | Committed | Done)
    return encode(msgspec.structs.replace(message, **fields)) if isinstance(message, kind) else data


def points(number: int) -> bytes:
    return b"".join(bytes([2, *number.to_bytes(2, "big"), *bytes(30)]) for number in range(number))


HOSTILE: dict[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "asks with more ids than it told of": (lambda w, d: flipped(d, Request, points=points(5)), "132 bytes|5|told"),
    "asks with fewer ids": (lambda w, d: flipped(d, Request, points=points(3)), "99 bytes, 132 are due"),
    "asks with an id twice": (lambda w, d: flipped(d, Request, points=points(1) * 4), "name an id twice"),
    "asks with what is no point": (lambda w, d: flipped(d, Request, points=points(4)), "no points of the curve"),
    "answers with another number": (lambda w, d: flipped(d, Answer, own=points(2)), "66 bytes, 99 are due"),
    "answers for fewer": (lambda w, d: flipped(d, Answer, asked=points(3)), "99 bytes, 132 are due"),
    "answers with what is no point": (lambda w, d: flipped(d, Answer, asked=points(4)), "no points of the curve"),
    "has no id in common": (lambda w, d: flipped(d, Answer, own=points(3)), "no id is held by all"),
    "tells of no ids": (lambda w, d: flipped(d, Hello, num_ids=0), "says that it has 0 ids"),
    "tells of too many": (lambda w, d: flipped(d, Hello, num_ids=10**9), "raise max_ids"),
    "tells of fewer ids": (lambda w, d: flipped(d, Hello, num_ids=1), "are due"),
    "compares by another rule": (
        lambda w, d: flipped(d, Hello, terms=Terms(rule="exact", count_only=False)), "say the same at all"),
    "is of another version": (
        lambda w, d: flipped(d, Hello, terms=Terms(version=9, rule="folded", count_only=False)), "version 9"),
    "sends no public key": (lambda w, d: flipped(d, Hello, public_key=b"x"), "a public key that is none"),
    "sends a weak public key": (lambda w, d: flipped(d, Hello, public_key=bytes(32)), "a public key that is none"),
    "changes the salt": (lambda w, d: flipped(d, Hello, salt=b"x"), "salt of 1 bytes"),
    "changes the common rows": (
        lambda w, d: flipped(d, Chosen, sealed=bytes(80)), "cannot be opened"),
    "commits to other rows": (lambda w, d: flipped(d, Committed, tag=bytes(32)), "in another order"),
    "sends garbage": (lambda w, d: b"\x93garbage", "no message of an alignment"),
    "sends nothing": (lambda w, d: b"", "no message of an alignment"),
    "sends far too much": (lambda w, d: bytes(10_000), "10,000 bytes, at most"),
    "sends what is not due": (lambda w, d: encode(Done()), "done while"),
}  # fmt: skip


@pytest.mark.parametrize("who", ["bank", "shop"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_party_that_breaks_the_protocol_ends_it_clearly(name: str, who: str) -> None:
    change, says = HOSTILE[name]
    own = {"asks": "bank", "answers": "shop", "has": "shop", "commits": "shop"}.get(name.split()[0], who)
    own = {"changes the salt": "bank", "changes the common rows": "bank"}.get(name, own)
    with pytest.raises(AlignmentError, match=says):
        talk(change=lambda sender, data: change(sender, data) if sender == own else data)


def test_a_broken_message_changes_no_state() -> None:
    one = asker()
    state, _ = one.begin()
    with pytest.raises(AlignmentError):
        one.handle(state, "shop", b"x")
    with pytest.raises(AlignmentError, match="from whom nothing is due"):
        one.handle(state, "club", b"x")
    assert state.others["shop"].phase == Phase.HELLO
    other = answerer()
    answering, [answer] = other.handle(AnswererState(), hello())
    with pytest.raises(AlignmentError):
        other.handle(answering, b"x")
    assert answering.phase == Phase.REQUEST
    after, _ = one.handle(state, "shop", answer)
    with pytest.raises(AlignmentError, match="answer is due"):
        one.handle(after, "shop", answer)


def test_a_secret_binds_the_parties() -> None:
    (state, _), _ = talk(one=asker(secret=b"agreed"), other=answerer(secret=b"agreed"))
    assert state.is_done
    with pytest.raises(AlignmentError, match="give all parties the same secret"):
        talk(one=asker(secret=b"agreed"), other=answerer(secret=b"another"))


def test_somebody_between_who_changes_a_first_message_is_found() -> None:
    """Each side's key is bound to both first messages, as they were sent and as they came."""
    other = Terms(rule="folded", count_only=False)
    seen = list[bytes]()

    def change(who: str, data: bytes) -> bytes:
        if who == "bank" and not seen:
            seen.append(data)
            return flipped(data, Hello, terms=other, salt=bytes(32))
        return data

    with pytest.raises(AlignmentError):
        talk(change=change)


def test_ids_are_read_by_one_rule() -> None:
    assert read_ids([" Ä1", "b"], "folded", "x") == ["ä1", "b"] and read_ids([" A"], "exact", "x") == [" A"]
    for texts, says in [
        (["a", "A"], "rows 1 and 2"), (["a", " "], "no id in row 2"), ([], "has 0 ids"), (["a"] * 3, "rows 1 and 2"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=says):
            read_ids(texts, "folded", "bank")
    with pytest.raises(DataError, match="no rule 'soundex'"):
        read_ids(["a"], "soundex", "bank")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="1 to 2 are allowed"):
        read_ids(["a", "b", "c"], "folded", "bank", max_ids=2)


def test_commitments_tell_orders_apart() -> None:
    key, ids = bytes(32), ["a", "b", "c"]
    must_be_same({"one": committed_tag(key, ids), "two": committed_tag(key, list(ids))})
    for wrong in (["b", "a", "c"], ["a", "b"], ["a", "b", "d"]):
        with pytest.raises(AlignmentError, match="rows of two are not those of one"):
            must_be_same({"one": committed_tag(key, ids), "two": committed_tag(key, wrong)})
    assert committed_tag(bytes([1]) * 32, ids) != committed_tag(key, ids)
    assert in_order(len, ["ab", "c"]) == [2, 1]
    assert isinstance(decode(encode(Done()), Done, 0, "x"), Done)


def written(path: Path, ids: list[str]) -> Path:
    path.write_text("patient,age\n" + "".join(f"{each},{number}\n" for number, each in enumerate(ids)))
    return path


def atoll(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["align", *map(str, words)])
    error = f"{done.exception}" if done.exception else ""
    assert (done.exit_code == 0) == (code == 0), done.output + error
    return done.output + error


def test_the_command_writes_aligned_tables_and_checks_them(tmp_path: Path) -> None:
    bank = written(tmp_path / "bank.csv", [f"P{n}" for n in (5, 1, 4, 2)])
    shop = written(tmp_path / "shop.csv", [f" p{n}" for n in (4, 7, 5)])
    out = tmp_path / "aligned"
    said = atoll(bank, shop, "--column", "patient", "--out", out, "--workers", 1)
    assert "shop: 3 ids, 2 in common with the 4 of bank" in said
    tables = [out / "bank.csv", out / "shop.csv"]
    ids = [[line.split(",")[0].strip().lower() for line in path.read_text().splitlines()[1:]] for path in tables]
    assert ids[0] == ids[1] and set(ids[0]) == {"p4", "p5"}
    assert (out / "bank.alignment.json").stat().st_mode & 0o777 == 0o600
    assert "same rows in the same order" in atoll("--check", *tables)
    assert "is not empty" in atoll(bank, shop, "--column", "patient", "--out", out, code=3)
    head, first, second = tables[1].read_text().splitlines()
    tables[1].write_text("\n".join([head, second, first]) + "\n")
    assert "in another order" in atoll("--check", *tables, code=3)
    tables[1].write_text("\n".join([head, first]) + "\n")
    assert "1 rows now, 2 then" in atoll("--check", *tables, code=3)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    bank, shop = (written(tmp_path / f"{name}.csv", ids) for name, ids in (("bank", BANK), ("shop", SHOP)))
    assert "2 in common" in atoll(bank, shop, "--column", "patient", "--count", "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()
    assert "nothing to align with" in atoll(bank, "--column", "patient", code=2)
    assert "--column is given 0 times" in atoll(bank, shop, code=2)
    assert "no column 'pateint': did you mean 'patient'" in atoll(bank, shop, "--column", "pateint", code=3)
    assert "cannot be read" in atoll(bank, tmp_path / "none.csv", "--column", "patient", code=3)
    broken = tmp_path / "broken.csv"
    broken.write_text("patient,age\nP1\n")
    assert "1 values in row 1" in atoll(bank, broken, "--column", "patient", code=3)
    (tmp_path / "bank.alignment.json").write_text("{}")
    assert "not what atoll align writes" in atoll("--check", bank, code=3)
