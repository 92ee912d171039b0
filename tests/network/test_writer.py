"""The clerk writes several changes at once, and each answers for itself alone."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from atoll.core.errors import DiskFull, RunError
from atoll.network.server.auth import Refused
from atoll.network.server.store import Store
from atoll.network.server.writer import Transaction, Writer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path}/store.db")
    yield made
    made.close()


def test_a_change_that_fails_takes_no_other_with_it(store: Store) -> None:
    troubles: list[str] = []
    writer = Writer(store, lambda: None, troubles.append)
    effects: list[str] = []

    def typo(transaction: Transaction) -> None:
        transaction.tables.add_client("f" * 32, "half", b"f" * 32)  # it had begun to write
        transaction.after_commit(lambda: effects.append("half"))
        raise RunError("there is no client of this name")

    def defect(transaction: Transaction) -> None:
        raise AssertionError("nobody thought of this")

    def refused(transaction: Transaction) -> None:
        raise Refused(HTTPStatus.FORBIDDEN, "no")

    def good(transaction: Transaction) -> str:
        transaction.tables.add_client("a" * 32, "good", b"a" * 32)
        transaction.after_commit(lambda: effects.append("good"))
        return "done"

    def twice(transaction: Transaction) -> None:
        transaction.tables.add_client("a" * 32, "good", b"a" * 32)

    def better(transaction: Transaction) -> str:
        transaction.tables.add_client("b" * 32, "better", b"b" * 32)
        return "done too"

    changes = (typo, good, defect, twice, refused, better)
    futures = [writer.submit(change) for change in changes]  # all of them wait when it begins
    writer.start()
    try:
        assert [futures[1].result(10), futures[5].result(10)] == ["done", "done too"]
        for number, kind in ((0, RunError), (2, AssertionError), (3, IntegrityError), (4, Refused)):
            assert type(futures[number].exception(10)) is kind
    finally:
        writer.stop()
    with store.read() as tables:
        assert [client.name for client in tables.clients()] == ["better", "good"]
    assert effects == ["good"]
    assert not troubles


def test_a_disk_that_is_full_is_told_to_all_and_nothing_was_written(store: Store) -> None:
    troubles: list[str] = []
    writer = Writer(store, lambda: None, troubles.append)

    def full(transaction: Transaction) -> None:
        raise DiskFull("no room is left")

    def broken(transaction: Transaction) -> None:
        transaction.tables._db.execute(text("SELECT * FROM nothing"))

    futures = [writer.submit(change) for change in (full, broken)]
    writer.start()
    try:
        for future in futures:
            error = future.exception(10)
            assert isinstance(error, Refused)
            assert (error.status, error.retry) == (503, 5.0)
    finally:
        writer.stop()
    assert troubles[0] == "no room is left"
