"""A client is installed without the packages of a server: it runs where none of them can be imported."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from network import apps
from network.federation import until
from network.fork_server import ForkServer
from network.in_process_server import operated, serving

import atoll

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REFUSING = """
import sys
for name in list(sys.modules):  # what the process that this one was forked from has imported
    if name.partition(".")[0] in ("atoll", *PACKAGES):
        del sys.modules[name]
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refusing())
"""
IMPORT_ALL = """
import importlib, pkgutil, atoll.network.client, atoll.network.protocol
for room in (atoll.network.client, atoll.network.protocol):
    names = [each.name for each in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]
    assert len(names) > 5
    for name in names: importlib.import_module(name)
"""
COMMAND = "from atoll.cli.main import main; main()"
PLAN = atoll.Plan(data="digits", partition={"num_clients": 2}, policy={"size": 1, "min_reports": 1}, rounds=2)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", each)[0] for each in requirements}


PACKAGES = names_of(PROJECT["optional-dependencies"]["server"])
MODULES = {name.replace("-", "_") for name in PACKAGES}


class Ended(NamedTuple):
    """How a process ended."""

    returncode: int
    stdout: str
    stderr: str


Client = Callable[..., Ended]


@pytest.fixture
def client(processes: ForkServer, tmp_path: Path) -> Client:
    """Run code in an interpreter that has none of a server's packages; all of Atoll is imported anew."""
    numbers = count()

    def call(code: str, *argv: str) -> Ended:
        script, out, err = (tmp_path / f"{next(numbers)}.{kind}" for kind in ("py", "out", "err"))
        script.write_text(f"PACKAGES = {sorted(MODULES)!r}\n{REFUSING}\n{code}")
        env = {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
            apps.PLAN: str(tmp_path / "plan.toml"),
            apps.NUMBER: "0",
        }
        ended = processes.start([script.name, *argv], out, tmp_path, env, err=err, python=True)
        return Ended(ended.wait(300), ended.said, err.read_text())

    return call


def test_the_packages_of_a_server_are_an_extra_and_are_pinned() -> None:
    assert {"starlette", "uvicorn", "httptools", "sqlalchemy", "psycopg", "prometheus-client"} == PACKAGES
    assert not PACKAGES & names_of(PROJECT["dependencies"])
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").open()}
    assert pins >= PACKAGES
    assert "server" in re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())[0].split(",")


def test_the_modules_of_a_client_are_imported(client: Client) -> None:
    done = client(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert client("import sqlalchemy").returncode == 1  # nothing is there that should not be


def test_a_simulation_runs(client: Client, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    done = client(COMMAND, "run", "plan.toml", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "report.html").exists()


def test_a_script_simulates(client: Client) -> None:
    code = f"import atoll\nprint(len(atoll.run(atoll.Plan.from_toml({PLAN.to_toml()!r})).history))"
    done = client(code)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


@pytest.mark.parametrize("command", [[], ["join"], ["enrol"], ["serve"]], ids=" ".join)
def test_commands_say_how_they_are_used(client: Client, command: list[str]) -> None:
    done = client(COMMAND, *command, "--help")
    assert done.returncode == 0 and ("--home" if command else "serve") in done.stdout, done.stderr


def test_certificates_are_made(client: Client, tmp_path: Path) -> None:
    done = client(COMMAND, "certs", "certs", "--host", "localhost")
    assert done.returncode == 0 and (tmp_path / "certs" / "server.pem").exists(), done.stderr


def test_a_client_enrols_and_works_to_the_end(client: Client, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    with operated(tmp_path / "home") as operations, serving(operations) as url:
        operations.add_run("tiny", PLAN)
        token = operations.token(60)
        done = client(COMMAND, "enrol", url, f"--token={token}", "--name", "hospital", "--home", "client")
        assert done.returncode == 0, done.stderr
        operations.approve(["hospital"])
        argv = ["join", "--home", "client", "--app", "network.apps:client", "--once"]
        done = client(COMMAND, *argv)
        assert done.returncode == 0, done.stderr
        until(lambda: operations.all_runs_over, 10, "the end")
        assert (tmp_path / "client" / "runs" / "tiny" / "model.safetensors").exists()


def test_a_server_says_what_to_install(client: Client, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    done = client(COMMAND, "serve", "plan.toml")
    assert done.returncode == 5, done.stderr
    assert "pip install 'atoll[server]'" in done.stderr and len(done.stderr.splitlines()) == 1
