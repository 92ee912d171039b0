"""The live page over HTTP: what it shows of runs, and what it refuses to whom."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from ui.serving import Browser, row_line, served, write_run

from atoll.network.server.access import MAX_GUESSES, Access, Role


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    write_run(directory / "one", 3)
    write_run(directory / "sweep" / "lr=0.1" / "seed 1", 2, seed=1)
    write_run(directory / "sweep" / "lr=0.1" / "seed 2", 2, seed=2)
    return directory


@pytest.fixture
def url(runs: Path) -> Iterator[str]:
    with served(runs) as address:
        yield address


@pytest.fixture
def browser(url: str, runs: Path) -> Browser:
    return Browser(url, Access(runs))


def test_runs_are_found_at_any_depth_and_grouped_by_plan(browser: Browser) -> None:
    known = {run["id"]: run for run in browser.get("runs")["runs"]}
    assert known.keys() == {"one", "sweep/lr=0.1/seed 1", "sweep/lr=0.1/seed 2"}
    assert known["one"]["round"] == 3 and known["one"]["status"] == "stopped" and known["one"]["main"] == "accuracy"
    groups = {run: each["group"] for run, each in known.items()}
    assert groups["sweep/lr=0.1/seed 1"] == groups["sweep/lr=0.1/seed 2"] == groups["one"]


def test_a_run_is_shown_with_its_documents_and_rows(browser: Browser, runs: Path) -> None:
    (runs / "one" / "result.json").write_text(json.dumps({"reason": "all rounds done", "contribution": {"0": 1.5}}))
    (runs / "one" / "checkpoint.safetensors").write_text("secret")
    (runs / "one" / "report.html").write_text("<p>report")
    document = browser.get("run", id="one")
    assert document["summary"]["status"] == "ended" and document["contribution"] == {"0": 1.5}
    assert document["pages"] == ["report.html"] and "fedavg" in document["plan"]
    assert "checkpoint.safetensors" not in [each["name"] for each in document["files"]]
    table = browser.get("rows", id="one")
    assert table["columns"]["round"] == [1, 2, 3] and table["columns"]["test.accuracy"][2] == 1 - 1 / 3
    assert next(each for each in table["measures"] if each["key"] == "test.accuracy")["share"]


def test_many_rows_are_thinned(browser: Browser, runs: Path) -> None:
    path = runs / "one" / "metrics.jsonl"
    lines = [json.dumps({"round": n, "train_loss": 0.5}) + "\n" for n in range(1, 10_001)]
    lines[4999] = row_line(5000)
    path.write_text("".join(lines))
    table = browser.get("rows", id="one", most=1000)
    rounds = table["columns"]["round"]
    assert table["total"] == 10_000 and table["every"] == 10 and len(rounds) < 1100
    assert rounds[-1] == 10_000 and 5000 in rounds, "rows with a test are kept"


def test_only_files_for_people_are_handed_out(browser: Browser, runs: Path) -> None:
    (runs / "one" / "checkpoint.safetensors").write_text("secret")
    (runs / "one" / "privacy.ledger").write_text("secret")
    (runs / "outside.txt").write_text("secret")
    for name in ("checkpoint.safetensors", "privacy.ledger", "../outside.txt", "/etc/passwd", ".lock", ""):
        answer = browser.http.get("/ui/file", params={"id": "one", "name": name})
        assert answer.status_code == 400 and "secret" not in answer.text
    for run in ("..", "../runs/one", "/", "one/../one", "sweep", "\x00"):
        assert browser.http.get("/ui/file", params={"id": run, "name": "plan.toml"}).status_code == 400
    plan = browser.http.get("/ui/file", params={"id": "one", "name": "plan.toml"})
    assert plan.headers["content-disposition"].startswith("attachment") and "fedavg" in plan.text
    table = browser.http.get("/ui/file", params={"id": "one", "name": "metrics.csv"})
    assert table.text.splitlines()[0].startswith("round,") and len(table.text.splitlines()) == 4


def test_links_and_pipes_in_a_run_lead_nowhere(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """A run directory may come from somebody else."""
    (tmp_path / "secret").write_text("secret = 1\n")
    planted = write_run(runs / "planted", 1)
    for name in ("report.html", "log.txt", "ledger.jsonl", "sites.json"):
        (planted / name).symlink_to(tmp_path / "secret")
    (planted / "metrics.jsonl").unlink()
    os.mkfifo(planted / "metrics.jsonl")
    os.mkfifo(planted / "confusion.json")
    document = browser.get("run", id="planted")
    assert document["pages"] == [] and "secret" not in json.dumps(document)
    assert browser.get("log", id="planted")["text"] == "" and browser.get("ledger", id="planted")["length"] == 0
    assert browser.get("rows", id="planted")["total"] == 0
    for name in ("report.html", "log.txt"):
        assert browser.http.get("/ui/file", params={"id": "planted", "name": name}).status_code == 400


def test_pages_that_were_written_to_files_are_in_a_sandbox(browser: Browser, runs: Path) -> None:
    (runs / "one" / "report.html").write_text("<script>alert(1)</script>")
    policy = browser.http.get("/ui/file", params={"id": "one", "name": "report.html"}).headers[
        "content-security-policy"
    ]
    assert policy.startswith("sandbox allow-scripts") and "allow-same-origin" not in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy


def test_every_answer_forbids_framing_and_foreign_content(url: str) -> None:
    for path in ("/ui/api/runs", "/ui/nothing", "/ui/api/session"):
        answer = httpx2.get(url + path, trust_env=False)
        if path == "/ui/nothing":
            assert answer.status_code == 404
            continue
        assert answer.status_code == 401
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_nothing_is_shown_without_a_session(url: str) -> None:
    for path in ("runs", "run?id=one", "rows?id=one", "log?id=one", "ledger?id=one", "clients", "access", "stream"):
        answer = httpx2.get(f"{url}/ui/api/{path}", trust_env=False)
        assert answer.status_code == 401 and "fedavg" not in answer.text, path
    assert httpx2.get(f"{url}/ui/file?id=one&name=plan.toml", trust_env=False).status_code == 401


def test_another_name_for_this_machine_is_refused(url: str, browser: Browser) -> None:
    """A site whose name is rebound to this machine is no better than any other."""
    for host in ("evil.example", f"evil.example:{url.rpartition(':')[2]}", "127.0.0.1", ""):
        answer = browser.http.get("/ui/api/runs", headers={"host": host})
        assert answer.status_code in (400, 421), host
    assert browser.http.get("/ui/api/runs", headers={"host": f"localhost:{url.rpartition(':')[2]}"}).status_code == 200


def test_other_sites_cannot_act_with_a_browsers_session(browser: Browser) -> None:
    body = {"name": "x", "role": "viewer", "hours": 1}
    assert "load it again" in browser.post("actions/access_add", body, 403, **{"atoll-csrf": ""})["error"]
    other = browser.session["csrf"][::-1]
    assert "load it again" in browser.post("actions/access_add", body, 403, **{"atoll-csrf": other})["error"]
    assert "another site" in browser.post("actions/access_add", body, 403, origin="https://evil.example")["error"]
    assert "another site" in browser.post("actions/access_add", body, 403, origin="null")["error"]
    cross = {"sec-fetch-site": "cross-site"}
    assert "another site" in browser.post("actions/access_add", body, 403, **cross)["error"]
    form = browser.http.post(
        "/ui/api/actions/access_add",
        content=json.dumps(body),
        headers={"atoll-csrf": browser.session["csrf"], "content-type": "text/plain"},
    )
    assert form.status_code == 415
    assert len(browser.get("access")["tokens"]) == 1


def test_cookies_stay_with_the_browser_and_the_page(url: str, runs: Path) -> None:
    text, _ = Access(runs).add("a", Role.VIEWER, 3600)
    answer = httpx2.post(f"{url}/ui/api/session", json={"token": text}, trust_env=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/ui" in cookie
    assert f"atoll_session_{url.rpartition(':')[2]}=" in cookie, "other ports of this machine have other cookies"


def test_a_session_that_a_thief_chose_is_not_taken_over(url: str, runs: Path) -> None:
    text, _ = Access(runs).add("victim", Role.OPERATOR, 3600)
    name = f"atoll_session_{url.rpartition(':')[2]}"
    with httpx2.Client(base_url=url, trust_env=False, cookies={name: "planted"}) as victim:
        answer = victim.post("/ui/api/session", json={"token": text})
        assert answer.status_code == 200 and "planted" not in answer.headers["set-cookie"]
    planted = httpx2.get(f"{url}/ui/api/runs", cookies={name: "planted"}, trust_env=False)
    assert planted.status_code == 401


def test_wrong_used_expired_and_revoked_links_open_nothing(url: str, runs: Path, browser: Browser) -> None:
    access = Access(runs)
    used, _ = access.add("a", Role.VIEWER, 3600)
    revoked, token = access.add("b", Role.VIEWER, 3600)
    access.revoke(token.id)
    assert httpx2.post(f"{url}/ui/api/session", json={"token": used}, trust_env=False).status_code == 200
    for text in (used, revoked, "wrong", ""):
        assert httpx2.post(f"{url}/ui/api/session", json={"token": text}, trust_env=False).status_code == 401
    access.revoke(browser.token.id)
    assert browser.http.get("/ui/api/runs").status_code == 401


def test_guessing_is_stopped(url: str) -> None:
    answers = [
        httpx2.post(f"{url}/ui/api/session", json={"token": str(n)}, trust_env=False) for n in range(MAX_GUESSES + 1)
    ]
    assert [each.status_code for each in answers[:-1]] == [401] * MAX_GUESSES
    assert answers[-1].status_code == 429 and int(answers[-1].headers["retry-after"]) > 0


def test_a_viewer_sees_and_does_nothing(url: str, runs: Path) -> None:
    viewer = Browser(url, Access(runs), Role.VIEWER, "partner")
    assert viewer.session["can"] == [] and viewer.get("runs")["runs"]
    assert "partner may look on" in viewer.act("access_add", 403, name="x", role="operator", hours=1)["error"]
    assert viewer.http.get("/ui/api/access").status_code == 403


def test_a_session_ends_when_its_user_says_so(browser: Browser) -> None:
    browser.post("session/end", {})
    assert browser.http.get("/ui/api/runs").status_code == 401


def test_an_operator_makes_and_revokes_links(url: str, runs: Path, browser: Browser) -> None:
    made = browser.act("access_add", name="Dr. Li", role="viewer", hours=2)
    token = made["link"].rpartition("token=")[2]
    assert httpx2.post(f"{url}/ui/api/session", json={"token": token}, trust_env=False).status_code == 200
    listed = {each["name"]: each for each in browser.get("access")["tokens"]}
    assert listed["Dr. Li"]["used"] and "hash" not in listed["Dr. Li"]
    browser.act("access_revoke", id=made["id"])
    assert "Dr. Li" not in {each["name"] for each in browser.get("access")["tokens"]}
    assert "at most a year" in browser.act("access_add", 400, name="x", role="viewer", hours=1e9)["error"]
    assert browser.act("access_add", 400, name="x", role="king", hours=1)["error"]


def test_unreadable_directories_are_shown_as_such(browser: Browser, runs: Path) -> None:
    broken = write_run(runs / "broken", 1)
    (broken / "plan.toml").write_text("rounds = ")
    (broken / "metrics.jsonl").write_text('{"round": 1}\n[1]\n{"round": "x"}\nrubbish\n{"round": 2}\n{"rou')
    known = {run["id"]: run for run in browser.get("runs")["runs"]}
    assert "TOMLDecodeError" in known["broken"]["problem"]
    assert browser.get("rows", id="broken")["columns"]["round"] == [1, 2]
