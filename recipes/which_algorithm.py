"""Which algorithm when: every algorithm on one skewed federation, several seeds, one table and one picture.

Fashion-MNIST dealt to 100 clients by Dirichlet(0.1), logistic regression, 10 clients a round, five epochs in batches of
10. Options were chosen on seed 100, which the table leaves out. Runs are kept: stop it and start it again at will.

    python recipes/which_algorithm.py            # writes docs/which_algorithm.table.md and .png
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from atoll import Plan, run
from atoll.report.reading import read_run

BASE = Plan(
    rounds=60,
    data="fashion_mnist",
    partition={"name": "dirichlet", "num_clients": 100, "alpha": 0.1, "min_samples": 10},
    model="logistic",
    policy={"size": 10},
    local={"epochs": 5, "lr": 0.02},
)
OPTIONS: dict[str, dict[str, object]] = {
    "fedavg": {"local.lr": 0.1},
    "fedprox": {"algorithm.mu": 0.1},
    "scaffold": {"local.lr": 0.05},
    "fednova": {},
    "feddyn": {"algorithm.alpha": 0.1},
    "fedavgm": {"algorithm.momentum": 0.5},
    "fedadagrad": {"server.lr": 0.01},
    "fedadam": {"server.lr": 0.003},
    "fedyogi": {"server.lr": 0.003},
    "fedexp": {},
    "fedsam": {"local.lr": 0.1},
    "moon": {"local.lr": 0.1},
    "qffl": {"algorithm.q": 0.1, "local.lr": 0.1},
    "afl": {"local.lr": 0.1},
}
LAST = 10
"""Accuracies swing from round to round, so a run's figure is the mean of its last evaluations."""


def accuracies(name: str, seed: int, rounds: int, runs: Path) -> list[float]:
    """The test accuracy after every round, in percent."""
    plan = BASE.replace({"seed": seed, "rounds": rounds, "algorithm": name, "name": name, **OPTIONS[name]})
    path = runs / f"{name}-{seed}"
    if not (path / "result.json").exists():
        print(f"{name}, seed {seed}")
        run(plan, out=path, resume=(path / "plan.toml").exists(), progress=True)
    return [100 * row["test"]["accuracy"] for row in read_run(path).rows]


def main() -> None:
    """Run what is missing, then write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=BASE.rounds)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--runs", type=Path, default=Path("runs/which_algorithm"))
    parser.add_argument("--out", type=Path, default=Path("docs/which_algorithm"))
    args = parser.parse_args()
    curves = {name: [accuracies(name, seed, args.rounds, args.runs) for seed in args.seeds] for name in args.only}
    ends = {name: [statistics.fmean(curve[-LAST:]) for curve in each] for name, each in curves.items()}
    ranked = sorted(ends, key=lambda name: -statistics.fmean(ends[name]))
    plain = statistics.fmean(ends["fedavg"]) if "fedavg" in ends else float("nan")
    lines = ["| algorithm | accuracy, % | lowest to highest seed | above FedAvg, points |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {statistics.fmean(ends[name]):.1f} | {min(ends[name]):.1f} to {max(ends[name]):.1f} "
        f"| {statistics.fmean(ends[name]) - plain:+.1f} |"
        for name in ranked
    ]
    table = "\n".join(lines)
    print(table)
    args.out.with_suffix(".table.md").write_text(table + "\n")
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for place, name in enumerate(ranked):
        mean = [statistics.fmean(values) for values in zip(*curves[name], strict=True)]
        smooth = [statistics.fmean(mean[max(0, i - LAST + 1) : i + 1]) for i in range(len(mean))]
        width, dashes = 3 if name == "fedavg" else 1.5, "-" if place < 7 else "--"
        axes.plot(range(1, len(smooth) + 1), smooth, dashes, color=f"C{place % 7}", label=name, linewidth=width)
    axes.set(
        ylim=(40, None), xlabel="round", ylabel=f"test accuracy, %, mean of {LAST} rounds and {len(args.seeds)} seeds"
    )
    axes.legend(ncols=2, frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(args.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
