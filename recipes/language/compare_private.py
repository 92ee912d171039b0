"""What privacy of clients leaves of the gain: runs of compare.py with noise, by method, rank, cohort and epsilon.

Clients are all 801 roles of Shakespeare's plays, each with eight rows of 16 tokens. Every row of the table has a server
rate of its own, which is searched in the same way for all of them, on a seed and on test rows that the table lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from compare_runs import Runs, mean_nats

from atoll import Plan, run
from atoll.commit.privacy_plan import calibrated_plan
from atoll.data.dataset import Dataset
from atoll.data.sequences import shakespeare
from atoll.train.federation import build_federation

Json = dict[str, Any]
DELTA = 1e-4
CLIP = 0.5
METHODS = ("fedit", "ffa_lora")
CHOICE_SEED = 100
"""Seed of the runs that choose rates; no table has it."""
MOST_RATES = 7
"""Bounds the rates that are tried for a row."""
PLAN = Plan(
    rounds=8,
    data="compare_private:rows",
    partition={
        "name": "mixture",
        "parts": [{"name": "natural", "min_samples": 8}, {"name": "at_most", "samples": 8}],
    },
    policy={"size": 30},
    sampler="poisson",
    model={"name": "hf_causal", "path": "models/stories15m", "dtype": "bfloat16"},
    algorithm="fedit",
    local={"steps": 1, "batch_size": 1, "lr": 1.0},
    evaluation={"metrics": ["perplexity"], "every": 0},
    engine="inline",
)
"""One step on one row each time that a client is asked; all clients weigh the same."""


class Cell(NamedTuple):
    """A row of the table."""

    mechanism: str
    """Who adds noise; `clip` and `none` add nothing, and `none` does not clip updates either."""
    method: str
    rank: int
    cohort: int
    epsilon: float | None = None

    @property
    def name(self) -> str:
        """Return a name for files."""
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        return f"private-{self.mechanism}-{self.method}-{self.rank}-{self.cohort}-{epsilon}"


def _central(rank: int, cohort: int, *epsilons: float | None) -> list[Cell]:
    """Return the rows of a size, without noise (None) and with noise of the server's."""
    return [
        Cell("clip" if epsilon is None else "central", method, rank, cohort, epsilon)
        for method in METHODS
        for epsilon in epsilons
    ]


CELLS = [
    *_central(4, 30, None, 8.0, 2.0),
    *(Cell("local", method, 4, 30, 8.0) for method in METHODS),
    *_central(8, 30, None, 8.0),
    *_central(4, 90, None, 8.0),
    Cell("distributed", "ffa_lora", 4, 30, 8.0),
    *(Cell("none", method, 4, 30) for method in METHODS),
]
"""In the order in which they are measured, the most important first; those without noise before those with it."""
FIRST_RATES = {"local": 0.125, "none": 0.125}
"""Server rates, other than 1, from which the first row of a mechanism searches; later rows begin at the last best."""


@functools.lru_cache
def rows(tokenizer: str, half: int = 0) -> Dataset:
    """Return the rows of all roles, and 200 test rows: of half 0 to choose rates, of half 1 for the table."""
    data = shakespeare(tokenizer, length=16, test=0.01, quiet=True)
    taken = np.linspace(0, len(data.test_x) - 2, 200).astype(int) // 2 * 2 + half
    return dataclasses.replace(data, test_x=data.test_x[taken], test_y=data.test_y[taken])


