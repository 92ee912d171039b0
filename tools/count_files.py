"""Count the source files of Atoll that one FedAvg round crosses, in simulation and on the network.

    python tools/count_files.py                 both, one after the other
    python tools/count_files.py simulation      one process, engine "inline"
    python tools/count_files.py network         a server and two clients, each a process, over HTTP on localhost

A file is crossed by a round if at least one of its functions is called (or a generator of it goes on) between two
commits: from the moment at which the coordinator is told that a version is committed until it is told the same of the
next. Five rounds in the middle of a run are looked at, and a file counts if most of them cross it, so that a timer that
fires by chance does not. All threads of all processes are profiled with `sys.setprofile`. Set-up, imports and the end
of the run are not counted, nor are methods that Python generates, such as the constructor of a NamedTuple.

The plan is FedAvg on digits with two clients, without evaluation; in simulation without a run directory, which a server
always has. With --measured every round is evaluated on the test set and has its metrics written in simulation too.

Files are printed in the order in which a round first enters them, with the side (server or client) that does so and the
number of calls in a round, all of it as the median over the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median, mode
from types import FrameType
from typing import Any, NamedTuple

import atoll
from atoll import ClientApp, Plan
from atoll.cli.main import main
from atoll.core.coordinator import Committed, Coordinator

SOURCE = f"{Path(atoll.__file__).parent}{os.sep}"
NUM_CLIENTS = 2
FIRST, NUM_ROUNDS = 2, 5
"""Counting begins with the commit of this version, and goes on for so many rounds."""
PLAN = Plan(
    rounds=FIRST + NUM_ROUNDS + 1,
    partition={"name": "iid", "num_clients": NUM_CLIENTS},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 32},
    policy={"name": "cohort"},
    evaluation={"every": 0},
    engine="inline",
)
MEASURED = PLAN.replace({"evaluation.every": 1})
SECONDS = 120.0
"""How long a federation may take."""
SERVER, COMMAND = "server", "command"
fork = get_context("fork")  # a child begins with everything imported


class Crossed(NamedTuple):
    """A file that a round crosses."""

    file: str
    """Its path inside the package."""
    side: str
    """The side that enters it first; empty in a simulation."""
    calls: int
    """How often functions of it are called in a round, on all sides together."""


class Entry(NamedTuple):
    """The first entry into a file in one round."""

    rank: int
    """How many files were entered before it."""
    side: str
    calls: int


class Trace:
    """The calls of one process, with times of a clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []
        self.commits: dict[int, float] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread, and all that are started meanwhile."""
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        now = time.monotonic()
        if code.co_flags & inspect.CO_OPTIMIZED:  # a function; the bodies of modules and classes are not
            self.calls.append((now, code.co_filename))
        if code is Coordinator.step.__code__ and isinstance(frame.f_locals["event"], Committed):
            self.commits.setdefault(frame.f_locals["state"].version + 1, now)

    def write(self, path: Path) -> None:
        """Write it down for the process that reads the traces of all."""
        path.write_text(json.dumps({"calls": self.calls, "commits": self.commits}))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read what another process wrote."""
        found, written = cls(), json.loads(path.read_text())
        found.calls = [(seconds, file) for seconds, file in written["calls"]]
        found.commits = {int(version): seconds for version, seconds in written["commits"].items()}
        return found


def crossed_by(traces: dict[str, Trace]) -> list[Crossed]:
    """Return the files that all sides together enter in most rounds, in the order of their median rank."""
    commits = {version: seconds for trace in traces.values() for version, seconds in trace.commits.items()}
    versions = range(FIRST, FIRST + NUM_ROUNDS)
    if not {*versions, versions.stop} <= commits.keys():
        raise SystemExit(f"saw the commits of versions {sorted(commits)} only: the run ended too early")
    calls = sorted((*call, side) for side, trace in traces.items() for call in trace.calls)
    rounds = [_entries(calls, commits[version], commits[version + 1]) for version in versions]
    found = []
    for file in {file for each in rounds for file in each}:
        seen = [each[file] for each in rounds if file in each]
        if 2 * len(seen) > NUM_ROUNDS:
            side, number = mode(entry.side for entry in seen), int(median(entry.calls for entry in seen))
            crossed = Crossed(file.removeprefix(SOURCE), side, number)
            found.append((median(entry.rank for entry in seen), crossed))
    return [crossed for _, crossed in sorted(found)]


def _entries(calls: Sequence[tuple[float, str, str]], begin: float, end: float) -> dict[str, Entry]:
    """Return the files that are entered within a time."""
    entries: dict[str, Entry] = {}
    for seconds, file, side in calls:
        if begin <= seconds < end:
            known = entries.get(file, Entry(len(entries), side, 0))
            entries[file] = known._replace(calls=known.calls + 1)
    return entries


