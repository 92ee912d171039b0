"""What algorithms and asynchronous rounds cost beside synchronous FedAvg. Run: python benchmarks/algorithms.py

mlp_2nn on MNIST, 100 clients, 10 a round, B = 10, E = 1, one process. Everything takes turns, and a figure is the least
over the turns of a run's least round: what the work itself costs, whatever else the machine does.
"""

import argparse
from pathlib import Path

from atoll import Plan, run
from atoll.core.parts import members

BASE = Plan(
    data="mnist",
    partition={"name": "iid", "num_clients": 100},
    model="mlp_2nn",
    policy={"size": 10},
    evaluation={"every": 0},
    engine={"name": "vectorised", "stack": 5},
    rounds=4,
)
MANY = Plan(
    data="mnist",
    partition={"name": "iid", "num_clients": 10_000, "samples_per_client": 60},
    model="logistic",
    devices={"name": "fleet", "dropout": 0.1, "spread": 1.5},
    evaluation={"every": 0},
)
POLICIES = {
    "synchronous, 100 a round": {"name": "cohort", "size": 100, "over_selection": 1.3},
    "buffered, 10 of 1,000 at work": {"name": "buffered", "size": 10, "concurrency": 1000},
    "asynchronous, 100 at work": {"name": "asynchronous", "concurrency": 100},
}
UPDATES = 10_000


def algorithms(names: list[str], turns: int) -> dict[str, float]:
    """Seconds of the quickest round of each algorithm."""
    best = dict.fromkeys(names, float("inf"))
    for _ in range(turns):
        for name in names:
            history = run(BASE.replace({"algorithm": name})).history
            best[name] = min(best[name], *(row["round_seconds"] for row in history[1:-1]))  # the last one is evaluated
    return best


def policies(turns: int) -> dict[str, float]:
    """Clients a second under each policy, from the first round to the last but one."""
    best = dict.fromkeys(POLICIES, 0.0)
    for _ in range(turns):
        for name, policy in POLICIES.items():
            size = policy.get("size", 1)
            history = run(MANY.replace({"policy": policy, "rounds": UPDATES // size})).history
            seconds = history[-2]["seconds"] - history[0]["seconds"]
            best[name] = max(best[name], sum(row["clients"] for row in history[1:-1]) / seconds)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    names = [name for name in members("algorithms") if name != "fedsgd"]  # one step on all samples: other work
    seconds = algorithms(names, args.turns)
    lines = [f"Made by `python benchmarks/algorithms.py`; the best of {args.turns} turns in which all alternate.", ""]
    lines += ["| algorithm | seconds a round | times FedAvg's |", "|---|---|---|"]
    ranked = sorted(names, key=lambda name: seconds[name])
    lines += [f"| {name} | {seconds[name]:.3f} | {seconds[name] / seconds['fedavg']:.2f} |" for name in ranked]
    speed = policies(args.turns)
    lines += ["", "10,000 clients of 60 samples, logistic, simulated fleet with 10 % drop-outs:", ""]
    lines += ["| rounds | clients a second | times synchronous |", "|---|---|---|"]
    first = next(iter(speed.values()))
    lines += [f"| {name} | {value:,.0f} | {value / first:.2f} |" for name, value in speed.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    args.out.write_text(text)


if __name__ == "__main__":
    main()
