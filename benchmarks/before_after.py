"""Compare the speed of two commits, in turns in one go, so that whatever else the machine does hits both alike.

    python benchmarks/before_after.py OLD NEW --turns 7
    python benchmarks/before_after.py main . --only scaffold        a directory, here with what is not committed yet
    python benchmarks/before_after.py main main                     how far two equals differ on this machine

Each commit is checked out in a temporary worktree, and gets a process that stays alive and is asked in turns for one
repetition of one work. The first repetition of each is not counted. A ratio is NEW over OLD of the same turn; what is
printed is the median over the turns, with the interval that holds the true median by a sign test (each end is wrong
with a chance of at most 7 %). Tensors are computed with one thread unless --threads gives more: one is less noisy.

run     seconds of a whole `atoll.run`, set-up included; for the network, from the directory of a run to its result
round   the median round of the run, by its own metrics
CPU     processor time of a run, with its worker processes, or of server and clients

A work counts as slower if its run or its round has a median ratio above 1.03 and an interval that lies above 1: then
the exit code is 1. Where both are noise because the machine is busy, CPU still tells. Both commits need `atoll.Plan`,
`atoll.run`, `atoll.ClientApp` and the commands of a federation.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
LIMIT = 1.03
CHANCE = 0.07
"""Of each end of an interval to be on the wrong side of the true median."""
LEAST = 4
"""So many turns that all agree have a chance below that."""
SIDES = ("old", "new")
CLIENTS = 2
ATOLL = (sys.executable, "-c", "from atoll.cli.main import main; main()")
SECONDS = 120.0
"""How long anything on the network may take."""

MNIST = {
    "data": "mnist",
    "partition": {"name": "shards", "num_clients": 100},
    "model": "mlp_2nn",
    "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
    "policy": {"size": 10},
    "evaluation": {"every": 0},
}
MANY = {"model": "logistic", "partition": {"name": "iid", "num_clients": 1000}, "policy": {"size": 100}}
PRIVATE = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-5, "test_noise": True}
NETWORK = "network round"
WORKS = {
    "mlp_2nn, stacked": {"rounds": 25},
    "logistic, 100 a round": {**MANY, "rounds": 80},
    "SCAFFOLD": {"rounds": 18, "algorithm": "scaffold"},
    "CNN": {"rounds": 4, "model": "cnn_mcmahan", "policy": {"size": 2}, "local": {"steps": 8, "lr": 0.1}},
    "trimmed mean": {"rounds": 20, "aggregator": {"name": "trimmed_mean", "f": 2}},
    "two processes": {"rounds": 25, "engine": {"name": "processes", "workers": 2}},
    "asynchronous fleet": {
        **MANY,
        "rounds": 1500,
        "policy": {"name": "asynchronous", "concurrency": 100},
        "devices": "fleet",
    },
    "codec": {"rounds": 18, "uplink": [{"name": "top_k", "fraction": 0.1}, {"name": "quantise", "bits": 8}]},
    "private, central": {**MANY, "rounds": 60, "privacy": PRIVATE, "sampler": {"name": "poisson", "rate": 0.1}},
    NETWORK: {"rounds": 20, "model": "mlp_2nn", "partition": {"name": "iid", "num_clients": CLIENTS}},
}


KERNELS = {
    "mlp_2nn, 10 clients a round": {"rounds": (2, 8)},
    "logistic, 100 clients a round": {**MANY, "rounds": (5, 25)},
    "logistic, asynchronous fleet": {**WORKS["asynchronous fleet"], "rounds": (50, 350)},
    "cnn_mcmahan, 2 clients a round": {
        "model": "cnn_mcmahan",
        "policy": {"size": 2},
        "local": {"steps": 20, "batch_size": 10, "lr": 0.1},
        "rounds": (1, 4),
    },
    "mlp_2nn, asynchronous": {
        "policy": {"name": "asynchronous", "concurrency": 20},
        "devices": "fleet",
        "rounds": (20, 120),
    },
    "mlp_2nn, clients of many sizes": {
        "partition": {"name": "dirichlet", "num_clients": 100, "alpha": 0.3},
        "rounds": (2, 8),
    },
    "mlp_2nn, measured every round": {
        "evaluation": {"every": 1},
        "local": {"steps": 1, "batch_size": 10, "lr": 0.1},
        "rounds": (2, 22),
    },
}
"""What `benchmarks/kernels.py` measures; of each two numbers of rounds."""


class Took(NamedTuple):
    """What one repetition took, in seconds."""

    run: float
    round: float
    cpu: float


class Ratio(NamedTuple):
    """The median of ratios and the interval in which it truly lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios):
        ordered, num = sorted(ratios), len(ratios)
        cut = 0  # so many ratios at each end may be on one side of the true median
        while sum(math.comb(num, k) for k in range(cut + 2)) / 2**num <= CHANCE:
            cut += 1
        return cls(statistics.median(ordered), ordered[cut], ordered[num - 1 - cut])

    @property
    def slower(self):
        return self.median > LIMIT and self.low > 1

    def __str__(self):
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


