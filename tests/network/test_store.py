"""One suite for SQLite and PostgreSQL: what is written is there, all of it or nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.federation import until
from network.fork_server import ForkServer
from sqlalchemy.exc import IntegrityError

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.ledger.chain import EMPTY, add, start, verify
from atoll.network.server.store import Store, StoreTaken
from atoll.network.server.tables import Stage, Status

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
TASKS = (Task(3, 0, 0), Task(5, 0, 0, 0.5), Task(9, 0, 0, 1.0, 0.25))


@pytest.fixture
def store(store_url: str) -> Store:
    return Store(store_url)


def test_clients_are_denied_until_they_are_approved(store: Store) -> None:
    with store.write() as tables:
        for number in range(3):
            tables.add_client(f"{number:032x}", f"hospital {number}", bytes([number]) * 32)
        assert [client.status for client in tables.clients()] == [Status.PENDING] * 3
        assert tables.approve(f"{2:032x}") == 0 and tables.approve(f"{0:032x}") == 1
        assert tables.approve(f"{2:032x}") == 0
    with store.read() as tables:
        found = tables.client(f"{2:032x}")
        assert found is not None
        assert (found.name, found.key, found.status, found.number) == ("hospital 2", b"\2" * 32, Status.APPROVED, 0)
        assert tables.client("nobody") is None
    with store.write() as tables:
        before = tables.begin_session(f"{2:032x}")
        assert tables.begin_session(f"{2:032x}") == before + 1
        tables.revoke(f"{2:032x}")
        revoked = tables.client(f"{2:032x}")
        assert revoked is not None and revoked.status is Status.REVOKED and revoked.epoch == before + 2
        assert tables.approve(f"{2:032x}") == 0  # back with the number that it had
        assert [tables.count_offence(f"{0:032x}") for _ in range(3)] == [1, 2, 3]
        with pytest.raises(RunError, match="atoll clients list"):
            tables.approve("nobody")


def test_a_name_and_a_key_enrol_once(store: Store) -> None:
    with store.write() as tables:
        tables.add_client("a" * 32, "one", b"1" * 32)
    for id, name in (("a" * 32, "two"), ("b" * 32, "one")):
        with pytest.raises(IntegrityError), store.write() as tables:
            tables.add_client(id, name, b"2" * 32)
    with store.read() as tables:
        assert [client.name for client in tables.clients()] == ["one"]


def test_a_database_has_one_server(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.network.server.store.CLAIM_SECONDS", 0.2)
    first, second = Store(store_url), Store(store_url)
    first.claim()
    with pytest.raises(RunError, match=r"another server uses the store .*: stop that one"):
        second.claim()
    with first.write() as tables:
        tables.add_run("run", "plan", "{}")
    first.close()
    second.claim()
    second.close()


CLAIMER = """
import sys, time
from atoll.network.server.store import Store
store = Store(sys.argv[1])
store.claim()
print("claimed", flush=True)
time.sleep(600)
"""


def test_a_server_that_was_killed_has_its_database_no_more(
    processes: ForkServer, store_url: str, tmp_path: Path
) -> None:
    store = Store(store_url)
    (tmp_path / "claimer.py").write_text(CLAIMER)
    other = processes.start(["claimer.py", store_url], tmp_path / "out", tmp_path, python=True)
    until(lambda: other.said == "claimed\n" or other.code is not None, 60)
    assert other.kill() == -signal.SIGKILL, other.said
    store.claim()
    store.close()


def test_a_server_whose_lock_was_lost_changes_nothing_any_more(store_url: str) -> None:
    first, second = Store(store_url), Store(store_url)
    first.claim()
    assert first._claim is not None
    first._claim.close()  # as when a connection is cut
    second.claim()
    with pytest.raises(StoreTaken, match="another server"), first.write() as tables:
        tables.add_run("run", "plan", "{}")
    with second.write() as tables:
        assert tables.runs() == []
        tables.add_run("run", "plan", "{}")
    first.close()
    second.close()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_server_has_its_database_again_after_an_outage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy import create_engine, text
    from sqlalchemy.exc import DBAPIError

    monkeypatch.setattr("atoll.network.server.store.CLAIM_SECONDS", 0.2)
    first, second = Store(store_url), Store(store_url)
    first.claim()
    engine = create_engine(store_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.execute(text(f"{cut} AND datname = current_database()"))
    engine.dispose()
    with pytest.raises(DBAPIError), first.write() as tables:
        tables.add_run("lost", "plan", "{}")
    with first.write() as tables:
        tables.add_run("run", "plan", "{}")
    second._engine.dispose()
    with pytest.raises(RunError, match="another server"):
        second.claim()
    first.close()
    second.close()


def test_a_server_waits_for_what_the_one_before_it_was_about_to_change(store_url: str) -> None:
    """A database may still be at work on a change when the process that asked for it is dead."""
    if store_url.startswith("sqlite"):
        pytest.skip("a change of SQLite dies with its process")
    first, second = Store(store_url), Store(store_url)
    seen: list[str] = []

    def claim() -> None:
        second.claim()
        with second.read() as tables:
            seen.extend(client.name for client in tables.clients())

    later = threading.Thread(target=claim)
    with first.write() as tables:
        tables.add_client("a" * 32, "late", b"k" * 32)
        later.start()
        later.join(0.5)
        assert later.is_alive()
    later.join(10)
    assert seen == ["late"]
    first.close()
    second.close()


def test_a_token_lets_one_client_in(store: Store) -> None:
    with store.write() as tables:
        tables.add_token("h" * 64, expires=100.0)
        assert not tables.use_token("x" * 64, "a", 0.0)
        assert not tables.use_token("h" * 64, "a", 101.0)
        assert tables.use_token("h" * 64, "a", 99.0)
        assert tables.use_token("h" * 64, "a", 500.0)  # asked again, because the answer was lost
        assert not tables.use_token("h" * 64, "b", 99.0)


def test_runs_tasks_and_ledger_come_back(store: Store) -> None:
    line, head = start({"plan": "p"}, KEY)
    with store.write() as tables:
        tables.add_run("run", "plan text", "{}")
        tables.add_ledger_line("run", line, head)
        tables.add_tasks("run", TASKS)
        tables.add_tasks("run", ())
    with store.write() as tables:
        tables.set_arrived("run", TASKS[1], "u" * 64, {"loss": 0.5}, b"signed", 1)
        second, later = add(head, "commit", {"version": 1}, KEY)
        tables.add_ledger_line("run", second, later)
        tables.set_run("run", state="s" * 64, machine='{"version": 1}')
    with store.read() as tables:
        run = tables.run("run")
        assert run is not None and run.head == later and run.state == "s" * 64 and run.status == "running"
        assert [row.task for row in tables.tasks("run", 0)] == list(TASKS)
        assert [row.stage for row in tables.tasks("run", 0)] == [Stage.ASKED, Stage.ARRIVED, Stage.ASKED]
        found = tables.task("run", 0, 5)
        assert found is not None and found[2:] == ("u" * 64, {"loss": 0.5}, b"signed", 1)
        assert tables.task("run", 1, 5) is None and tables.run("other") is None
        assert verify(tables.ledger_lines("run")) is None and tables.ledger_lines("run", 1) == [second]
        assert tables.last_counted("run") == {}
    with store.write() as tables:
        tables.set_failed("run", TASKS[2], "no time", 2)
        assert [row.task for row in tables.task_events("run", 0)] == [TASKS[1], TASKS[2]]
        assert [row.report for row in tables.task_events("run", 1)] == [{"why": "no time"}]
        tables.set_stage("run", [TASKS[1]], Stage.COUNTED)
        tables.close_open_tasks("run")
        assert [row.stage for row in tables.tasks("run", 0)] == [Stage.CLOSED, Stage.COUNTED, Stage.FAILED]
        assert tables.last_counted("run") == {5: 0}
        for row in ({"round": 1, "loss": 3.0}, {"round": 2}, {"round": 1, "loss": 2.0}):
            tables.add_metrics_row("run", row)
        assert tables.metrics_rows("run") == [{"round": 1, "loss": 2.0}, {"round": 2}]


def test_a_change_that_fails_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.write() as tables:
        tables.add_run("run", "plan", "{}")
        tables.add_tasks("run", TASKS)
        raise ZeroDivisionError
    with store.read() as tables:
        assert tables.runs() == [] and tables.tasks("run", 0) == []


def test_changes_of_many_threads_follow_each_other(store: Store) -> None:
    with store.write() as tables:
        tables.add_run("run", "plan", "{}")

    def write() -> None:
        for _ in range(10):
            with store.write() as tables:
                run = tables.run("run")
                assert run is not None
                tables.add_ledger_line("run", *add(run.head, "commit", {}, KEY))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as tables:
        lines = tables.ledger_lines("run")
        assert len(lines) == 40 and len(set(lines)) == 40


WRITER = """
import sys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from atoll.core.messages import Task
from atoll.ledger.chain import add
from atoll.network.server.store import Store
key, store = Ed25519PrivateKey.from_private_bytes(bytes(32)), Store(sys.argv[1])
while True:
    with store.write() as book:
        run = book.run("run")
        number = run.head.length
        book.add_tasks("run", [Task(client, number, number) for client in range(20)])
        book.add_ledger_line("run", *add(run.head, "commit", {"version": number}, key))
        book.set_run("run", machine=str(number))
    print(number, flush=True)
