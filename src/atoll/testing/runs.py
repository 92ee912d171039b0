"""Small runs for laws: twelve clients that share 1,437 digits, and a model of 1,482 parameters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.api import Result, run
from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.engine.vectorised import vectorised
from atoll.testing.law import must, must_be_close, must_be_equal
from atoll.train.job import Job, broadcast_of, first_server

NUM_CLIENTS = 12
ROUNDING = 2e-5
"""How far models may be apart that were trained one by one and stacked."""
TOGETHER: dict[str, Any] = {"name": "vectorised", "stack": 3}
IN_WORKERS: dict[str, Any] = {"name": "processes", "workers": 2, "stack": 3}
"""The same groups, in this process one after another, and shared out to two; one worker repeats what the first does."""


def small_plan(**changes: Any) -> Plan:
    """Return a plan of two rounds, with some settings changed."""
    settings: dict[str, Any] = {
        "partition": {"name": "dirichlet", "num_clients": NUM_CLIENTS, "alpha": 0.5},
        "model": {"name": "mlp_2nn", "hidden": 16},
        "local": {"lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 0},
        "rounds": 2,
        "engine": "inline",
    }
    return Plan(**{**settings, **changes})


def final(plan: Plan, engine: str | dict[str, Any] = "inline") -> Tensor:
    """Return the parameters after the last round."""
    return run(plan.replace({"engine": engine})).params_D


def _timeless(result: Result) -> list[dict[str, Any]]:
    """Return a run's metrics without this machine's seconds."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in result.history]


def must_repeat(plan: Plan) -> Tensor:
    """Raise LawError unless a run can be repeated to the bit, with any number of workers; return its stacked result.

    A member that remembers what it saw in another call, or that draws from a global generator, is told by this.
    """
    stacked, shared_out = final(plan, TOGETHER), final(plan, IN_WORKERS)
    why = "ends elsewhere: let the member depend on its arguments alone, and draw from the generator that is passed in"
    must_be_close(shared_out, stacked, f"a second run, in {IN_WORKERS}, {why}")
    must(bool(stacked.isfinite().all()), "the model is not finite after two rounds: lower its step")
    return stacked


def must_agree(plan: Plan) -> None:
    """Raise LawError unless a run `must_repeat`, and clients that are trained one by one end in about the same place.

    Only for what a client does: codecs, votes and choices by a score amplify a difference of one rounding.
    """
    why = (
        "clients that are trained together end elsewhere than one by one: let slots decide nothing by values of tensors"
    )
    must_be_close(must_repeat(plan), final(plan), why, atol=ROUNDING)


def must_resume(plan: Plan) -> None:
    """Raise LawError unless a run that was stopped after two of four rounds ends with the same model and metrics."""
    plan = plan.replace({"rounds": 4, "evaluation.every": 1})
    with tempfile.TemporaryDirectory() as folder:
        run(plan.replace({"rounds": 2}), out=Path(folder) / "run", report=False)
        resumed = run(plan, out=Path(folder) / "run", report=False, resume=True)
    whole = run(plan)
    why = "a resumed run differs: keep everything in the states that functions take and return"
    must_be_close(resumed.params_D, whole.params_D, why)
    must(_timeless(resumed) == _timeless(whole), f"{why} (the model is the same, the metrics are not)")


def must_ignore_order(job: Job) -> None:
    """Raise LawError unless a cohort that is trained forwards and backwards is folded to the same bits."""
    sent = {0: broadcast_of(job, job.first_D, first_server(job, job.first_D))}
    tasks = [Task(client, 0, 0) for client in (3, 1, 7, 11, 0)]
    for engine in (inline(job), vectorised(job, stack=3)):
        forth, back = engine.train(tasks, sent, {}), engine.train(tasks[::-1], sent, {})
        engine.close()
        must_be_equal(
            back.folded, forth.folded, "the order of clients changes what is folded: remember nothing between"
        )