# The worker: a process that has one of the two commits.


def simulated(name):
    """Run a plan once; "name @ 5" is one of WORKS or KERNELS for so many rounds."""
    import atoll

    name, _, rounds = name.partition(" @ ")
    settings = {**MNIST, **{**WORKS, **KERNELS}[name], **({"rounds": int(rounds)} if rounds else {})}
    start, busy = time.perf_counter(), os.times()
    history = atoll.run(atoll.Plan(**settings)).history
    took, done = time.perf_counter() - start, os.times()
    cpu = sum(done[:4]) - sum(busy[:4])  # user and system, its own and that of children that have ended
    return Took(took, statistics.median(row["round_seconds"] for row in history[1:-1] or history), cpu)


def client():
    """The app of a network's client: numbers as good as any."""
    import numpy as np

    import atoll

    rng = np.random.default_rng(0)
    x, y = rng.random((400, 1, 8, 8), dtype=np.float32), rng.integers(0, 10, 400)
    return atoll.ClientApp(train_x=x, train_y=y, num_classes=10, attributes=dict)


class Federation:
    """A server and clients of one commit, each a process, which work for one run after another."""

    def __init__(self, root):
        import atoll

        self.root, self.number, self.children = root, 0, []
        self.runs = root / "atoll-server" / "runs"
        (root / "plan.toml").write_text(atoll.Plan(**WORKS[NETWORK]).to_toml())
        server = self._start("serve", "--port", "0", "--clients", str(CLIENTS), stdout=subprocess.PIPE)
        url = server.stdout.readline().split()[1].rstrip(",")
        names = [f"client-{number}" for number in range(CLIENTS)]
        for name in names:
            token = self._done("clients", "token").strip()
            self._done("enrol", url, "--token", token, "--name", name, "--home", name)
        self._done("clients", "approve", *names)
        for name in names:
            self._start("join", "--home", name, "--app", "before_after:client", "--all-runs", stdout=subprocess.DEVNULL)

    def _start(self, *words, **options):
        child = subprocess.Popen([*ATOLL, *words], cwd=self.root, stderr=subprocess.DEVNULL, text=True, **options)
        self.children.append(child)
        return child

    def _done(self, *words):
        done = subprocess.run([*ATOLL, *words], cwd=self.root, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise SystemExit(f"atoll {' '.join(words)} failed: {done.stderr}")
        return done.stdout

    def repeat(self):
        """Run the plan once."""
        self.number += 1
        name, busy = f"run-{self.number}", self._cpu()
        self._done("runs", "add", "plan.toml", "--name", name)
        plan, result = self.runs / name / "plan.toml", self.runs / name / "result.json"
        end = time.monotonic() + SECONDS
        while not result.exists():
            if time.monotonic() > end or any(child.poll() is not None for child in self.children):
                raise SystemExit(f"{name} does not end")
            time.sleep(0.01)
        took, cpu = result.stat().st_mtime - plan.stat().st_mtime, self._cpu() - busy
        rows = [json.loads(line) for line in (self.runs / name / "metrics.jsonl").read_text().splitlines()]
        return Took(took, statistics.median(row["round_seconds"] for row in rows[1:-1]), cpu)

    def _cpu(self):
        """Processor seconds of all processes so far, as Linux tells them; not a number elsewhere."""
        try:
            fields = [Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split() for child in self.children]
        except OSError:
            return math.nan
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait(SECONDS)


def work():
    """Answer requests for repetitions, one a line, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed is no answer
    import atoll

    print(Path(atoll.__file__).parent, file=answers)
    federation = None
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name in map(str.strip, sys.stdin):
                if name == NETWORK and federation is None:
                    federation = Federation(Path(directory))
                took = federation.repeat() if name == NETWORK else simulated(name)
                print(json.dumps(took), file=answers)
        finally:
            if federation is not None:
                federation.stop()


# What asks the workers.


class Worker:
    """The process of one commit."""

    def __init__(self, source, threads):
        paths = (source / "src", HERE.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": str(threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, HERE, "--worker"], env=env, cwd=source, **pipes)
        found = self._line()
        if Path(found) != source / "src" / "atoll":
            raise SystemExit(f"{source} should be measured, but Python imports {found}: is another atoll in the way?")

    def repeat(self, name):
        """Let it do a work once."""
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return Took(*json.loads(self._line()))

    def _line(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker has failed: see above")
        return line.strip()

    def stop(self):
        self.process.stdin.close()
        self.process.wait(SECONDS)


@contextlib.contextmanager
def checked_out(name, directory):
    """The files of a commit in a worktree that goes again; a directory is taken as it is."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], capture_output=True)
    if found.returncode:
        if not (Path(name) / "src" / "atoll").is_dir():
            raise SystemExit(f"{name} is neither a commit nor a directory with src/atoll")
        yield Path(name).resolve()
        return
    commit = found.stdout.decode().strip()
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(directory), commit], check=True)
    try:
        yield directory.resolve()
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(directory)], check=True)


