"""Joining records through a folder: each party ends with the common rows, or with an error that the others hear of."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from alignment.test_alignment import BANK, SHOP, TERMS

from atoll.alignment.curve import AlignmentError
from atoll.alignment.envelope import file_name, sealed, way_of
from atoll.alignment.exchange import PAUSES, SETTLED, BegunAnew, Exchange, World, answer, ask, check_names
from atoll.alignment.folder import Folder
from atoll.alignment.ids import read_ids
from atoll.alignment.machines import Answerer, AnswererState, Asker, AskerState, Phase
from atoll.alignment.messages import Terms
from atoll.core.errors import PlanError

pytest.importorskip("private_set_intersection", reason="joining records needs: pip install 'atoll[psi]'")
SECRET = b"32 bytes that the parties agreed"
CLUB = ["P2", "p3", "p4", "p7"]
Act = Callable[[], object]


class Clock:
    """A clock that only a party's waiting moves on; each time that it waits, one act is done."""

    def __init__(self, acts: Sequence[Act] = ()) -> None:
        self.time, self.said, self._acts = 0.0, list[str](), deque(acts)

    def world(self) -> World:
        return World(lambda: self.time, self._sleep, self.said.append)

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds <= PAUSES[1]
        self.time += seconds
        if self._acts:
            self._acts.popleft()()


class ByHand:
    """A party that answers, one message each time that it is told to."""

    def __init__(self, path: Path, name: str = "shop", secret: bytes = SECRET, ids: Sequence[str] = SHOP) -> None:
        self.path, self.name, self.state = path, name, AnswererState()
        self.machine = Answerer(ids=read_ids(ids, "folded", name), terms=TERMS, asker="bank", secret=secret)
        self.exchange = Exchange(Folder(path), name, ["bank"], Clock().world(), secret=secret)

    def answer(self) -> None:
        """Take the next message, which is there, and answer it."""
        _, message = self.exchange.receive({"bank": self.machine.due(self.state)})
        self.state, answers = self.machine.handle(self.state, message)
        for each in answers:
            self.exchange.send("bank", each)

    def file(self, number: int = 1) -> Path:
        """Return where its file of a number lies."""
        return self.path / f"{self.name}-to-bank-{number:03}.atoll"


def asked(
    path: Path, acts: Sequence[Act] = (), others: Sequence[str] = ("shop",), patience: float = 3600.0
) -> tuple[AskerState, Clock]:
    """Let the bank ask, whose waiting does the acts."""
    clock = Clock(acts)
    exchange = Exchange(Folder(path), "bank", others, clock.world(), secret=SECRET, patience=patience)
    asker = Asker(ids=read_ids(BANK, "folded", "bank"), others=others, terms=TERMS, secret=SECRET)
    return ask(asker, exchange), clock


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


@pytest.mark.parametrize("terms", [TERMS, Terms(rule="folded", count_only=True)])
def test_all_parties_end_with_the_same_rows(tmp_path: Path, terms: Terms) -> None:
    world = World(time.monotonic, lambda seconds: time.sleep(min(seconds, 0.002)), lambda text: None)
    states = dict[str, AnswererState]()

    def answers(name: str, ids: Sequence[str]) -> None:
        exchange = Exchange(Folder(tmp_path), name, ["bank"], world, secret=SECRET)
        machine = Answerer(ids=read_ids(ids, "folded", name), terms=terms, asker="bank", secret=SECRET)
        states[name] = answer(machine, exchange)

    threads = [threading.Thread(target=answers, args=each) for each in (("shop", SHOP), ("club", CLUB))]
    for thread in threads:
        thread.start()
    exchange = Exchange(Folder(tmp_path), "bank", ["shop", "club"], world, secret=SECRET)
    asker = Asker(ids=read_ids(BANK, "folded", "bank"), others=["shop", "club"], terms=terms, secret=SECRET)
    state = ask(asker, exchange)
    for thread in threads:
        thread.join(60)
    assert state.sizes == {"shop": 2, "club": 3}
    assert all(each.phase == Phase.DONE for each in states.values())
    if terms.count_only:
        assert state.aligned is None and not any(each.aligned for each in states.values())
        return
    found = {
        "bank": (BANK, state.aligned),
        "shop": (SHOP, states["shop"].aligned),
        "club": (CLUB, states["club"].aligned),
    }
    rows = {tuple(ids[row].strip().lower() for row in aligned.rows) for ids, aligned in found.values() if aligned}
    assert len(rows) == 1 and set(*rows) == {"p2", "p4"}
    assert len({aligned.tag for _, aligned in found.values() if aligned}) == 1
    assert all(way_of(name) for name in names(tmp_path)) and len(names(tmp_path)) == 2 * 7


