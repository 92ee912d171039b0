"""A client is installed without the packages of a server: it runs where none of them can be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from network import apps
from network.federation import until
from network.in_process_server import operated, serving

import atoll

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REFUSING = """
import sys
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


def client(tmp_path: Path, code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has none of a server's packages."""
    text = f"PACKAGES = {sorted(MODULES)!r}\n{REFUSING}\n{code}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    env |= {apps.PLAN: str(tmp_path / "plan.toml"), apps.NUMBER: "0"}
    command = [sys.executable, "-c", text, *argv]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


def test_the_packages_of_a_server_are_an_extra_and_are_pinned() -> None:
    assert {"starlette", "uvicorn", "httptools", "sqlalchemy", "psycopg", "prometheus-client"} == PACKAGES
    assert not PACKAGES & names_of(PROJECT["dependencies"])
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").open()}
    assert pins >= PACKAGES
    assert "server" in re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())[0].split(",")


def test_the_modules_of_a_client_are_imported(tmp_path: Path) -> None:
    done = client(tmp_path, IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert client(tmp_path, "import sqlalchemy").returncode == 1  # nothing is there that should not be


def test_a_simulation_runs(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    done = client(tmp_path, COMMAND, "run", "plan.toml", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "report.html").exists()


def test_a_script_simulates(tmp_path: Path) -> None:
    code = f"import atoll\nprint(len(atoll.run(atoll.Plan.from_toml({PLAN.to_toml()!r})).history))"
    done = client(tmp_path, code)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


@pytest.mark.parametrize("command", [[], ["join"], ["enrol"], ["serve"]], ids=" ".join)
def test_commands_say_how_they_are_used(tmp_path: Path, command: list[str]) -> None:
    done = client(tmp_path, COMMAND, *command, "--help")
    assert done.returncode == 0 and ("--home" if command else "serve") in done.stdout, done.stderr


def test_certificates_are_made(tmp_path: Path) -> None:
    done = client(tmp_path, COMMAND, "certs", "certs", "--host", "localhost")
    assert done.returncode == 0 and (tmp_path / "certs" / "server.pem").exists(), done.stderr


def test_a_client_enrols_and_works_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    with operated(tmp_path / "home") as operations, serving(operations) as url:
        operations.add_run("tiny", PLAN)
        token = operations.token(60)
        done = client(tmp_path, COMMAND, "enrol", url, f"--token={token}", "--name", "hospital", "--home", "client")
        assert done.returncode == 0, done.stderr
        operations.approve(["hospital"])
        argv = ["join", "--home", "client", "--app", "network.apps:client", "--once"]
        done = client(tmp_path, COMMAND, *argv)
        assert done.returncode == 0, done.stderr
        until(lambda: operations.all_runs_over, 10, "the end")
        assert (tmp_path / "client" / "runs" / "tiny" / "model.safetensors").exists()


def test_a_server_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    done = client(tmp_path, COMMAND, "serve", "plan.toml")
    assert done.returncode == 5, done.stderr
    assert "pip install 'atoll[server]'" in done.stderr and len(done.stderr.splitlines()) == 1
