"""Tokens and sessions of the live page: what opens it, and what does not any more."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from atoll.core.errors import RunError
from atoll.network.server.access import FILE, MAX_GUESSES, Access, GuessLimit, Role
from atoll.network.server.auth import Refused


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(tmp_path: Path, clock: Clock) -> Access:
    return Access(tmp_path, clock)


def test_a_token_opens_a_session_with_its_name_and_role(access: Access) -> None:
    text, token = access.add("Dr. Li", Role.VIEWER, 3600)
    cookie, session = access.sign_in(text)
    again = access.session(cookie)
    assert again == session and (again.name, again.role, again.token) == ("Dr. Li", Role.VIEWER, token.id)
    with pytest.raises(Refused, match="may look on"):
        session.require(Role.OPERATOR)


def test_a_link_opens_one_browser_only(access: Access) -> None:
    text, _ = access.add("a", Role.VIEWER, 3600)
    access.sign_in(text)
    with pytest.raises(Refused, match="used before"):
        access.sign_in(text)
    local, _ = access.add("this machine", Role.OPERATOR, 3600, reusable=True)
    assert access.sign_in(local)[1].id != access.sign_in(local)[1].id


def test_sessions_begin_anew_each_time_whatever_a_browser_brings(access: Access) -> None:
    text, _ = access.add("a", Role.VIEWER, 3600, reusable=True)
    (one, first), (two, second) = access.sign_in(text), access.sign_in(text)
    assert one != two and first.id != second.id and first.csrf != second.csrf


@pytest.mark.parametrize("change", ["expire", "revoke", "end"])
def test_what_is_over_opens_nothing(access: Access, clock: Clock, change: str) -> None:
    text, token = access.add("a", Role.OPERATOR, 3600, reusable=True)
    cookie, session = access.sign_in(text)
    if change == "expire":
        clock.now += 3601
    elif change == "revoke":
        access.revoke(token.id)
    else:
        access.end(session)
    with pytest.raises(Refused, match="this session has ended"):
        access.session(cookie)
    if change != "end":
        with pytest.raises(Refused, match="wrong or has expired"):
            access.sign_in(text)


def test_changed_cookies_and_wrong_tokens_are_refused(access: Access) -> None:
    cookie, _ = access.sign_in(access.add("a", Role.VIEWER, 3600)[0])
    payload, mac = cookie.split(".")
    for wrong in (
        "",
        ".",
        "x",
        "a.b.c",
        payload,
        f"{payload}.",
        f"{payload}.{mac[::-1]}",
        f"{payload[:-2]}AA.{mac}",
        "é.é",
    ):
        with pytest.raises(Refused, match="sign in"):
            access.session(wrong)
    with pytest.raises(Refused):
        access.sign_in("guess")


def test_sessions_outlive_the_process_and_end_from_another(tmp_path: Path, access: Access, clock: Clock) -> None:
    text, token = access.add("a", Role.VIEWER, 3600)
    cookie, _ = access.sign_in(text)
    other = Access(tmp_path, clock)
    assert other.session(cookie).name == "a"
    other.revoke(token.id)
    with pytest.raises(Refused):
        access.session(cookie)


def test_the_file_is_private_and_holds_no_token(tmp_path: Path, access: Access) -> None:
    text, _ = access.add("a", Role.VIEWER, 3600)
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and text not in path.read_text()
    path.chmod(0o644)
    with pytest.raises(RunError, match="chmod 600"):
        Access(tmp_path).tokens()
    path.chmod(0o600)
    path.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        Access(tmp_path).tokens()


def test_changes_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def add(name: str) -> None:
        each = Access(tmp_path)
        for _ in range(5):
            each.add(name, Role.VIEWER, 60)

    threads = [threading.Thread(target=add, args=(f"n{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Access(tmp_path).tokens()) == 20


def test_bad_tokens_are_not_made(access: Access) -> None:
    for name, seconds in (("", 60), ("a\n", 60), ("x" * 81, 60), ("a", 0), ("a", float("nan")), ("a", 1e9)):
        with pytest.raises(RunError):
            access.add(name, Role.VIEWER, seconds)
    with pytest.raises(RunError, match="no token"):
        access.revoke("none")


def test_guessing_is_slowed_down(clock: Clock) -> None:
    limit = GuessLimit(clock)
    for _ in range(MAX_GUESSES):
        limit.check("a")
        limit.wrong("a")
    with pytest.raises(Refused, match="too many"):
        limit.check("a")
    limit.check("b")
    clock.now += 61
    limit.check("a")


def test_guessing_from_many_addresses_is_slowed_down_too(clock: Clock) -> None:
    limit = GuessLimit(clock)
    with pytest.raises(Refused, match="too many"):
        for number in range(10_000):
            limit.check(str(number))
            limit.wrong(str(number))
