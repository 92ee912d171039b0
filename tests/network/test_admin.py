"""The operator's address: who has the token is obeyed, nobody else is, and everybody may ask whether all is well."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from network.in_process_server import enrol, operated

from atoll.core.errors import RunError
from atoll.network.protocol.operator import operator_token, read_token
from atoll.network.protocol.operator_endpoints import ENDPOINTS
from atoll.network.server.admin import open_admin
from atoll.network.server.operations import Operations


@pytest.fixture
def operations(tmp_path: Path) -> Iterator[Operations]:
    with operated(tmp_path / "home") as operations:
        yield operations


@pytest.fixture
def admin(operations: Operations, tmp_path: Path) -> Iterator[httpx2.Client]:
    """A connection of the operator."""
    url = json.loads((tmp_path / "home" / "admin.json").read_text())["url"]
    token = (tmp_path / "home" / "operator.token").read_text().strip()
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False) as client:
        yield client


def told(response: Any, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def test_an_operator_lets_clients_in_and_out(operations: Operations, admin: httpx2.Client) -> None:
    ids = {}
    for name in ("b", "a"):
        token = told(admin.post("/clients/token", json={"seconds": 60}))["token"]
        ids[name] = enrol(operations, name, token)
    assert [row["status"] for row in told(admin.get("/clients"))["clients"]] == ["pending", "pending"]
    assert told(admin.post("/clients/approve", json={"names": ["b", ids["a"]]})) == {"numbers": [0, 1]}
    told(admin.post("/clients/revoke", json={"names": ["b"]}))
    clients = {row["name"]: row for row in told(admin.get("/clients"))["clients"]}
    assert (clients["a"]["status"], clients["a"]["number"]) == ("approved", 1)
    assert clients["b"]["status"] == "revoked"
    assert "no client c" in told(admin.post("/clients/approve", json={"names": ["a", "c"]}), 400)["error"]


def test_an_operator_begins_and_ends_runs(operations: Operations, admin: httpx2.Client) -> None:
    plan = {"rounds": 7, "name": "study: one", "algorithm": {"name": "fedprox", "mu": 0.1}}
    told(admin.post("/runs", json={"run": "one", "plan": plan}))
    run = operations.driver.runs["one"]
    assert run.plan.rounds == 7 and run.plan.algorithm.options == {"mu": 0.1}
    assert told(admin.get("/status"))["runs"][0]["rounds"] == 7
    assert "already" in told(admin.post("/runs", json={"run": "one", "plan": plan}), 400)["error"]
    told(admin.post("/runs/stop", json={"run": "one"}))
    assert told(admin.get("/status"))["runs"][0]["status"] == "interrupted"
    assert told(admin.get("/runs/one/ledger")) == {"lines": []}
    told(admin.post("/stop"))
    with pytest.raises(httpx2.HTTPError):
        for _ in range(1000):
            admin.get("/health")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/runs", {"run": "../x", "plan": {}}, "small letters"),
        ("/runs", {"run": "x", "plan": {"round": 3}}, "unknown key"),
        ("/runs", {"run": "x", "plan": {"data": {"name": "subprocess:run", "args": "id"}}}, "names from the catalogue"),
        ("/runs", {"run": "x"}, "plan"),
        ("/clients/approve", {"names": []}, "names"),
        ("/clients/approve", {"names": ["a"], "more": 1}, "more"),
        ("/clients/token", {"seconds": -1}, "seconds"),
        ("/clients/token", [], "object"),
        ("/runs/stop", {"run": "nothing"}, "no run 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_refused(admin: httpx2.Client, path: str, body: Any, says: str) -> None:
    assert says in told(admin.post(path, json=body), 400)["error"]


def test_nobody_else_is_obeyed(operations: Operations, admin: httpx2.Client) -> None:
    token = admin.headers["authorization"]
    for shown in (
        "",
        "Bearer",
        token[:-1],
        token + "x",
        token.replace("Bearer", "Basic"),
        token.upper(),
        "Bearer \xff",
    ):
        for each in (each for each in ENDPOINTS if not each.public):
            path = each.path.replace("{run}", "one")
            answer = admin.request(each.method, path, headers={"authorization": shown.encode("latin-1")})
            assert "operator's token" in told(answer, 401)["error"]
    assert admin.get("/health").text == "ok"


def test_anybody_may_ask_whether_all_is_well(operations: Operations, admin: httpx2.Client) -> None:
    del admin.headers["authorization"]
    enrol(operations, "hospital-of-secrets", operations.token(60))
    assert (admin.get("/health").status_code, admin.get("/health").text) == (200, "ok")
    (operations.driver.home / ".room").mkdir()  # in the way of what is tried every second: it does not recover
    operations.driver.set_read_only("no room is left in /srv: free some")
    assert (admin.get("/health").status_code, admin.get("/health").text) == (503, "no room is left in /srv: free some")
    operations.metrics.committed("one", 3, 0.1)
    answer = admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'atoll_round{run="one"} 3.0' in answer.text and "hospital" not in answer.text


def test_requests_have_limits_and_errors_are_json(admin: httpx2.Client) -> None:
    assert "at most" in told(admin.post("/clients/approve", content=b" " * (1 << 21)), 413)["error"]
    assert "no GET /nowhere" in told(admin.get("/nowhere"), 404)["error"]
    assert "no DELETE /clients" in told(admin.delete("/clients"), 405)["error"]
    assert told(admin.post("/runs", content=b"{nonsense"), 400)["error"]
    assert told(admin.get("/status"))["server"]["read_only"] is False


def test_the_token_is_made_once_and_kept_private(tmp_path: Path) -> None:
    token = operator_token(tmp_path)
    path = tmp_path / "operator.token"
    assert operator_token(tmp_path) == token and len(token) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(RunError, match="chmod 600"):
        operator_token(tmp_path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(RunError, match="remove it"):
        operator_token(tmp_path)
    with pytest.raises(RunError, match="name its file"):
        read_token(tmp_path / "nothing")


def test_the_address_is_this_machine_and_free(operations: Operations, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="certificate"):
        open_admin(operations, tmp_path, 0, host="0.0.0.0")
    url = json.loads((tmp_path / "home" / "admin.json").read_text())["url"]
    with pytest.raises(RunError, match="another port"):
        open_admin(operations, tmp_path, int(url.rpartition(":")[2]))
