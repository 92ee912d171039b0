"""What a server counts and logs: the right numbers, and nothing that is nobody's business."""

from __future__ import annotations

import json
import math
import sys
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.network.server.monitoring import MAX_TEXT, Metrics, RateLimitedLog, log


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample as Prometheus would read it, by name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_everything_is_counted() -> None:
    metrics = Metrics()
    metrics.request("/v1/poll", 200, 10, 20)
    metrics.request("/v1/poll", 200, 1, 2)
    metrics.request("/v1/poll", 401, 0, 3)
    for count in (metrics.arrived, metrics.arrived, metrics.late):
        count()
    metrics.rejected("not finite")
    metrics.committed("one", 7, 0.25)
    metrics.committed("one", 8, 2.0)
    metrics.abandoned("two")
    metrics.online(3)
    metrics.read_only(True)
    found = values(metrics)
    assert found["atoll_requests_total", "/v1/poll", "200"] == 2
    assert found["atoll_requests_total", "/v1/poll", "401"] == 1
    assert found["atoll_received_bytes_total",] == 11 and found["atoll_sent_bytes_total",] == 25
    assert found["atoll_updates_total", "arrived", ""] == 2 and found["atoll_updates_total", "late", ""] == 1
    assert found["atoll_updates_total", "rejected", "not finite"] == 1
    assert found["atoll_commit_seconds_count", "one"] == 2 and found["atoll_commit_seconds_sum", "one"] == 2.25
    assert found["atoll_round", "one"] == 8 and found["atoll_abandoned_total", "two"] == 1
    assert found["atoll_clients_online",] == 3 and found["atoll_read_only",] == 1
    assert found["process_resident_memory_bytes",] > 1e6
    assert values(Metrics()).get(("atoll_round", "one")) is None  # no two servers share a count


def test_polls_are_counted_while_they_wait() -> None:
    metrics = Metrics()
    with metrics.waiting(), metrics.waiting():
        assert values(metrics)["atoll_polls_waiting",] == 2
    assert values(metrics)["atoll_polls_waiting",] == 0


def test_reasons_are_few_plain_words_whatever_a_client_sent() -> None:
    metrics = Metrics()
    for number in range(100):
        metrics.rejected(f"Hospital {number}: patient Smith")
    assert values(metrics)["atoll_updates_total", "rejected", "other"] == 100
    assert b"Smith" not in metrics.text()


def test_threads_lose_no_count() -> None:
    metrics = Metrics()
    work = [threading.Thread(target=lambda: [metrics.arrived() for _ in range(500)]) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert values(metrics)["atoll_updates_total", "arrived", ""] == 4000


def test_a_line_of_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    log("committed", run="mnist", version=3, accuracy=math.nan, why="line\nbreak \x1b[31m", long="x" * 10_000)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "\x1b" not in err
    said: dict[str, Any] = json.loads(err)
    assert said["event"] == "committed" and said["version"] == 3 and said["accuracy"] is None
    assert said["time"].endswith("+00:00") and len(said["long"]) == MAX_TEXT + 3


def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    log("stopping")
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_trouble_is_told_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    time = 100.0
    seldom = RateLimitedLog(60.0, lambda: time)
    for _ in range(1000):
        seldom.write("no files")
    time += 61
    seldom.write("no files")
    lines = [json.loads(line)["why"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["no files", "no files (and 999 times since this was last said)"]
