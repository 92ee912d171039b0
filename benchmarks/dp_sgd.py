"""What privacy of samples costs: Atoll's private steps beside its plain ones, and Opacus in each of its modes.

One client holds MNIST's 60,000 training samples, a batch is 240 of them on average, one thread. A private step is
everything: drawing the batch, clipping, noise, the optimiser. Opacus draws its noise with torch's generator, Atoll from
AES in whole numbers. Opacus gets batches gathered by one index, and once from its own loader. Systems take turns; a
figure is the median over turns of a run's median step. Run: python benchmarks/dp_sgd.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from run import HERE, python_of

from atoll.core.parts import Part
from atoll.data.fetch import cache_dir

WARM = 3
"""Rounds before the clock starts: Atoll records a step for each width of batch that it meets."""
FEW = ("--steps", "2")
"""For systems that take long."""

SYSTEMS = {
    "Atoll, plain SGD": (None, "dp_run.py", ()),
    "Atoll, private": (None, "dp_run.py", ("--private",)),
    "Atoll, private, inline": (None, "dp_run.py", ("--private", "--engine", "inline")),
    "Opacus 1.6, ghost": ("opacus", "opacus_run.py", ("--mode", "ghost")),
    "Opacus 1.6, ghost, its own loader": ("opacus", "opacus_run.py", ("--mode", "ghost", "--batches", "loader")),
    "Opacus 1.6, hooks": ("opacus", "opacus_run.py", ("--mode", "hooks", *FEW)),
    "Opacus 1.6, ew": ("opacus", "opacus_run.py", ("--mode", "ew", *FEW)),
    "Opacus 1.6, functorch": ("opacus", "opacus_run.py", ("--mode", "functorch", *FEW)),
}


def measure(system, model, rounds):
    """Run one system once; the median of its steps in milliseconds."""
    peer, script, extra = SYSTEMS[system]
    command = [python_of(peer), str(HERE / "peers" / script), "--data", str(cache_dir() / "mnist"), "--model", model]
    command += ["--batch-size", "240", "--rounds", str(rounds + WARM), "--num-clients", "1", "--cohort", "1", *extra]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    return 1000 * statistics.median(json.loads(lines[-1])["step_seconds"][WARM:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds in each turn")
    parser.add_argument("--model", default="mlp_2nn")
    parser.add_argument("--only", default="", help="run only the systems whose name holds this")
    parser.add_argument("--out", type=Path, default=HERE / "dp_sgd.md")
    args = parser.parse_args()
    Part("mnist").build("data.catalog")  # so that nobody's time holds the download
    names = [name for name in SYSTEMS if args.only in name]
    found = {name: [] for name in names}
    for turn in range(args.repeats):
        for name in names:
            found[name].append(measure(name, args.model, args.rounds))
            print(f"  turn {turn + 1} {name}: {found[name][-1]:.2f} ms", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in found.items()}
    plain = medians.get("Atoll, plain SGD", next(iter(medians.values())))
    rows = [
        f"**{args.model}, B = 240, MNIST, one thread**",
        "",
        "| system | ms a step | times plain SGD |",
        "|---|---|---|",
    ]
    rows += [f"| {name} | {value:.2f} | {value / plain:.2f} |" for name, value in medians.items()]
    print("\n".join(rows))
    if not args.only:
        head = (
            f"Made by `python benchmarks/dp_sgd.py`; medians over {args.repeats} turns in which the systems alternate."
        )
        args.out.write_text("\n".join([head, "", *rows, ""]))


if __name__ == "__main__":
    main()
