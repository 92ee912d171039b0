"""Speed side by side: Atoll, a plain PyTorch loop, pfl and Flower's simulation, in one go on one machine.

Each peer runs in a virtual environment of its own, made on demand. Systems take turns, so that a noisy machine is noisy
for all; a figure is the median over the turns of a run's median round. Run: make bench
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll.core.parts import Part
from atoll.data.fetch import cache_dir

HERE = Path(__file__).parent
VENVS = HERE / ".venvs"

SYSTEMS = {
    "Atoll": (None, "atoll_run.py", ()),
    "plain PyTorch loop": (None, "plain_loop.py", ()),
    "pfl 0.6, one process": ("pfl", "pfl_run.py", ("--processes", "1")),
    "pfl 0.6, two processes": ("pfl", "pfl_run.py", ("--processes", "2")),
    "Flower 1.41 simulation": ("flower", "flower_run.py", ()),
}


class Work(NamedTuple):
    options: tuple[str, ...]
    dataset: str = "mnist"
    unit: str = "seconds a round"


WORK = {
    "mlp_2nn, 100 clients, 10 a round": Work(("--model", "mlp_2nn", "--rounds", "20")),
    "logistic, 1,000 clients, 100 a round": Work(
        ("--model", "logistic", "--num-clients", "1000", "--cohort", "100", "--rounds", "20"),
    ),
    "cnn_mcmahan, 100 clients, 10 a round": Work(("--model", "cnn_mcmahan", "--rounds", "4")),
    "cnn_cifar, 1,000 clients of 50 samples, 50 a round (pfl's CIFAR-10 benchmark)": Work(
        (
            *("--dataset", "cifar10", "--model", "cnn_cifar", "--num-clients", "1000", "--samples-per-client", "50"),
            *("--cohort", "50", "--rounds", "4"),
        ),
        "cifar10",
    ),
    "logistic, 1,000 clients, 10 a round, 100 rounds (FLUTE's LR-MNIST job)": Work(
        ("--model", "logistic", "--num-clients", "1000", "--cohort", "10", "--rounds", "100", "--lr", "0.03"),
        unit="seconds of all rounds",
    ),
}
TO_TARGET = ("--model", "mlp_2nn", "--rounds", "100", "--lr", "0.2", "--target", "0.97")


def python_of(peer):
    """The interpreter of a peer's own environment, made when first needed."""
    if peer is None:
        return sys.executable
    home = VENVS / peer
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"installing {peer} (once) ...", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-r", HERE / "peers" / f"requirements-{peer}.txt"], check=True
        )
        (home / "installed").touch()
    return str(python)


def folder_of(dataset):
    """The folder that peers read a data set from, filled before anybody's time is taken."""
    loaded = Part(dataset).build("data.catalog")
    if dataset == "mnist":
        return cache_dir() / "mnist"
    folder = VENVS / dataset
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (
        *(("x_train", loaded.train_x), ("y_train", loaded.train_y)),
        *(("x_t10k", loaded.test_x), ("y_t10k", loaded.test_y)),
    ):
        if not (folder / f"{name}.npy").exists():
            np.save(folder / f"{name}.npy", np.asarray(values, dtype=np.uint8))
    return folder


def measure(system, options, folder):
    """Run one system once and return its JSON line, or None if it failed."""
    peer, script, extra = SYSTEMS[system]
    command = [python_of(peer), str(HERE / "peers" / script), "--data", str(folder), *extra, *options]
    environment = {**os.environ, "ATOLL_BENCH_START": repr(time.time())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{system} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def table(title, unit, turns):
    """A Markdown table of one measurement: the median of each system's turns, their range, and a ratio to Atoll."""
    ours = statistics.median(turns["Atoll"])
    rows = [f"**{title}**", "", f"| system | {unit} | least to most | times Atoll's |", "|---|---|---|---|"]
    for name, values in turns.items():
        middle = statistics.median(values)
        rows.append(f"| {name} | {middle:.3g} | {min(values):.3g} to {max(values):.3g} | {middle / ours:.1f} |")
    return "\n".join([*rows, ""])


def turns(options, repeats, pick, folder):
    """Let the systems take turns; return the figure of each turn, by system."""
    found = {name: [] for name in SYSTEMS}
    for turn in range(repeats):
        for name in SYSTEMS:
            result = measure(name, options, folder)
            if result is not None:
                found[name].append(pick(result))
                print(f"  turn {turn + 1} {name}: {pick(result):.3f} s", file=sys.stderr)
    return {name: values for name, values in found.items() if values}


def processor():
    """The model of this machine's processor, where it says so."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the work whose name holds this")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    args = parser.parse_args()
    tables = []
    for name, work in WORK.items():
        if args.only in name:
            print(name, file=sys.stderr)
            whole = work.unit != "seconds a round"
            pick = (lambda r: sum(r["round_seconds"])) if whole else (lambda r: statistics.median(r["round_seconds"]))
            seconds = turns(work.options, args.repeats, pick, folder_of(work.dataset))
            tables.append(table(f"{name}, B = 10, E = 1, {work.dataset}, {os.cpu_count()} cores", work.unit, seconds))
    if args.only in "time to 97 %":
        print("time to 97 %", file=sys.stderr)
        seconds = turns(TO_TARGET, args.repeats, lambda result: result["total_seconds"], folder_of("mnist"))
        title = "mlp_2nn to 97 % test accuracy, lr = 0.2, everything from process start"
        tables.append(table(title, "seconds", seconds))
    text = "\n".join(tables)
    print(text)
    if not args.only:
        machine = f"{os.cpu_count()} cores of {processor()}"
        head = (
            f"# Speed beside others\n\nMade by `make bench` on {machine}: medians over {args.repeats} turns in which "
            "the systems alternate.\nFlower is 1.41 and pfl 0.6, as `benchmarks/peers/requirements-*.txt` pin them.\n\n"
        )
        args.out.write_text(head + text)


if __name__ == "__main__":
    main()
