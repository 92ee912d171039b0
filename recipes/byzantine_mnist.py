"""The benchmark of ByzFL (Gonzalez et al. 2025, arXiv:2505.24802): MNIST, 10 honest clients and f bad ones.

Label similarity gamma from IID (1) to sorted (0), f from 1 to 4, the worst of sign flip, optimised IPM and optimised
ALIE; one defence for the whole table. Runs are kept: stop it and start it again at will. A row of the table is written
as soon as it is done.

    python recipes/byzantine_mnist.py            # writes docs/byzantine-mnist.md and .png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from atoll import Plan
from atoll.matrix import run_matrix
from atoll.report.figures import save_png
from atoll.report.matrix_picture import heat_maps

DEFENCE = "sybils+norm_clipping"
ATTACKS = {"ipm:factor=1": "sign flip", "ipm:factor=optimised": "IPM", "alie:factor=optimised": "ALIE"}
"""The sign flip of ByzFL sends the mean of the honest updates with the sign turned, which is IPM with factor 1."""
F = [1, 2, 3, 4]
PUBLISHED = {
    1.0: [0.98, 0.98, 0.98, 0.98],
    0.66: [0.98, 0.97, 0.97, 0.97],
    0.33: [0.98, 0.97, 0.94, 0.94],
    0.0: [0.87, 0.61, 0.26, 0.27],
}
"""The best cells of their table, each by whichever rule does best there."""
PLAN = Plan.from_toml(Path(__file__).with_suffix(".toml").read_text())

Found = dict[tuple[float, int], tuple[float, str]]
"""(gamma, f) -> the lowest accuracy of any attack, and the name of that attack."""


def worst(gamma: float, args: argparse.Namespace) -> Found:
    """A row of the table, whose runs are made if there are none."""
    plan = PLAN.replace({"partition.gamma": gamma, "name": f"MNIST, gamma = {gamma:g}"})
    out = args.runs / f"gamma-{gamma:g}"
    matrix = run_matrix(
        plan,
        attacks=[*ATTACKS],
        defences=[DEFENCE],
        f=args.f,
        seeds=args.seeds,
        out=out,
        workers=args.workers,
        progress=True,
    )
    found: Found = {}
    for f in args.f:
        accuracy, attack, _, missing = matrix.worst(DEFENCE, f)
        if accuracy is None or missing:
            raise SystemExit(f"gamma = {gamma:g}, f = {f}: no number for {', '.join(missing)}; look into {out}")
        found[gamma, f] = accuracy, ATTACKS[attack]
    return found


def table(found: Found, seeds: list[int]) -> str:
    """What was found beside what was published, as Markdown."""
    lines = [
        f"Made by `python recipes/byzantine_mnist.py`; defence `{DEFENCE}`, seeds {', '.join(map(str, seeds))}. "
        "Accuracy under the worst attack, which is named; in brackets the best published.",
        "",
        f"| gamma | {' | '.join(f'f = {f}' for f in F)} |",
        f"|---|{'---|' * len(F)}",
    ]
    for gamma, cells in PUBLISHED.items():
        texts = []
        for f, best in zip(F, cells, strict=True):
            accuracy, attack = found.get((gamma, f), (None, ""))
            texts.append(f"{'-' if accuracy is None else f'{accuracy:.3f} {attack}'} ({best:.2f})")
        lines.append(f"| {gamma:g} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def write(found: Found, args: argparse.Namespace) -> None:
    """Write the table and the picture of all cells that are known."""
    (args.out / "byzantine-mnist.md").write_text(table(found, args.seeds))
    ours_GF = np.array([[found.get((gamma, f), (np.nan, ""))[0] for f in F] for gamma in PUBLISHED])
    theirs_GF = np.array(list(PUBLISHED.values()))
    none = [[""] * len(F) for _ in PUBLISHED]
    maps = [("one defence, the worst attack", ours_GF, none), ("the best published", theirs_GF, none)]
    rows, columns = [f"{gamma:g}" for gamma in PUBLISHED], [f"{f} bad of {10 + f}" for f in F]
    save_png(heat_maps(maps, rows, columns, "Test accuracy", "gamma"), args.out / "byzantine-mnist.png")


def main() -> None:
    """Run what is missing, the hardest data first, and write what is known after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--gammas", type=float, nargs="+", default=[0.0, 0.33, 0.66, 1.0], choices=list(PUBLISHED))
    parser.add_argument("--f", type=int, nargs="+", default=[4, 3, 2, 1], choices=F)
    parser.add_argument("--workers", type=int, help="As many as there are cores if left out.")
    parser.add_argument("--runs", type=Path, default=Path("runs/byzantine-mnist"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    found: Found = {}
    for gamma in args.gammas:
        found |= worst(gamma, args)
        write(found, args)
    print(table(found, args.seeds))


if __name__ == "__main__":
    main()
