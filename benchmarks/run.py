"""Speed side by side: Atoll, a plain PyTorch loop, pfl and Flower's simulation, in one go on one machine.

Each peer runs in a virtual environment of its own, made on demand. Systems take turns, so that a noisy machine is noisy
for all; a figure is the median over the turns of a run's median round. Run: make bench
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

from atoll.core.parts import Part
from atoll.data.fetch import cache_dir

HERE = Path(__file__).parent
VENVS = HERE / ".venvs"

SYSTEMS = {
    "Atoll": (None, "atoll_run.py", ()),
    "plain PyTorch loop": (None, "plain_loop.py", ()),
    "pfl 0.6, one process": ("pfl", "pfl_run.py", ("--processes", "1")),
    "pfl 0.6, two processes": ("pfl", "pfl_run.py", ("--processes", "2")),
    "Flower simulation": ("flower", "flower_run.py", ()),
}

WORK = {
    "mlp_2nn, 100 clients, 10 a round": ("--model", "mlp_2nn", "--rounds", "20"),
    "logistic, 1,000 clients, 100 a round": (
        *("--model", "logistic", "--num-clients", "1000", "--cohort", "100", "--rounds", "20"),
    ),
    "cnn_mcmahan, 100 clients, 10 a round": ("--model", "cnn_mcmahan", "--rounds", "4"),
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


def measure(system, options):
    """Run one system once and return its JSON line, or None if it failed."""
    peer, script, extra = SYSTEMS[system]
    command = [python_of(peer), str(HERE / "peers" / script), "--data", str(cache_dir() / "mnist"), *extra, *options]
    environment = {**os.environ, "ATOLL_BENCH_START": repr(time.time())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{system} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def table(title, unit, figures, notes=()):
    """A Markdown table of one measurement, each system as a ratio to Atoll."""
    ours = figures["Atoll"]
    rows = [f"**{title}**", "", f"| system | {unit} | times Atoll's |", "|---|---|---|"]
    rows += [f"| {name} | {value:.3f} | {value / ours:.1f} |" for name, value in figures.items()]
    return "\n".join([*rows, *notes, ""])


def turns(options, repeats, pick):
    """Let the systems take turns and reduce each one's figures to their median."""
    found = {name: [] for name in SYSTEMS}
    for turn in range(repeats):
        for name in SYSTEMS:
            result = measure(name, options)
            if result is not None:
                found[name].append(pick(result))
                print(f"  turn {turn + 1} {name}: {pick(result):.3f} s", file=sys.stderr)
    return {name: statistics.median(values) for name, values in found.items() if values}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the work whose name holds this")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    args = parser.parse_args()
    Part("mnist").build("data.catalog")  # so that nobody's time holds the download
    tables = []
    for name, options in WORK.items():
        if args.only in name:
            print(name, file=sys.stderr)
            seconds = turns(options, args.repeats, lambda result: statistics.median(result["round_seconds"]))
            tables.append(table(f"{name}, B = 10, E = 1, MNIST, {os.cpu_count()} cores", "seconds a round", seconds))
    if args.only in "time to 97 %":
        print("time to 97 %", file=sys.stderr)
        seconds = turns(TO_TARGET, args.repeats, lambda result: result["total_seconds"])
        title = "mlp_2nn to 97 % test accuracy, lr = 0.2, everything from process start"
        tables.append(table(title, "seconds", seconds))
    text = "\n".join(tables)
    print(text)
    if not args.only:
        head = f"Made by `make bench`; medians over {args.repeats} turns in which the systems alternate.\n\n"
        args.out.write_text(head + text)


if __name__ == "__main__":
    main()