def of_simulation(measured: bool) -> list[Crossed]:
    """Run the plan in this process, and return the files of a round."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory, trace.recording():
        atoll.run(MEASURED if measured else PLAN, out=Path(directory) / "run" if measured else None)
    return crossed_by({"": trace})


def client() -> ClientApp:
    """Return the app of a client: the samples that a simulation of the plan would deal it."""
    from atoll.train.federation import build_federation

    federation = build_federation(PLAN)
    dataset, indices = federation.dataset, federation.partition.indices(int(os.environ["COUNT_FILES_CLIENT"]))
    return ClientApp(
        train_x=dataset.train_x[indices],
        train_y=dataset.train_y[indices],
        num_classes=dataset.num_classes,
        scale=dataset.scale,
        shift=dataset.shift,
    )


def of_network(measured: bool) -> list[Crossed]:
    """Run the plan as a server and clients, and return the files of a round."""
    for module in pkgutil.walk_packages([f"{SOURCE}network"], "atoll.network."):
        importlib.import_module(module.name)  # once, before the forks
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "plan.toml").write_text((MEASURED if measured else PLAN).to_toml())
        names = [f"client-{number}" for number in range(NUM_CLIENTS)]
        started = [_start(root, SERVER, ["serve", "plan.toml", "--port", "0", "--clients", str(NUM_CLIENTS)])]
        try:
            url = _until(lambda: _address(root / f"{SERVER}.out"), started)
            for name in names:
                token = _done(root, ["clients", "token"]).strip()
                _done(root, ["enrol", url, "--token", token, "--name", name, "--home", name])
            _done(root, ["clients", "approve", *names])
            for number, name in enumerate(names):
                argv = ["join", "--home", name, "--app", "count_files:client", "--once"]
                started.append(_start(root, name, argv, number))
            _until(lambda: not any(child.is_alive() for child in started[1:]), started)
            _done(root, ["stop"])
            started[0].join(SECONDS)
        finally:
            for child in started:
                child.kill()
                child.join()
        traces = {name: Trace.read(root / f"{name}.json") for name in (SERVER, *names)}
    return [each._replace(side=each.side.partition("-")[0]) for each in crossed_by(traces)]


def _start(root: Path, name: str, argv: Sequence[str], number: int = 0) -> BaseProcess:
    """Run a command of Atoll in a process of its own that writes its trace when it ends."""
    child = fork.Process(target=_command, args=(root, name, argv, number))
    child.start()
    return child


def _command(root: Path, name: str, argv: Sequence[str], number: int = 0) -> None:
    os.chdir(root)
    os.environ["COUNT_FILES_CLIENT"] = str(number)
    sys.path.insert(0, str(Path(__file__).parent))
    out = (root / f"{name}.out").open("w", buffering=1)
    sys.stdout, sys.stderr, sys.argv = out, out, ["atoll", *argv]
    trace = Trace()
    try:
        with nullcontext() if name == COMMAND else trace.recording():
            main()
    finally:
        trace.write(root / f"{name}.json")


def _done(root: Path, argv: Sequence[str]) -> str:
    """Run a command to its end; what it printed."""
    child = _start(root, COMMAND, argv)
    child.join(SECONDS)
    said = (root / f"{COMMAND}.out").read_text()
    if child.exitcode != 0:
        raise SystemExit(f"atoll {' '.join(argv)} ended with {child.exitcode}: {said}")
    return said


def _address(path: Path) -> str:
    """Return the address that a server has printed; empty if it has not yet."""
    said = path.read_text() if path.exists() else ""
    return said.split()[1].rstrip(",") if said.startswith("serving ") and "\n" in said else ""


def _until(done: Callable[[], Any], children: Sequence[BaseProcess]) -> Any:
    """Wait for something to come true, unless a process fails or time is over."""
    end = time.monotonic() + SECONDS
    while not (found := done()):
        failed = [child for child in children if child.exitcode]
        if failed or time.monotonic() > end:
            raise SystemExit(f"the federation {'failed' if failed else f'took more than {SECONDS:g} seconds'}")
        time.sleep(0.02)
    return found


COUNTS = {"simulation": of_simulation, "network": of_network}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="?", choices=[*COUNTS], help="what to count; both unless given")
    parser.add_argument("--measured", action="store_true", help="count evaluation and the writing of metrics too")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with [file, side, calls] in order")
    args = parser.parse_args()
    found = {name: COUNTS[name](args.measured) for name in ([args.where] if args.where else COUNTS)}
    if args.json:
        print(json.dumps(found))
        return
    for name, files in found.items():
        print(f"{name}: a FedAvg round crosses {len(files)} files\n")
        for number, each in enumerate(files, 1):
            print(f"{number:4}  {each.side:7} {each.calls:7}  {each.file}")
        print()


if __name__ == "__main__":
    _main()
