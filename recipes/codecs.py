"""Fewer bytes, same model: codecs on the two networks of McMahan et al. 2017, three seeds, one table and one picture.

`mlp`: 2NN, MNIST, two digits a client, 10 of 100 clients a round, to 97 %. `cnn`: CNN, IID, one epoch, 10 rounds. Runs
are kept: stop it and start it again at will.

    python recipes/codecs.py mlp                 # writes docs/codecs-mlp.md and .png
    python recipes/codecs.py cnn
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from atoll import Plan, run
from atoll.report.codecs import bytes_an_update, bytes_to, codec_picture
from atoll.report.figures import save_png
from atoll.report.reading import RunRecord, read_run, rounds_to, series

TARGET = 0.97
MLP_HEAD = (
    "| uplink | times fewer bytes an update | rounds to 97 % | more rounds | uplink to 97 %, MB | best accuracy, % |"
)
CNN_HEAD = "| uplink | times fewer bytes an update | accuracy after 10 rounds, % | points below none | uplink, MB |"
CODECS: dict[str, list[Any]] = {
    "none": [],
    "random_k 90 %, eden 1 bit": [{"name": "random_k", "fraction": 0.9}, "eden"],
    "random_k 30 %, eden 1 bit": [{"name": "random_k", "fraction": 0.3}, "eden"],
    "top_k 1 %": [{"name": "top_k", "fraction": 0.01}],
    "top_k 1 %, no feedback": [{"name": "top_k", "fraction": 0.01, "error_feedback": False}],
}
PLANS = {
    "mlp": Plan(
        rounds=350,
        data="mnist",
        partition={"name": "shards", "num_clients": 100},
        model="mlp_2nn",
        policy={"size": 10},
        local={"lr": 0.1},
        stop={"accuracy": TARGET},
    ),
    "cnn": Plan(
        rounds=10,
        data="mnist",
        partition={"name": "iid", "num_clients": 100},
        model="cnn_mcmahan",
        policy={"size": 10},
        local={"lr": 0.1},
    ),
}


def done(work: str, codec: str, seed: int, runs: Path) -> RunRecord:
    """The record of a run, which is made if there is none."""
    path = runs / f"{work}-{codec.replace(' ', '_').replace('%', 'percent')}-{seed}"
    if not (path / "result.json").exists():
        print(f"{work}, {codec}, seed {seed}")
        plan = PLANS[work].replace({"seed": seed, "name": codec, "uplink": CODECS[codec]})
        run(plan, out=path, resume=(path / "plan.toml").exists(), progress=True)
    return read_run(path)


def mean(values: list[float | None]) -> float:
    """The mean of what is known for every seed; NaN where one is missing."""
    return statistics.fmean(float("nan") if value is None else value for value in values)


def to_target(records: list[RunRecord], plain: list[RunRecord]) -> list[str]:
    """Rounds and bytes to the target, and the best accuracy."""
    rounds, plain_rounds = (mean([rounds_to(record, TARGET) for record in each]) for each in (records, plain))
    spent = mean([bytes_to(record, TARGET) for record in records]) / 1e6
    best = 100 * mean([max(series(record, "test.accuracy")[1]) for record in records])
    if math.isnan(rounds):
        return [f"not in {PLANS['mlp'].rounds}", "", "", f"{best:.2f}"]
    return [f"{rounds:.0f}", f"{100 * (rounds / plain_rounds - 1):+.0f} %", f"{spent:.1f}", f"{best:.2f}"]


def at_the_end(records: list[RunRecord], plain: list[RunRecord]) -> list[str]:
    """The last accuracy, how far it is below that without a codec, and the bytes."""
    end, plain_end = (mean([series(record, "test.accuracy")[1][-1] for record in each]) for each in (records, plain))
    spent = mean([record.rows[-1]["bytes_up"] for record in records]) / 1e6
    return [f"{100 * end:.2f}", f"{100 * (plain_end - end):+.2f}", f"{spent:.1f}"]


def main() -> None:
    """Run what is missing, then write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=PLANS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=CODECS, help="All for the mlp, the first two for the cnn.")
    parser.add_argument("--runs", type=Path, default=Path("runs/codecs"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    codecs = args.only or list(CODECS)[: 2 if args.work == "cnn" else None]
    found = {codec: [done(args.work, codec, seed, args.runs) for seed in args.seeds] for codec in codecs}
    plain_size = mean([bytes_an_update(record) for record in found["none"]])
    lines = [f"Made by `python recipes/codecs.py {args.work}`; means over seeds {', '.join(map(str, args.seeds))}.", ""]
    lines += [MLP_HEAD if args.work == "mlp" else CNN_HEAD]
    lines += [f"|{'---|' * lines[-1].count(' |')}"]
    for codec, records in found.items():
        ratio = plain_size / mean([bytes_an_update(record) for record in records])
        cells = to_target(records, found["none"]) if args.work == "mlp" else at_the_end(records, found["none"])
        lines += [f"| {codec} | {ratio:.1f} | {' | '.join(cells)} |"]
    table = "\n".join(lines) + "\n"
    print(table)
    (args.out / f"codecs-{args.work}.md").write_text(table)
    save_png(
        codec_picture([record for records in found.values() for record in records]),
        args.out / f"codecs-{args.work}.png",
    )


if __name__ == "__main__":
    main()
