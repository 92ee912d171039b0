"""What the engine ray costs, and what it survives: python benchmarks/ray_engine.py [bits] [kill] [overhead] [memory]

Without names all parts are run, and each prints a table.

- bits: the same plan with `processes` and on clusters of one and of two machines; the last models are compared.
- kill: one of two machines dies in the middle of a round; how much longer that round takes, and the last model.
- overhead: rounds whose clients train one step on one sample, with a model of 6.65 MB: what a round costs beside that.
- memory: megabytes at the worst moment, of the driver and of its largest worker, for cohorts of 10 to 10,000.

Machines are those of `ray.cluster_utils.Cluster`: each is a raylet with an object store and workers of its own, and all
of them run on this machine and share its cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
torch.set_num_threads(1)

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from atoll import Plan, run  # noqa: E402
from atoll.core.events import ClientReported, Event, RoundCommitted  # noqa: E402

STACK = {"stack": 2}
PLAN = Plan(
    partition={"num_clients": 60},
    model="mlp_2nn",
    algorithm="scaffold",
    policy={"size": 30},
    local={"epochs": 5},
    evaluation={"every": 0},
    rounds=6,
)
PROCESSES = {"name": "processes", "workers": 2, **STACK}
COHORTS = (10, 100, 1_000, 10_000)
TURNS = int(os.environ.get("TURNS", "3"))
"""How often kills and overhead are measured."""


@contextlib.contextmanager
def cluster(machines: int, cpus: int = 1) -> Iterator[Any]:
    """Begin a cluster, of which the first machine is the head."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    for _ in range(machines - 1):
        made.add_node(num_cpus=cpus)
    made.wait_for_nodes()
    try:
        yield made
    finally:
        made.shutdown()


def on_ray(plan: Plan, address: str) -> Plan:
    return plan.replace({"engine": {"name": "ray", "address": address, **STACK}})


def seconds_of(history: list[dict[str, Any]]) -> list[float]:
    return [row["round_seconds"] for row in history]


def bits() -> None:
    """Compare the last models of processes, one machine and two."""
    whole = run(PLAN.replace({"engine": PROCESSES})).params_D
    print("\n| engine | machines | workers | last model |\n|---|---|---|---|")
    print("| processes | 1 | 2 | |")
    for machines, cpus in ((1, 1), (1, 2), (2, 1)):
        with cluster(machines, cpus) as made:
            end = run(on_ray(PLAN, made.address)).params_D
        same = "the same bits" if torch.equal(whole, end) else "DIFFERS"
        print(f"| ray | {machines} | {machines * cpus} | {same} |", flush=True)


class Killer:
    """Lets a machine die when some clients of the third round have reported."""

    def __init__(self, made: Any) -> None:
        self._made, self._rounds, self.in_round = made, 0, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self._rounds = event.row["round"]
        if isinstance(event, ClientReported) and self._rounds == 2 and event.num_done >= 8 and not self.in_round:
            self.in_round = self._rounds + 1
            self._made.remove_node(self._made.worker_nodes.copy().pop(), allow_graceful=False)


def kill() -> None:
    """Let one of two machines die in a round."""
    whole = run(PLAN.replace({"engine": PROCESSES})).params_D
    print("\n| round with both machines | round in which one dies | extra | last model |\n|---|---|---|---|")
    for _ in range(TURNS):
        with cluster(2) as made:
            killer = Killer(made)
            result = run(on_ray(PLAN, made.address), watch=[killer])
        seconds = seconds_of(result.history)
        before, during = seconds[1], seconds[killer.in_round - 1]
        same = "the same bits" if torch.equal(whole, result.params_D) else "DIFFERS"
        print(f"| {before:.2f} s | {during:.2f} s | {during - before:.2f} s | {same} |", flush=True)


