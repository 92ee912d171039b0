"""How many coalitions the server can value in a second of one core. Run: python benchmarks/contribution.py"""

from __future__ import annotations

import time
from typing import Any

import torch

from atoll.commit.contribution import Before, shares_of
from atoll.core.aggregator import rows_of
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.train.build import build_job
from atoll.train.trainer import Trainer

CASES: list[tuple[str, Any, int]] = [
    ("digits", "logistic", 200),
    ("digits", {"name": "mlp_2nn", "hidden": 32}, 200),
    ("mnist", "logistic", 100),
    ("mnist", {"name": "mlp_2nn", "hidden": 64}, 100),
    ("mnist", {"name": "mlp_2nn", "hidden": 64}, 500),
    ("mnist", "mlp_2nn", 500),
]


def main() -> None:
    """Value every coalition of eight clients after one local step each, on one thread."""
    torch.set_num_threads(1)
    print("| data | model | parameters | samples | models a second | rule `median` |\n|---|---|---|---|---|---|")
    for data, model, samples in CASES:
        rates = [measured(data, model, samples, rule) for rule in ("mean", "median")]
        name = Part.of(model)
        hidden = f" (hidden {name.options['hidden']})" if name.options else ""
        print(
            f"| {data} | {name.name}{hidden} | {rates[0][0]:,} | {samples} | {rates[0][1]:,.0f} | {rates[1][1]:,.0f} |"
        )


def measured(data: str, model: Any, samples: int, rule: str) -> tuple[int, float]:
    """The size of the model, and how many coalitions a second of processor time values: the best of three rounds."""
    job = build_job(
        Plan(data=data, model=model, aggregator=rule, partition={"num_clients": 8}, local={"steps": 1},
             server={"samples": samples}, contribution="shapley")
    )  # fmt: skip
    done = inline(job).train([Task(c, 0, 0) for c in range(8)], {0: Broadcast(job.first_D, {})}, {})
    before = Before(job.first_D, {}, job.aggregator.init(), None, 0, 8)
    assert job.contribution is not None
    scores, best = Trainer(job).own_scores, float("inf")
    for _ in range(3):
        started = time.process_time()
        found = shares_of(job, job.contribution, before, list(range(8)), rows_of(done.folded), scores)
        best = min(best, time.process_time() - started)
    return len(job.first_D), found.evaluations / best


if __name__ == "__main__":
    main()