def plan_of(runs: Runs, cell: Cell, seed: int, rate: float) -> Plan:
    """Return the plan of a row, with the noise that its epsilon needs."""
    plan = runs.plan(
        PLAN,
        {
            "seed": seed,
            "data.half": int(seed != CHOICE_SEED),
            "algorithm": cell.method,
            "model.rank": cell.rank,
            "model.alpha": 2.0 * cell.rank,
            "policy.size": cell.cohort,
            "server.lr": rate,
        },
    )
    if cell.epsilon is None:
        return plan.replace({"uplink": [{"name": "clip", "norm": CLIP}] if cell.mechanism == "clip" else []})
    changes: Json = {"privacy": {"name": cell.mechanism, "clip": CLIP, "sigma": 1.0, "delta": DELTA}}
    changes |= {} if cell.mechanism == "central" else {"sampler": "round_robin"}
    changes |= {"secagg": {}} if cell.mechanism == "distributed" else {}
    plan, epsilon = plan.replace(changes), cell.epsilon
    name = f"private-sigma-{cell.mechanism}-{cell.cohort}-{epsilon:g}"
    return plan.replace({"privacy.sigma": runs.kept(name, lambda: calibrated_plan(plan, epsilon).sigma)})


def measured(runs: Runs, cell: Cell, seed: int, rate: float) -> Json:
    """Return nats a token on the test rows at the end of a run, and the epsilon that it spent."""

    def end() -> Json:
        print(cell.name, f"seed {seed}, server rate {rate:g}", end=": ", flush=True)
        plan = plan_of(runs, cell, seed, rate)
        row = run(plan, report=False).history[-1]
        nats = math.log(row["test"]["perplexity"])
        print(f"{nats:.3f}", flush=True)
        return {
            "nats": nats,
            "epsilon": (row.get("privacy") or {}).get("epsilon"),
            "sigma": None if plan.privacy is None else plan.privacy.options["sigma"],
        }

    return dict(runs.kept(f"{cell.name}-{seed}-{rate:g}", end))


def best_rate(loss: Callable[[float], float], first: float, most: int = MOST_RATES) -> tuple[float, dict[float, float]]:
    """Return the rate of least loss, and all losses: double and halve until both neighbours of the best are worse.

    >>> best_rate(lambda rate: abs(rate - 4), 1.0)
    (4.0, {1.0: 3.0, 2.0: 2.0, 0.5: 3.5, 4.0: 0.0, 8.0: 4.0})
    """
    losses: dict[float, float] = {}
    wanted = [first, 2 * first, first / 2]
    while wanted and len(losses) < most:
        for rate in wanted[: most - len(losses)]:
            value = loss(rate)
            losses[rate] = value if math.isfinite(value) else math.inf
        best = min(losses, key=lambda rate: losses[rate])
        wanted = [rate for rate in (2 * best, best / 2) if rate not in losses]
    return best, losses


def privacy(runs: Runs, seeds: Sequence[int], until: float = math.inf) -> Json:
    """Measure what privacy of clients leaves of the gain on test rows, by method, rank, cohort and epsilon.

    No row is begun after the second `until` of the monotonic clock.
    """
    found: list[Json] = []
    start = dict(FIRST_RATES)
    for cell in CELLS:
        if time.monotonic() > until:
            print(f"time is up: {len(CELLS) - len(found)} rows are left for another call", flush=True)
            break
        key = "central" if cell.mechanism == "clip" else cell.mechanism
        rate, losses = best_rate(
            lambda rate, cell=cell: measured(runs, cell, CHOICE_SEED, rate)["nats"], start.get(key, 1.0)
        )
        start[key] = rate
        ends = {str(seed): measured(runs, cell, seed, rate) for seed in seeds}
        one = ends[str(seeds[0])]
        found.append(
            {
                **cell._asdict(),
                "asked": cell.epsilon,
                "epsilon": one["epsilon"],
                "sigma": one["sigma"],
                "rate": rate,
                "tried": len(losses),
                "nats": {seed: end["nats"] for seed, end in ends.items()},
            }
        )
    plan = plan_of(runs, CELLS[0], seeds[0], 1.0)
    base = runs.kept("private-base", lambda: _of_base(plan))
    return {
        "base": base,
        "clients": build_federation(plan).num_clients,
        "rounds": PLAN.rounds,
        "delta": DELTA,
        "rows": found,
    }


def _of_base(plan: Plan) -> float:
    """Return nats a token of the base on the test rows."""
    federation, model = build_federation(plan), plan.model.build("models").eval()
    return mean_nats(model, np.asarray(federation.dataset.test_x), federation.dataset.test_y)