def overhead(rounds: int = 40) -> None:
    """Compare rounds that hardly train, in turns, so that what else the machine does hits both alike."""
    plan = Plan(
        partition={"num_clients": 8},
        model={"name": "mlp_2nn", "hidden": 1252},
        policy={"size": 2},
        local={"steps": 1, "batch_size": 1},
        evaluation={"every": 0},
        rounds=rounds,
    )
    means = dict[str, list[float]]()
    engines = {"processes, 2 workers": PROCESSES | {"stack": 1}}
    for machines in (1, 2):
        engines[f"ray, 2 workers on {machines} machine{'s' if machines > 1 else ''}"] = {"machines": machines}
    for _ in range(TURNS):
        for name, engine in engines.items():
            if "machines" not in engine:
                result = run(plan.replace({"engine": engine}))
            else:
                with cluster(engine["machines"], 2 // engine["machines"]) as made:
                    result = run(plan.replace({"engine": {"name": "ray", "address": made.address, "stack": 1}}))
            means.setdefault(name, []).append(statistics.median(seconds_of(result.history)[5:]))
    size = result.params_D.numel() * 4 / 1e6
    base = min(means["processes, 2 workers"])
    print(f"\n{size:.2f} MB down to 2 workers and up again; median of {rounds - 5} rounds, best of {TURNS} runs")
    print("\n| engine | a round | more than processes |\n|---|---|---|")
    for name, found in means.items():
        print(f"| {name} | {1e3 * min(found):.0f} ms | {1e3 * (min(found) - base):.0f} ms |")


MEASURED = """
import json, os, resource, sys, threading, time
import torch
from pathlib import Path
from atoll import Plan, run
torch.set_num_threads(1)
plan, most = Plan.from_toml(sys.stdin.read()), {}

def peaks():
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if b"MEASURED=" + str(os.getpid()).encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                    continue
                if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RayWorker"):
                    continue
                status = Path(f"/proc/{pid}/status").read_text()
                most[pid] = int(status.split("VmHWM:")[1].split()[0]) // 1024
            except (OSError, IndexError):
                pass
        time.sleep(0.05)

os.environ["MEASURED"] = str(os.getpid())
threading.Thread(target=peaks, daemon=True).start()
run(plan)
own = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
forked = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
on_ray = plan.engine.name == "ray"
print(json.dumps([own, max(most.values(), default=0) if on_ray else forked if plan.engine.name == "processes" else 0]))
"""


def memory() -> None:
    """Measure each engine and cohort in a process of its own."""
    print("\n| engine | " + " | ".join(f"cohort {size}" for size in COHORTS) + " |")
    print("|---|" + "---|" * len(COHORTS))
    engines: dict[str, dict[str, Any]] = {
        "inline": {},
        "vectorised": {"stack": 5},
        "processes": {"stack": 5, "workers": 2},
        "ray": {"stack": 5, "workers": 2, "address": "local"},
    }
    for name, options in engines.items():
        cells = []
        for size in COHORTS:
            plan = Plan(
                partition={"num_clients": 10_000, "samples_per_client": 20},
                model="mlp_2nn",
                local={"steps": 1, "batch_size": 2},
                policy={"size": size},
                rounds=2,
                engine={"name": name, **options},
            )
            done = subprocess.run([sys.executable, "-c", MEASURED], input=plan.to_toml().encode(), capture_output=True)
            if done.returncode:
                raise SystemExit(done.stderr.decode())
            own, worker = json.loads(done.stdout.splitlines()[-1])
            cells.append(f"{own} MB" + (f" + {worker} MB" if worker else ""))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


PARTS = {"bits": bits, "kill": kill, "overhead": overhead, "memory": memory}

if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    print(f"Ray {ray.__version__}, torch {torch.__version__}, {cores} cores, load {os.getloadavg()[0]:.1f}")
    for part in sys.argv[1:] or PARTS:
        started = time.perf_counter()
        PARTS[part]()
        print(f"\n({part}: {time.perf_counter() - started:.0f} s, load now {os.getloadavg()[0]:.1f})", flush=True)
