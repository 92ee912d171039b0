"""What imports pull in: `import atoll` and the command line start quickly, and a client needs no server's libraries."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

HEAVY = {
    *("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "dp_accounting"),
    *("cryptography", "msgspec", "safetensors", "zstandard", "httpx2", "rich"),
    *("sqlalchemy", "psycopg", "starlette", "uvicorn", "httptools", "prometheus_client"),
}
SERVER = {"sqlalchemy", "psycopg", "starlette", "uvicorn", "h11", "httptools", "prometheus_client"}
"""What only a server needs."""
NAMES = (
    "import sys, json; "
    "print(json.dumps([name for name in sys.modules if '.' not in name or name.startswith('atoll.')]))"
)
COMMANDS = (
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["sweep", "--help"],
    ["serve", "--help"],
    ["join", "--help"],
    ["data", "--help"],
    ["privacy", "--help"],
    ["ledger", "--help"],
    ["clients", "--help"],
    ["runs", "--help"],
)
TURNS = 7
MOST_IMPORT, MOST_HELP = 8.0, 20.0
"""How many times as long as bare Python `import atoll` and `atoll --help` take at most; about 1.5 and 8 are usual."""


def python(code: str, *argv: str) -> str:
    """Run code in a fresh interpreter; what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(code: str) -> set[str]:
    """Names of top-level modules, and of all modules of Atoll, that there are after some code."""
    return set(json.loads(python(f"import sys\n{code}; {NAMES}").splitlines()[-1]))


def test_import_atoll_imports_nothing_else() -> None:
    names = imported("import atoll")
    assert not names & HEAVY
    assert {name for name in names if name.startswith("atoll")} == {"atoll"}


def test_a_plan_needs_no_tensors() -> None:
    assert not imported("from atoll import AtollError, Part, Plan; Plan().to_toml()") & HEAVY


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_help_imports_only_the_command_line(argv: list[str]) -> None:
    names = imported(
        f"import sys; sys.argv = ['atoll', *{argv}]\n"
        "from atoll.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "pass"
    )
    assert "typer" in names
    assert not names & HEAVY
    assert {name.split(".")[1] for name in names if name.startswith("atoll.")} <= {"cli", "core"}


def test_a_client_needs_no_database_and_no_web_server() -> None:
    names = imported(
        "import importlib, pkgutil, atoll.network.client, atoll.network.protocol\n"
        "for room in (atoll.network.client, atoll.network.protocol):\n"
        "    for each in pkgutil.iter_modules(room.__path__, f'{room.__name__}.'): importlib.import_module(each.name)\n"
        "from atoll import ClientApp, Floors"
    )
    assert {"atoll.network.client.app", "atoll.network.protocol.agreement", "torch", "httpx2"} <= names
    assert not names & SERVER
    assert not any(name.startswith("atoll.network.server") for name in names)


def test_runs_that_compile_nothing_do_not_import_the_compiler() -> None:
    """Private steps are tried before training; layouts of updates and models that are measured have no values."""
    names = imported(
        "import numpy, torch, atoll\n"
        "from atoll.network.client.agreeing import _model_bytes\n"
        "from atoll.core.messages import Update\n"
        "privacy = {'name': 'sample', 'clip': 1.0, 'sigma': 1.0, 'delta': 1e-4}\n"
        "assert atoll.run(atoll.Plan(rounds=0, privacy=privacy, engine='vectorised')).history == []\n"
        "layout = Update(*(torch.empty(size, device='meta') for size in (3, ())), {})\n"
        "layout = layout._replace(aux={'control': layout.delta_D, 'steps': layout.weight})\n"
        "assert layout.vector().shape == (6,) and layout.vector().is_meta\n"
        "x = numpy.zeros((2, 3), dtype=int)\n"
        "tokens = dict(train_x=x, train_y=x, test_x=x, test_y=x, num_classes=9, tokens=True)\n"
        "model = {'name': 'char_lstm', 'embedding': 2, 'hidden': 6, 'layers': 1}\n"
        "num_bytes = _model_bytes(atoll.Plan(model=model), atoll.Dataset(name='tokens', **tokens))\n"
        "assert num_bytes == 4 * (9 * 2 + 4 * 6 * (2 + 6 + 2) + 9 * 6 + 9), num_bytes\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    assert "torch" in names


def test_imports_take_little_longer_than_bare_python() -> None:
    """The best of some turns each, and as a ratio: what else the machine does hits all of them."""
    codes = {
        "bare": "pass",
        "import": "import atoll",
        "help": "import sys; sys.argv = ['atoll', '--help']\nfrom atoll.cli.main import main\nmain()",
    }
    best = dict.fromkeys(codes, float("inf"))
    for _ in range(TURNS):
        for name, code in codes.items():
            start = time.perf_counter()
            python(code)
            best[name] = min(best[name], time.perf_counter() - start)
    assert best["import"] < MOST_IMPORT * best["bare"], best
    assert best["help"] < MOST_HELP * best["bare"], best
