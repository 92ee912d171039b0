"""Small runs for laws: twelve clients that share 1,437 digits, and a model of 1,482 parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.api import run
from atoll.core.plan import Plan
from atoll.testing.law import must, must_be_close

NUM_CLIENTS = 12
ROUNDING = 2e-5
"""How far models may be apart that were trained one by one and stacked."""
ENGINES: tuple[dict[str, Any], ...] = (
    {"name": "vectorised", "stack": 3},
    {"name": "processes", "workers": 1, "stack": 3},
    {"name": "processes", "workers": 2, "stack": 3},
)


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


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's metrics without this machine's seconds."""
    return [{key: value for key, value in row.items() if key not in ("seconds", "round_seconds")} for row in history]


def must_repeat(plan: Plan) -> Tensor:
    """Raise LawError unless a run can be repeated to the bit, with any number of workers; return its stacked result.

    A member that remembers what it saw in another call, or that draws from a global generator, is told by this.
    """
    stacked, *others = (final(plan, engine) for engine in ENGINES)
    why = "ends elsewhere: let the member depend on its arguments alone, and draw from the generator that is passed in"
    for engine, other in zip(ENGINES[1:], others, strict=True):
        must_be_close(other, stacked, f"a second run, in {engine}, {why}")
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