"""


def test_a_kill_leaves_whole_changes_and_all_that_were_reported(
    processes: ForkServer, store_url: str, tmp_path: Path
) -> None:
    store = Store(store_url)
    (tmp_path / "writer.py").write_text(WRITER)
    with store.write() as tables:
        tables.add_run("run", "plan", "-1")
    for least in (1, 5, 9):
        writer = processes.start(["writer.py", store_url], tmp_path / f"{least}.out", tmp_path, python=True)
        until(lambda n=least, writer=writer: writer.code is not None or int(f"0{writer.said}".split()[-1]) >= n, 60)
        assert writer.kill() == -signal.SIGKILL, writer.said
        reported = int(writer.said.split()[-1])
        with store.read() as tables:
            run = tables.run("run")
            assert run is not None
            newest = run.head.length - 1
            assert newest in (reported, reported + 1) and run.machine == str(newest)
            assert len(tables.ledger_lines("run")) == newest + 1
            assert len(tables.tasks("run", newest)) == 20 and tables.tasks("run", newest + 1) == []


def test_rubbish_is_no_store(tmp_path: Path) -> None:
    for url in ("nonsense", "mongodb://here", ""):
        with pytest.raises(PlanError, match="sqlite:///PATH"):
            Store(url)
    with pytest.raises(RunError, match="check --store"):
        Store(f"sqlite:///{tmp_path}/no/such/place.db")
    (tmp_path / "text.db").write_text("this is not a database, and never was one; it is much too long for that" * 20)
    with pytest.raises(RunError, match="check --store"):
        Store(f"sqlite:///{tmp_path}/text.db")


def test_a_store_of_another_layout_is_left_alone(store_url: str) -> None:
    from sqlalchemy import create_engine, text

    Store(store_url).close()
    engine = create_engine(store_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE meta SET value = '99'"))
    with pytest.raises(RunError, match="has layout 99, this Atoll knows 3: use the Atoll that made it"):
        Store(store_url)


@pytest.mark.parametrize("layout", ["1", "2"])
def test_a_store_of_a_layout_before_is_brought_up_to_date(layout: str, store_url: str) -> None:
    from sqlalchemy import create_engine, text

    Store(store_url).close()
    engine = create_engine(store_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        for table in ("evaluations", "readiness", *(("agreed", "refusals") if layout == "1" else ())):
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text("UPDATE meta SET value = :layout WHERE key = 'schema'"), {"layout": layout})
    store = Store(store_url)
    with store.write() as tables:
        tables.set_agreed_samples("client", 7)
        assert tables.agreed_samples() == {"client": 7} and tables.refusals("run") == []
        assert tables.evaluations("run") == {} and tables.readiness() == {}
    store.close()
    Store(store_url).close()


def test_a_store_that_is_not_whole_is_refused_in_words(store_url: str) -> None:
    from sqlalchemy import create_engine, text

    Store(store_url).close()
    engine = create_engine(store_url.replace("postgresql://", "postgresql+psycopg://"))
    for damage, says in (
        ("ALTER TABLE clients DROP COLUMN offences", "lacks clients.offences: it is damaged; restore"),
        ("DROP TABLE ledger", "lacks .*clients.offences.*ledger"),
        ("DELETE FROM meta WHERE key = 'schema'", "does not say which layout it has.*another --store"),
        ("ALTER TABLE meta DROP COLUMN value", "does not say which layout it has"),
        ("DROP TABLE meta", "does not say which layout it has"),
    ):
        with engine.begin() as connection:
            connection.execute(text(damage))
        for _ in range(2):  # nothing was adopted by the first look
            with pytest.raises(RunError, match=says):
                Store(store_url)
    engine.dispose()


def test_a_database_of_something_else_is_not_adopted(store_url: str) -> None:
    from sqlalchemy import create_engine, inspect, text

    engine = create_engine(store_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE clients (id INTEGER PRIMARY KEY, invoice TEXT)"))
    with pytest.raises(RunError, match=r"has tables .clients. but does not say which layout"):
        Store(store_url)
    assert inspect(engine).get_table_names() == ["clients"]
    engine.dispose()


def test_the_first_head_is_that_of_nothing(store: Store) -> None:
    with store.write() as tables:
        tables.add_run("run", "plan", "{}")
        run = tables.run("run")
        assert run is not None and run.head == EMPTY
