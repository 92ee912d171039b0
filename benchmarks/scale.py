"""Large cohorts on one machine: what `atoll plan cost` predicts of a round beside what rounds then take.

    python benchmarks/scale.py                 all cases, two turns of prediction and run
    python benchmarks/scale.py --only million

Each prediction is made from small cohorts by a process of its own, and each run is another one. Seconds are the median
of a run's rounds between the first, which warms up, and the last, which is evaluated; memory is what the kernel calls
the peak resident set of the driving process and of its largest worker, in which pages that processes share count in
each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

CASES = {
    "million": {
        "data": "mnist",
        "model": "logistic",
        "partition": {"name": "iid", "num_clients": 1_000_000, "samples_per_client": 20},
        "policy": {"size": 1000},
        "local": {"lr": 0.1, "batch_size": 10},
        "rounds": 12,
    },
    "mlp": {
        "data": "mnist",
        "model": "mlp_2nn",
        "partition": {"name": "iid", "num_clients": 1000},
        "policy": {"size": 200},
        "local": {"lr": 0.1, "batch_size": 10},
        "rounds": 8,
    },
    "cnn": {
        "data": "mnist",
        "model": "cnn_mcmahan",
        "partition": {"name": "iid", "num_clients": 1000},
        "policy": {"size": 40},
        "local": {"lr": 0.1, "batch_size": 10},
        "rounds": 5,
    },
}

RUN = """
import json, sys
from multiprocessing import active_children
from atoll import Plan, run
from atoll.train.resident import own_peak_memory, peak_memory
peaks = [0]
def watch(event):
    peaks.append(max([0, *(peak_memory(child.pid) for child in active_children())]))
result = run(Plan.read(json.loads(sys.argv[1])), watch=[watch])
rounds = [row["round_seconds"] for row in result.history[1:-1]]
print(json.dumps({"rounds": rounds, "memory": own_peak_memory(), "worker_memory": max(peaks)}))
"""


def predicted(plan):
    """What `atoll plan cost` says of a plan."""
    from atoll.core.plan import Plan

    path = os.path.join(os.environ.get("TMPDIR", "."), f".scale-{os.getpid()}.toml")
    try:
        with open(path, "w") as file:
            file.write(Plan.read(plan).to_toml())
        return last_json([sys.executable, "-m", "atoll.cli.main", "plan", "cost", path, "--json"])
    finally:
        os.remove(path)


def last_json(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", *CASES])
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    pairs = [f"{what}, predicted | measured" for what in ("seconds", "memory", "a worker's memory")]
    print("| case | clients a round | " + " | ".join(pairs) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if args.only not in ("", name):
            continue
        plan = {**case, "evaluation": {"every": 0}}
        said, done = [], []
        for _ in range(args.turns):
            said.append(predicted(plan))
            done.append(last_json([sys.executable, "-c", RUN, json.dumps(plan)]))
        seconds = [statistics.median(each["seconds"] for each in said)]
        seconds.append(statistics.median(second for each in done for second in each["rounds"]))
        cells = [f"{value:.3g} s" for value in seconds]
        for key in ("memory", "worker_memory"):
            cells += [f"{statistics.median(each[key] for each in some) / 1e6:.0f} MB" for some in (said, done)]
        print(f"| {name} | {case['policy']['size']:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
