"""What kernels gain: seconds and processor seconds of a round, of one commit beside another, in turns in one go.

    python benchmarks/kernels.py OLD NEW --turns 5 [--only logistic]

Each work is run for few rounds and for more; the difference is what the rounds between take, without set-up and the
measurement at the end. Processor time is that of all processes; on a busy machine it alone tells. Ratios are OLD over
NEW of the same turn: what is printed is their median and the interval that before_after.py explains.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from before_after import KERNELS, LEAST, SIDES, Ratio, Worker, checked_out


def per_round(worker, name):
    """Seconds and processor seconds of a round."""
    few, many = KERNELS[name]["rounds"]
    less, more = (worker.repeat(f"{name} @ {rounds}") for rounds in (few, many))
    return [(getattr(more, what) - getattr(less, what)) / (many - few) for what in ("run", "cpu")]


def row(name, turns):
    """A row of the table: milliseconds of a round on both sides, and how many times faster the new one is."""
    cells = [name]
    for what in range(2):
        columns = {side: [turn[side][what] for turn in turns] for side in SIDES}
        ratio = Ratio.of([old / new for old, new in zip(*columns.values(), strict=True)])
        cells += [f"{1000 * statistics.median(columns[side]):.2f}" for side in SIDES] + [str(ratio)]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a directory with src/atoll")
    parser.add_argument("new", help="the same")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.turns < LEAST:
        parser.error(f"--turns is at least {LEAST}: fewer say nothing of the noise")
    print("| a round of | old, ms | new, ms | faster | old, CPU ms | new, CPU ms | less CPU |")
    print("|---|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for side in SIDES:
            source = stack.enter_context(checked_out(getattr(args, side), directory / side))
            workers[side] = Worker(source, 1)
            stack.callback(workers[side].stop)
        for name in (name for name in KERNELS if args.only in name):
            turns = []
            for turn in range(args.turns + 1):
                took = {side: per_round(workers[side], name) for side in (SIDES if turn % 2 else reversed(SIDES))}
                print(f"  {name}, turn {turn}: {took}", file=sys.stderr)
                turns += [took] * bool(turn)  # the first warms up
            print(row(name, turns), flush=True)


if __name__ == "__main__":
    main()