def written(file: Path, data: bytes) -> Act:
    return lambda: file.write_bytes(data)


def replay(path: Path) -> bytes:
    """Return the first answer of a shop in another session."""
    other = path / "elsewhere"
    other.mkdir()
    shop = ByHand(other)
    with pytest.raises(AlignmentError, match="in vain"):
        asked(other, [shop.answer], patience=1)
    return shop.file().read_bytes()


def wrong_message(shop: ByHand) -> None:
    """Seal what is no message of an alignment."""
    shop.exchange.receive({"bank": shop.machine.due(shop.state)})
    shop.exchange.send("bank", b"rubbish")


def cut_off(shop: ByHand) -> None:
    shop.answer()
    shop.file().write_bytes(shop.file().read_bytes()[:-1])


def anew(shop: ByHand) -> None:
    """Answer the first message once more, as after a kill and the removal of one's own files."""
    shop.file().unlink()
    ByHand(shop.path).answer()


def moved(before: Path, after: Path) -> Act:
    return lambda: before.rename(after)


Acts = Callable[[Path, ByHand], list[Act]]
HOSTILE: dict[str, tuple[Acts, str]] = {
    "a symbolic link": (
        lambda p, s: [s.answer, moved(s.file(), p / "x"), lambda: s.file().symlink_to(p / "x")],
        "shop-to-bank-001.atoll of shop in .* is a symbolic link",
    ),
    "a pipe": (lambda p, s: [lambda: os.mkfifo(s.file())], "is no regular file"),
    "a directory": (lambda p, s: [s.file().mkdir], "is no regular file"),
    "a huge file": (lambda p, s: [written(s.file(), bytes(2049))], "takes 2,049 bytes, at most 2,048 are due"),
    "an empty file": (lambda p, s: [written(s.file(), b"")], r"\(0 bytes\) has no valid seal"),
    "rubbish": (lambda p, s: [written(s.file(), b"rubbish" * 20)], r"\(140 bytes\) has no valid seal"),
    "a file that was cut off": (lambda p, s: [lambda: cut_off(s)], "has no valid seal"),
    "another secret": (lambda p, s: [ByHand(p, secret=b"").answer], "give all the same --secret-file"),
    "another party's file": (
        lambda p, s: [ByHand(p, "club").answer, moved(ByHand(p, "club").file(), s.file())],
        "shop-to-bank-001.atoll of shop was written under another name",
    ),
    "the same file again": (
        lambda p, s: [s.answer, lambda: s.file(2).write_bytes(s.file().read_bytes())],
        "shop-to-bank-002.atoll of shop was written under another name",
    ),
    "a file of an older session": (lambda p, s: [written(s.file(), replay(p))], "is of another session, or answers"),
    "what is no message": (lambda p, s: [lambda: wrong_message(s)], "shop sent what is no message of an alignment"),
    "word that it stops": (lambda p, s: [lambda: s.exchange.folder.stop("shop")], "shop has stopped before the end"),
    "a second first message": (lambda p, s: [s.answer, lambda: anew(s)], "shop has begun anew while bank was in"),
    "a file in the bank's name": (
        lambda p, s: [written(p / "bank-to-shop-002.atoll", b"x"), s.answer],
        "bank-to-shop-002.atoll is in .* before bank wrote it",
    ),
    "nothing": (
        lambda p, s: [], r"waited 1h in vain for shop: its first message \(shop-to-bank-001.atoll\) in .*--patience"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_due_ends_the_session_and_the_others_hear_of_it(tmp_path: Path, name: str) -> None:
    acts, says = HOSTILE[name]
    others = ("shop", "club") if name == "another party's file" else ("shop",)
    with pytest.raises(AlignmentError, match=says):
        asked(tmp_path, acts(tmp_path, ByHand(tmp_path)), others)
    assert "bank-stopped.atoll" in names(tmp_path)
    assert not [each for each in names(tmp_path) if each.endswith(".new")]


def test_a_file_that_is_being_copied_is_waited_for(tmp_path: Path) -> None:
    shop, whole = ByHand(tmp_path), list[bytes]()

    def begin_copy() -> None:
        shop.answer()
        whole.append(shop.file().read_bytes())
        shop.file().write_bytes(whole[0][:50])

    def finish_copy() -> None:
        shop.file().write_bytes(whole[0])

    state, clock = asked(tmp_path, [begin_copy, *[lambda: None] * 3, finish_copy, shop.answer, shop.answer])
    assert state.is_done and state.sizes == {"shop": 2}
    assert [text for text in clock.said if "shop-to-bank-001.atoll is there and not complete" in text]
    shop.answer()  # nothing is left to be said, and it knows
    assert shop.state.phase == Phase.DONE


def test_a_file_that_keeps_its_size_and_time_is_read_again_before_it_is_refused(tmp_path: Path) -> None:
    shop, whole = ByHand(tmp_path), list[tuple[bytes, os.stat_result]]()

    def begin_copy() -> None:
        shop.answer()
        whole.append((shop.file().read_bytes(), shop.file().stat()))
        with shop.file().open("r+b") as file:
            file.write(bytes(60))
        os.utime(shop.file(), ns=(0, 0))

    def finish_copy() -> None:
        with shop.file().open("r+b") as file:
            file.write(whole[0][0])
        os.utime(shop.file(), ns=(0, 0))

    waits: list[Act] = [lambda: None] * 40
    acts = [begin_copy, lambda: None, finish_copy, *waits]
    with pytest.raises(AlignmentError, match="in vain for shop: its answer"):
        asked(tmp_path, acts, patience=SETTLED * 2)


def test_a_share_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    path, away = tmp_path / "share", tmp_path / "away"
    path.mkdir()
    shop = ByHand(path)
    acts = [moved(path, away), lambda: None, moved(away, path), shop.answer, shop.answer, shop.answer]
    state, clock = asked(path, acts)
    assert state.is_done and [text for text in clock.said if "which cannot be read now: No such file" in text]


def test_what_is_waited_for_is_said_again_and_patience_begins_anew_with_each_file(tmp_path: Path) -> None:
    shop, acts = ByHand(tmp_path), list[Act]()
    acts += [*[lambda: None] * 500, shop.answer, *[lambda: None] * 500, shop.answer, shop.answer]
    state, clock = asked(tmp_path, acts, patience=1200)
    assert state.is_done and clock.time > 1500
    first = [text for text in clock.said if "its first message (shop-to-bank-001.atoll)" in text]
    assert len(first) == 2 and 1 < len([text for text in clock.said if "its answer" in text]) < 5


def test_a_party_that_answers_hears_that_the_other_began_anew_and_does_not_end_it(tmp_path: Path) -> None:
    def begin_anew() -> None:
        for each in tmp_path.iterdir():
            each.unlink()
        with pytest.raises(AlignmentError, match="in vain"):
            asked(tmp_path, patience=1)
        (tmp_path / "bank-stopped.atoll").unlink()

    with pytest.raises(AlignmentError, match="in vain"):
        asked(tmp_path, patience=1)
    (tmp_path / "bank-stopped.atoll").unlink()
    clock = Clock([begin_anew])
    exchange = Exchange(Folder(tmp_path), "shop", ["bank"], clock.world(), secret=SECRET)
    machine = Answerer(ids=read_ids(SHOP, "folded", "shop"), terms=TERMS, asker="bank", secret=SECRET)
    with pytest.raises(BegunAnew, match="bank has begun anew while shop was in a session with it"):
        answer(machine, exchange)
    assert names(tmp_path) == {"bank-to-shop-001.atoll"}


def test_a_first_file_that_was_taken_away_or_copied_once_more_is_no_new_session(tmp_path: Path) -> None:
    shop, acts = ByHand(tmp_path), list[Act]()

    def copy_again() -> None:
        data = shop.file().read_bytes()
        shop.file().unlink()
        (tmp_path / "x").write_bytes(data)
        (tmp_path / "x").rename(shop.file())

    def spoil() -> None:
        shop.file().write_bytes(b"not whole")

    acts = [shop.answer, copy_again, lambda: None, spoil, shop.file().unlink, shop.answer, shop.answer]
    assert asked(tmp_path, acts)[0].is_done


LEFT = ["bank-to-shop-001.atoll", "shop-to-bank-001.atoll", ".bank-to-shop-001.atoll.new", "shop-stopped.atoll"]


@pytest.mark.parametrize("left", LEFT)
def test_files_of_an_earlier_session_are_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).touch()
    with pytest.raises(AlignmentError, match=f"holds files of another session: {left}; .*empty the folder"):
        asked(tmp_path)
    assert names(tmp_path) == {left}  # whoever still waits there is not told to stop


def test_many_leftovers_are_counted_and_other_files_are_none(tmp_path: Path) -> None:
    for name in ("readme.txt", "club-to-shop-001.atoll", ".shop-to-bank-001.atoll.new"):
        (tmp_path / name).touch()
    with pytest.raises(AlignmentError, match="in vain"):
        asked(tmp_path, patience=1)
    for number in range(2, 5):
        (tmp_path / f"bank-to-shop-{number:03}.atoll").touch()
    with pytest.raises(AlignmentError, match=r"bank-to-shop-002.atoll and 2 more"):
        asked(tmp_path)


def test_ctrl_c_tells_the_others(tmp_path: Path) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(tmp_path, [press])
    assert names(tmp_path) == {"bank-to-shop-001.atoll", "bank-stopped.atoll"}


NAMES: dict[str, tuple[list[str], str]] = {
    "a path": (["../bank", "shop"], "a party is called '../bank': give each a name of letters"),
    "none": (["bank", ""], "a party is called ''"),
    "long": (["bank", "x" * 65], "at most 64"),
    "to": (["bank", "gone-to-shop"], "'-to-' stands between names of files"),
    "twice": (["bank", "shop", "shop"], "have the same name"),
    "by case alone": (["bank", "Bank"], "differ by case alone"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_cannot_stand_in_names_of_files_are_refused(name: str) -> None:
    (me, *others), says = NAMES[name]
    with pytest.raises(PlanError, match=says):
        check_names(me, others)


def test_every_byte_of_a_file_is_under_the_seal(tmp_path: Path) -> None:
    """Somebody without the secret can change none, and cannot seal a letter of its own."""
    from atoll.alignment.envelope import Letter, Way, opened, seal_key

    letter = Letter(sender="bank", receiver="shop", number=1, follows=b"", message=b"x" * 40)
    file = sealed(letter, seal_key(SECRET))
    assert opened(file, seal_key(SECRET)) == letter and file_name(Way("bank", "shop", 12)) == "bank-to-shop-012.atoll"
    for place in range(len(file)):
        assert opened(file[:place] + bytes([file[place] ^ 1]) + file[place + 1 :], seal_key(SECRET)) is None
    for other in (b"", SECRET[:-1]):
        assert opened(file, seal_key(other)) is None


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
