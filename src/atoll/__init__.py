"""Atoll: federated learning. One plan, from a laptop to a cluster to a network of organisations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll import events, trackers
    from atoll.api import Result, resume, run
    from atoll.compare import compare_ways
    from atoll.core.errors import AtollError
    from atoll.core.parts import Part
    from atoll.core.plan import Plan
    from atoll.data.dataset import Dataset
    from atoll.network.client.app import ClientApp
    from atoll.network.protocol.agreement import Floors
    from atoll.personal.compare import compare_personal
    from atoll.sweeps.run import sweep
    from atoll.train.array_work import ArrayTask, array_work

__all__ = [
    "ArrayTask",
    "AtollError",
    "ClientApp",
    "Dataset",
    "Floors",
    "Part",
    "Plan",
    "Result",
    "array_work",
    "compare_personal",
    "compare_ways",
    "events",
    "resume",
    "run",
    "sweep",
    "trackers",
]

_HOMES = {
    "AtollError": "atoll.core.errors",
    "ClientApp": "atoll.network.client.app",
    "Dataset": "atoll.data.dataset",
    "ArrayTask": "atoll.train.array_work",
    "Floors": "atoll.network.protocol.agreement",
    "Part": "atoll.core.parts",
    "Plan": "atoll.core.plan",
    "Result": "atoll.api",
    "array_work": "atoll.train.array_work",
    "compare_personal": "atoll.personal.compare",
    "compare_ways": "atoll.compare",
    "resume": "atoll.api",
    "run": "atoll.api",
    "sweep": "atoll.sweeps.run",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import atoll` costs nothing."""
    import importlib

    if name in ("events", "trackers"):
        return importlib.import_module(f"atoll.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