def compared(workers, name, turns):
    """Let both do a work in turns; what each repetition took, by side."""
    took = {side: [] for side in SIDES}
    for turn in range(turns + 1):
        for side in SIDES if turn % 2 else reversed(SIDES):
            one = workers[side].repeat(name)
            if turn:
                took[side].append(one)
                print(f"  {name}, turn {turn}, {side}: {one.run:.3f} s", file=sys.stderr)
    return took


def summary(name, took):
    """A row of the table, and whether the work is slower than it was."""
    columns = {side: Took(*map(list, zip(*took[side], strict=True))) for side in SIDES}
    ratios = {}
    for what in Took._fields:
        old, new = (getattr(columns[side], what) for side in SIDES)
        ratios[what] = Ratio.of([b / a for a, b in zip(old, new, strict=True)])
    slower = ratios["run"].slower or ratios["round"].slower
    seconds = " | ".join(f"{statistics.median(columns[side].run):.3f}" for side in SIDES)
    verdict = "slower" if slower else "noise" if max(ratios["run"].median, ratios["round"].median) > LIMIT else "ok"
    return (
        f"| {name} | {seconds} | {ratios['run']} | {ratios['round']} | {ratios['cpu']} | {verdict} |",
        slower,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a directory with src/atoll")
    parser.add_argument("new", help="the same")
    parser.add_argument("--turns", type=int, default=7, help="repetitions that count, of each work on each side")
    parser.add_argument("--threads", type=int, default=1, help="threads for tensors in each process")
    parser.add_argument("--only", default="", help="do only the works whose names hold this")
    args = parser.parse_args()
    names = [name for name in WORKS if args.only.lower() in name.lower()]
    if not names:
        parser.error(f"no work is called so: --only is part of one of: {', '.join(WORKS)}")
    if args.turns < LEAST:
        parser.error(f"--turns is at least {LEAST}: fewer say nothing of the noise")
    rows = [
        "| work | old, s | new, s | run: new / old | round: new / old | CPU: new / old | |",
        "|---|---|---|---|---|---|---|",
    ]
    any_slower = False
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for side in SIDES:
            source = stack.enter_context(checked_out(getattr(args, side), directory / side))
            workers[side] = Worker(source, args.threads)
            stack.callback(workers[side].stop)
        for name in names:
            row, slower = summary(name, compared(workers, name, args.turns))
            print(row, file=sys.stderr)
            rows.append(row)
            any_slower |= slower
    print("\n".join(rows))
    return int(any_slower)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        raise SystemExit(main())
