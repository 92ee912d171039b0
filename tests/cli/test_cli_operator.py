"""The operator's commands, against a server that listens."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network.in_process_server import enrol, operated

from atoll.network.server.operations import Operations


@pytest.fixture
def operations(tmp_path: Path) -> Iterator[Operations]:
    """A server whose home is where commands look for it."""
    with operated(tmp_path / "atoll-server") as operations:
        yield operations


def test_a_client_is_let_in_and_shut_out(cli: Any, operations: Operations) -> None:
    token = cli("clients", "token", "--hours", "1").out.strip()
    id = enrol(operations, "north", token)
    told = json.loads(cli("clients", "token", "--format", "json").out)
    enrol(operations, "south", told["token"])
    said = cli("clients", "approve", "south", id)
    assert said.code == 0 and said.out == f"south is client 0\n{id} is client 1\n"
    assert cli("clients", "revoke", "south").out == ""
    lines = cli("clients", "list").out.splitlines()
    assert lines[0].split() == ["name", "number", "status", "samples", "agreed", "offences", "heard", "id"]
    assert lines[1].split() == ["north", "1", "approved", "-", "-", "0", "-", id]
    assert lines[2].split()[:3] == ["south", "0", "revoked"]
    rows = json.loads(cli("clients", "list", "--format", "json").out)
    assert [row["status"] for row in rows] == ["approved", "revoked"]
    assert cli("clients", "approve", "north", "--samples", "0").code == 2
    assert cli("clients", "approve", "north", "--samples", "600").out == "north is client 1\n"
    assert cli("clients", "list").out.splitlines()[1].split()[3:5] == ["-", "600"]
    assert operations.driver.presence.agreed_samples == {1: 600}


def test_runs_are_begun_shown_and_ended(cli: Any, operations: Operations, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('rounds = 9\nalgorithm = "fedprox"\n')
    assert cli("runs", "add", "plan.toml", "--name", "one", "--set", "algorithm.mu=0.5").code == 0
    assert operations.driver.runs["one"].plan.algorithm.options == {"mu": 0.5}
    said = cli("status").out
    assert f", key {operations.server_key.hex()}\n" in said and "0 approved: 0 online" in said
    header, row = (line.split() for line in said.splitlines()[-2:])
    assert header[:3] == ["run", "status", "round"]
    assert row == ["one", "running", "0", "of", "9", "0", "ready", "0", "of", "0", "0", "s", "-", "-"]
    assert cli("runs", "stop", "one").code == 0
    assert json.loads(cli("runs", "list", "--format", "json").out)[0]["status"] == "interrupted"
    assert "interrupted" in cli("runs", "list").out
    (operations.driver.home / ".room").mkdir()  # in the way of what is tried every second: it does not recover
    operations.driver.set_read_only("no room is left")
    assert "READ-ONLY: no room is left" in cli("status").out
    assert json.loads(cli("status", "--format", "json").out)["server"]["read_only"] is True


def test_what_a_server_refuses_is_one_line(cli: Any, operations: Operations) -> None:
    Path("plan.toml").write_text("rounds = 9")
    for argv, says in (
        (["clients", "approve", "nobody"], "no client nobody"),
        (["runs", "stop", "../x"], "there is no run '../x'"),
        (["runs", "add", "plan.toml", "--name", "UP"], "small letters"),
        (["runs", "add", "network.in_process_server:operated", "--name", "x"], "atoll.Plan"),
        (["clients", "token", "--hours", "-1"], "seconds"),
    ):
        said = cli(*argv)
        [line] = [line for line in said.err.splitlines() if not line.startswith("{")]  # what the server logs
        assert said.code != 0 and says in line and said.out == ""


def test_a_home_elsewhere_and_an_address_of_its_own(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with operated(tmp_path / "elsewhere"):
        assert "no server" not in cli("status", "--home", "elsewhere").err
        assert cli("status").code == 5
        url = json.loads((tmp_path / "elsewhere/admin.json").read_text())["url"]
        shutil.copy(tmp_path / "elsewhere/operator.token", tmp_path / "mine")
        assert cli("status", "--admin", url, "--token-file", "mine").code == 0
        (tmp_path / "mine").write_text("x" * 43)
        said = cli("status", "--admin", url, "--token-file", "mine")
        assert said.code == 5 and "operator's token" in said.err
        monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "elsewhere"))
        assert cli("status").code == 0


def test_a_server_that_is_not_there_is_said(cli: Any, tmp_path: Path) -> None:
    assert "atoll serve" in cli("status").err
    with operated(tmp_path / "atoll-server"):
        pass
    assert "no server answers" in cli("status").err
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        answer = "import socket,sys; c,_=socket.socket(fileno=int(sys.argv[1])).accept(); c.recv(9999); "
        answer += "c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n[]')"
        command = [sys.executable, "-c", answer, str(other.fileno())]
        with subprocess.Popen(command, pass_fds=[other.fileno()]):
            said = cli("status", "--admin", url, "--token-file", "atoll-server/operator.token")
    assert said.code == 5 and "no Atoll server" in said.err
    assert "no server answers" in cli("status", "--admin", "nonsense").err


def test_stop_returns_when_the_server_is_gone(cli: Any, operations: Operations) -> None:
    began = time.monotonic()
    assert cli("stop").code == 0
    assert time.monotonic() - began < 10
    assert "no server answers" in cli("stop").err


def test_certificates_are_made_once(cli: Any, tmp_path: Path) -> None:
    said = cli("certs", "keys", "--host", "localhost", "--host", "127.0.0.1", "--client", "north")
    made = ["ca.pem", "server.pem", "server.key", "north.pem", "north.key"]
    assert said.code == 0 and said.out.split() == [f"keys/{name}" for name in made]
    assert "already" in cli("certs", "keys", "--host", "localhost").err
    assert cli("certs", "other").code == 2


def test_commands_of_operators_load_no_torch(tmp_path: Path) -> None:
    """They start in a third of a second, not in three."""
    check = "import sys; from atoll.cli.main import app; sys.argv = ['atoll', 'status']\n"
    check += "try: app()\nexcept Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "RunError False\n", done.stderr
