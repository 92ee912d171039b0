"""One party of an alignment, which exchanges files with the others through a folder; the clock is passed in.

Each pair of parties writes in turns, so that the number of the next file is known, and so is how long it may be. A
session is not resumed: its keys are in memory alone. A party that stops before the end says so by a file, so that the
others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from atoll.alignment.curve import AlignmentError
from atoll.alignment.envelope import BESIDE, STOPPED, Letter, Way, file_name, hash_of, opened, seal_key, sealed
from atoll.alignment.folder import Folder, Stamp
from atoll.alignment.machines import Answerer, AnswererState, Asker, AskerState, Due, Phase
from atoll.alignment.messages import most_bytes
from atoll.core.errors import PlanError
from atoll.core.split import NAME

DAY = 86_400.0
SETTLED = 30.0
"""Seconds after which a file that cannot be opened, and does not change, is an error; until then it may be copied."""
PAUSES = 0.05, 2.0
"""Seconds between two looks into the folder: at first, and at most."""
SAID_AGAIN = 600.0
"""Seconds after which what is waited for is said again."""
AGAIN = "let all parties stop, empty the folder or choose another, and begin anew"


class BegunAnew(AlignmentError):
    """Another party has begun a new session while this one waited in the old one."""


class World(NamedTuple):
    """What the exchange needs beside files."""

    now: Callable[[], float]
    """Seconds of a clock that never goes back."""
    sleep: Callable[[float], None]
    say: Callable[[str], None]
    """Print what is waited for."""


@dataclass
class _Pair:
    """What went to and fro between this party and another one."""

    sent: int = 0
    received: int = 0
    last: bytes = b""
    """Hash of the last file, whoever wrote it."""
    first: tuple[Stamp, bytes] | None = None
    """The first file that was read, and its hash."""
    unread: tuple[Stamp, float] | None = None
    """A file that could not be opened, and since when it has been as it is."""


class Exchange:
    """The files of one session between a party and those that it speaks with."""

    def __init__(
        self,
        folder: Folder,
        me: str,
        others: Sequence[str],
        world: World,
        *,
        secret: bytes = b"",
        patience: float = DAY,
    ) -> None:
        check_names(me, others)
        self.folder, self.me, self._world, self._patience = folder, me, world, patience
        self._key, self._pairs, self._trouble = seal_key(secret), {name: _Pair() for name in others}, ""

    @contextmanager
    def session(self, asker: str) -> Iterator[None]:
        """Refuse files of an earlier session; tell the others if this one ends before its end."""
        leftovers = self.folder.leftovers(self.me, asker)
        if leftovers:
            more = f" and {len(leftovers) - 3} more" if len(leftovers) > 3 else ""
            raise AlignmentError(
                f"{self.folder.path} holds files of another session: {', '.join(leftovers[:3])}{more}; a session that "
                f"was interrupted cannot go on, and a new one must not mix with it: {AGAIN}"
            )
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            if self.me == asker or not isinstance(error, BegunAnew):  # the asking party's new session must not stop
                self.folder.stop(self.me)
            raise

    def send(self, name: str, message: bytes) -> None:
        """Write the next file to a party."""
        pair = self._pairs[name]
        pair.sent += 1
        letter = Letter(sender=self.me, receiver=name, number=pair.sent, follows=pair.last, message=message)
        file = sealed(letter, self._key)
        self.folder.write(Way(self.me, name, pair.sent), file)
        pair.last = hash_of(file)

    def receive(self, due: Mapping[str, Due]) -> tuple[str, bytes]:
        """Wait for the next message of any of these parties; return whose it is, and the message."""
        began, said, said_at, pause = self._world.now(), "", 0.0, PAUSES[0]
        while True:
            self._trouble = ""
            try:
                for name, each in due.items():
                    message = self._message(name, each)
                    if message is not None:
                        return name, message
                for name in self._pairs:
                    self._must_go_on(name)
            except OSError as error:  # a share may be away for a while
                self._trouble = f", which cannot be read now: {error.strerror}"
            now, waits = self._world.now(), self._waits(due)
            if now - began >= self._patience:
                raise AlignmentError(
                    f"{self.me} waited {duration(self._patience)} in vain for {waits}: ask who is to send it whether "
                    f"atoll align runs there, with these names and this folder; then {AGAIN}, or raise --patience"
                )
            if waits != said or now - said_at >= SAID_AGAIN:
                self._world.say(f"{self.me} waits for {waits}")
                said, said_at = waits, now
            self._world.sleep(min(pause, began + self._patience - now))
            pause = min(pause * 1.5, PAUSES[1])

    def _waits(self, due: Mapping[str, Due]) -> str:
        """Return what is waited for, in words."""
        each = [f"{name}: {one.what} ({file_name(self._next(name))})" for name, one in due.items()]
        return f"{', '.join(each)} in {self.folder.path}{self._trouble}"

    def _next(self, name: str) -> Way:
        return Way(name, self.me, self._pairs[name].received + 1)

    def _message(self, name: str, due: Due) -> bytes | None:
        """Return the message that is due from a party, if it is there as a whole."""
        file = self._file(name, due.most + BESIDE)
        if file is None:
            return None
        way, pair = self._next(name), self._pairs[name]
        stamp, data, letter = file
        if (letter.sender, letter.receiver, letter.number) != way:
            raise AlignmentError(
                f"{file_name(way)} of {name} was written under another name, as another message: let nobody rename or "
                f"copy files within the folder; {AGAIN}"
            )
        if letter.follows != pair.last:
            raise AlignmentError(
                f"{file_name(way)} of {name} is of another session, or answers another file than the one that "
                f"{self.me} wrote: {AGAIN}"
            )
        pair.received, pair.last, pair.unread = way.number, hash_of(data), None
        pair.first = pair.first or (stamp, pair.last)
        return letter.message

    def _file(self, name: str, most: int) -> tuple[Stamp, bytes, Letter] | None:
        """Return the next file of a party; None while there is none, or what is there may be half copied."""
        way, pair, now = self._next(name), self._pairs[name], self._world.now()
        stamp = self.folder.stamp(way, most)
        if stamp is None:
            pair.unread = None
            return None
        since = pair.unread[1] if pair.unread is not None and pair.unread[0] == stamp else None
        settled = since is not None and now - since >= SETTLED
        if since is None or settled:
            data = self.folder.read(way, stamp.size)
            letter = opened(data, self._key)
            if letter is not None:
                return stamp, data, letter
        if settled:
            raise AlignmentError(
                f"{file_name(way)} of {name} ({stamp.size:,} bytes) has no valid seal: it is no file of atoll align, "
                "was cut off or changed on its way, or the parties have not the same secret: give all the same "
                f"--secret-file, and copy files as a whole; {AGAIN}"
            )
        pair.unread = stamp, now if since is None else since
        self._trouble = f"; {file_name(way)} is there and not complete"
        return None

    def _must_go_on(self, name: str) -> None:
        """Refuse to wait for a party that has stopped, or has begun anew."""
        if self.folder.has_stopped(name):
            raise AlignmentError(
                f"{name} has stopped before the end ({name}{STOPPED} is in {self.folder.path}): ask there why; then "
                f"{AGAIN}"
            )
        pair, way = self._pairs[name], Way(name, self.me, 1)
        if pair.first is None:
            return
        stamp = self.folder.stamp(way, most_bytes(0) + BESIDE)
        if stamp is None or stamp == pair.first[0]:
            return  # whoever carries files may take it away once it was read
        data = self.folder.read(way, stamp.size)
        if opened(data, self._key) is None:
            return
        if hash_of(data) != pair.first[1]:
            raise BegunAnew(f"{name} has begun anew while {self.me} was in a session with it: {AGAIN}")
        pair.first = stamp, pair.first[1]


def ask(asker: Asker, exchange: Exchange) -> AskerState:
    """Run the asking party to its end; return its last state, which has the common rows."""
    with exchange.session(exchange.me):
        state, sent = asker.begin()
        while True:
            for name, message in sent:
                exchange.send(name, message)
            if state.is_done:
                return state
            name, message = exchange.receive(asker.due(state))
            state, sent = asker.handle(state, name, message)


def answer(answerer: Answerer, exchange: Exchange) -> AnswererState:
    """Run an answering party to its end; return its last state, which has the common rows."""
    with exchange.session(answerer.asker):
        state = AnswererState()
        while state.phase != Phase.DONE:
            name, message = exchange.receive({answerer.asker: answerer.due(state)})
            state, answers = answerer.handle(state, message)
            for each in answers:
                exchange.send(name, each)
        return state


def check_names(me: str, others: Sequence[str]) -> None:
    """Refuse names of parties that cannot stand in names of files, or are not told apart."""
    names = [me, *others]
    for name in names:
        if not NAME.fullmatch(name):
            raise PlanError(
                f"a party is called {name!r}: give each a name of letters, digits, '_' and '-', at most 64, e.g. bank"
            )
        if "to" in name.split("-"):
            raise PlanError(f"a party is called '{name}', and '-to-' stands between names of files: write it otherwise")
    if len({name.casefold() for name in names}) < len(names):
        raise PlanError(
            f"two of the parties {', '.join(names)} have the same name, or names that differ by case alone: give each "
            "another"
        )


def duration(seconds: float) -> str:
    """Return a time in the largest unit that it is a whole number of.

    >>> duration(86_400), duration(5_400), duration(0.5)
    ('1d', '90m', '0.5s')
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"
