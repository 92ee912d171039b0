"""A real browser for tests of the live page, the page's server, and run directories to show."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from network.federation import until
from ui.serving import served

from atoll.network.server.access import Access
from atoll.ui.runs import Status
from atoll.ui.serving import local_link

FRONTEND = Path(__file__).parents[2] / "frontend"
AXE = FRONTEND / "node_modules" / "axe-core" / "axe.min.js"
INSTALL = "install it with: apt-get install chromium (or name another in CHROMIUM); pip install --group dev"
PAGES = {
    "#/": "table",
    "#/run/demo-1": "canvas",
    "#/run/demo-1?view=clients": "svg path",
    "#/run/demo-1?view=data": ".confusion",
    "#/run/demo-1?view=ledger": ".note",
    "#/run/demo-1?view=plan": "pre",
    "#/run/demo-1?view=log": "pre",
    "#/run/demo-1?view=files": ".files li",
    "#/compare?id=demo-1&id=sweep/lr=0.1/seed0": "canvas",
    "#/compare": ".button",
    "#/access": "table",
}
"""Pages of the directory of runs that tests share, and something that each shows once it is there."""
PLAN = """name = "{name}"
seed = {seed}
rounds = {rounds}
algorithm = "fedavg"
data = "mnist"
model = "mlp_2nn"
"""


def chromium() -> str:
    """Return the path of chromium; skip the test where chromium or playwright is missing."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip(f"there is no chromium: {INSTALL}")
    pytest.importorskip("playwright", reason=f"there is no playwright: {INSTALL}")
    return path


@contextmanager
def launched() -> Iterator[Any]:
    """Start a browser; as root, chromium cannot use its own sandbox."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


class Server:
    """The page of a directory of runs, in a process of its own as `atoll ui` starts it."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "atoll.cli.main", "ui", str(directory), "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.link = self._process.stdout.readline().strip()
        assert "#token=" in self.link, f"the page was not served: {self.link}"

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process by a signal, and wait for its end."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.communicate()


@contextmanager
def process(directory: Path, port: int = 0) -> Iterator[Server]:
    """Serve a directory of runs in a process of its own."""
    server = Server(directory, port)
    try:
        yield server
    finally:
        server.end()


class Going(NamedTuple):
    """Runs of this process that are going on; the locks of runs are seen by other processes only."""

    runs: tuple[str, ...]

    def states(self) -> dict[str, Status]:
        return {run: Status("running") for run in self.runs}


@contextmanager
def link_to(directory: Path, *going: str) -> Iterator[str]:
    """Serve runs in this process, which takes less time, some of them going on; yield a link that opens any browser."""
    with served(directory, live=Going(going)) as url:
        yield local_link(Access(directory), int(url.rpartition(":")[2]))


class Problems(list[str]):
    """Errors of a page's scripts and of its security policy, which no test may cause."""

    def watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.append(f"error: {error}"))
        page.on(
            "console", lambda message: self.append(message.text) if "Content Security Policy" in message.text else None
        )


@contextmanager
def opened(browser: Any, link: str, **options: Any) -> Iterator[Any]:
    """Open the page by its link, in a profile of its own; fail if its scripts fail."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-GB", **options})
    page, problems = context.new_page(), Problems()
    problems.watch(page)
    page.goto(link)
    page.wait_for_selector("main h1")
    yield page
    context.close()
    assert not problems


def go(page: Any, route: str) -> None:
    """Show another page, by its fragment."""
    page.evaluate("route => { location.hash = route }", route)


def wait_for(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page; it goes through the debugger, as the page allows no eval."""
    until(lambda: page.evaluate(expression), 30, expression)


def serious(page: Any) -> list[str]:
    """Return what axe finds serious or critical, each with the first element concerned.

    The script is run through the debugger, so that the page's policy need not allow it.
    """
    if not AXE.is_file():
        pytest.skip("axe-core is not there: make ui installs it")
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": AXE.read_text("utf-8")})
    found = session.send(
        "Runtime.evaluate",
        {"expression": "axe.run().then(r => JSON.stringify(r.violations))", "awaitPromise": True},
    )
    session.detach()
    violations = json.loads(found["result"]["value"])
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]} ({each['nodes'][0]['failureSummary'][:300]})"
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


def row_of(number: int, rounds: int = 100, *, shift: float = 0.0, tested: bool = True) -> dict[str, Any]:
    """Return a line of metrics.jsonl, with curves that look like training."""
    loss = 2.3 * math.exp(-4 * number / rounds) + 0.1 + 0.02 * math.sin(number)
    row: dict[str, Any] = {
        "round": number,
        "clients": 10,
        "samples": 6000,
        "train_loss": 0.8 * loss,
        "bytes_up": 8_000_000 * number,
        "bytes_down": 8_000_000 * number,
        "failed": 0,
        "rejected": 0,
        "abandoned": 0,
        "seconds": 0.5 * number,
    }
    if tested:
        row["test"] = {"accuracy": 0.95 - 0.3 * loss + shift, "loss": loss, "f1": 0.94 - 0.3 * loss + shift}
    return row


def write_run(
    path: Path,
    rounds: int = 30,
    *,
    name: str = "",
    seed: int = 0,
    planned: int = 0,
    clients: int = 10,
    ended: bool = True,
    shift: float = 0.0,
) -> Path:
    """Write the directory of a run, with the files that the page shows."""
    path.mkdir(parents=True)
    name = name or path.name
    (path / "plan.toml").write_text(PLAN.format(name=name, seed=seed, rounds=planned or rounds))
    info = {
        "atoll": "0.1.0",
        "name": name,
        "identity": "402f618636d3caec",
        "engine": {"name": "inline"},
        "model": {"name": "mlp_2nn", "num_params": 199210},
        "data": {"name": "mnist", "num_train": 60000, "num_test": 10000, "num_classes": 3},
        "num_clients": clients,
        "started": f"2026-01-02T03:{seed % 60:02d}:05+00:00",
    }
    (path / "run.json").write_text(json.dumps(info))
    rows = [row_of(number, rounds, shift=shift) for number in range(1, rounds + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = list(range(clients))
    spread = [0.5 + 0.4 * (number * 7 % clients) / clients for number in numbers]
    (path / "clients.json").write_text(json.dumps({"round": rounds, "clients": numbers, "accuracy": spread}))
    counts = [[(number * 13 + label * 29) % 50 for label in range(3)] for number in numbers]
    (path / "partition.json").write_text(json.dumps({"clients": numbers, "counts": counts, "num_clients": clients}))
    matrix = [[90, 5, 5], [2, 96, 2], [10, 0, 90]]
    (path / "confusion.json").write_text(json.dumps({"round": rounds, "matrix": matrix}))
    (path / "log.txt").write_text("begins after round 0\n")
    if ended:
        result = {"reason": "all rounds done", "rounds": rounds, "seconds": 1.0, "test": rows[-1]["test"]}
        (path / "result.json").write_text(json.dumps(result))
    return path


def append_rows(path: Path, *rows: dict[str, Any]) -> None:
    """Add rounds to a run, as its process does."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def running(path: Path, rounds: int, planned: int = 60, clients: int = 10) -> Any:
    """Write a run that is going on; return what holds its lock, as its process does."""
    write_run(path, rounds, planned=planned, clients=clients, ended=False)
    lock = (path / ".lock").open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    return lock
