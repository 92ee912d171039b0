"""The stream of changes: nothing is lost or repeated, whatever happens to the server or the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ui.serving import Browser, row_line, served, write_run

from atoll.network.server.access import Access
from atoll.ui.feed import OVERLAP, Feed, Subscription
from atoll.ui.runs import RunsDirectory


class Rows:
    """What a page has of a run, by the rule that messages follow: drop rounds after `keep`, then add."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.last = ""
        self.received = 0

    def take(self, event: str, marker: str, data: Any) -> None:
        self.last = marker
        if event == "rows":
            self.rows = {number: row for number, row in self.rows.items() if number <= data["keep"]}
            self.rows |= {row["round"]: row for row in data["rows"]}
            self.received += len(data["rows"])

    def read(self, messages: Iterator[tuple[str, str, Any]], until: int) -> None:
        for message in messages:
            self.take(*message)
            if self.rows and max(self.rows) >= until:
                return
        raise AssertionError(f"the stream ended at round {max(self.rows, default=0)}")


def append(path: Path, numbers: range, **more: Any) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(row_line(number, **more) for number in numbers))


def test_rows_arrive_once_each(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "one", 3), Rows()
    with served(tmp_path) as url, Browser(url, Access(tmp_path)).stream("one") as messages:
        page.read(messages, 3)
        for number in range(4, 7):
            append(run, range(number, number + 1))
            page.read(messages, number)
    assert sorted(page.rows) == [1, 2, 3, 4, 5, 6] and page.received == 6


def test_a_restart_of_the_server_neither_loses_nor_repeats_a_round(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "one", 200), Rows()
    with served(tmp_path) as url:
        browser = Browser(url, Access(tmp_path))
        with browser.stream("one") as messages:
            page.read(messages, 200)
    append(run, range(201, 211))
    with served(tmp_path, port=int(url.rpartition(":")[2])) as url, browser.stream("one", last=page.last) as messages:
        page.received = 0
        page.read(messages, 210)
        append(run, range(211, 213))
        page.read(messages, 212)
    assert sorted(page.rows) == list(range(1, 213))
    assert page.received <= OVERLAP + 12, "what the page has is not sent again, but for the last rounds"


def test_rows_that_are_rewritten_replace_what_the_page_has(tmp_path: Path) -> None:
    """As after a kill, when rounds since the checkpoint are run again, and when sites have measured a version."""
    run, page = write_run(tmp_path / "one", 10), Rows()
    path = run / "metrics.jsonl"
    with served(tmp_path) as url, Browser(url, Access(tmp_path)).stream("one") as messages:
        page.read(messages, 10)
        new = tmp_path / "new"
        new.write_text("".join(row_line(number) for number in range(1, 6)))
        new.replace(path)
        while max(page.rows) != 5:
            page.take(*next(messages))
        append(run, range(6, 8))
        page.read(messages, 7)
        new.write_text("".join(row_line(n, **({"clients_test": {"mean": 0.5}} if n == 6 else {})) for n in range(1, 8)))
        new.replace(path)
        while "clients_test.mean" not in page.rows.get(6, {}):
            page.take(*next(messages))
    assert sorted(page.rows) == list(range(1, 8))


def test_a_line_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 1)
    runs, line = RunsDirectory(tmp_path), row_line(2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        log = runs.rows("one")
        assert log.rounds == [1]
        file.write(line[20:])
    assert runs.rows("one") is log and log.rounds == [1, 2]


def test_runs_come_change_and_go(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 1)
    with served(tmp_path) as url, Browser(url, Access(tmp_path)).stream() as messages:
        event, _, data = next(messages)
        assert event == "runs" and [run["id"] for run in data["runs"]] == ["one"]
        write_run(tmp_path / "two", 1)
        event, _, data = next(messages)
        assert event == "runs" and [run["id"] for run in data["runs"]] == ["two"]
        (one / "result.json").write_text(json.dumps({"reason": "all rounds done"}))
        event, _, data = next(messages)
        assert data["runs"][0]["status"] == "ended"
        for path in one.iterdir():
            path.unlink()
        one.rmdir()
        assert next(messages)[0] == "gone"


def test_changed_documents_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 1)
    with served(tmp_path) as url, Browser(url, Access(tmp_path)).stream("one") as messages:
        Rows().read(messages, 1)
        (run / "clients.json").write_text("{}")
        event = next(message for message in messages if message[0] == "files")
    assert event[2] == {"id": "one", "names": ["clients.json"]}


def test_a_revoked_page_is_told_and_gets_nothing_more(tmp_path: Path) -> None:
    run, access = write_run(tmp_path / "one", 1), Access(tmp_path)
    with served(tmp_path) as url:
        browser = Browser(url, access)
        with browser.stream("one") as messages:
            Rows().read(messages, 1)
            access.revoke(browser.token.id)
            event, _, data = next(message for message in messages if message[0] not in ("rows", "runs", "files"))
            append(run, range(2, 3))
            assert event == "bye" and "ended" in data["why"] and list(messages) == []


def test_a_page_that_does_not_read_costs_a_bounded_memory() -> None:
    page = Subscription(["one"], {})
    for number in range(10_000):
        page.put("runs", b"%d" % number)
    assert page.queue.qsize() <= page.queue.maxsize and _last(page) is None, "its stream ends, and it asks again"


def _last(page: Subscription) -> bytes | None:
    item: bytes | None = b""
    while not page.queue.empty():
        item = page.queue.get_nowait()
    return item


def test_a_log_is_dropped_when_no_page_follows_its_run(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 5)
    runs = RunsDirectory(tmp_path)
    feed = Feed(runs, lambda: None)
    feed._look({"one"})
    assert list(runs.followed()) == ["one"]
    feed._look(set())
    assert not runs.followed()
