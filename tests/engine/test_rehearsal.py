"""Plans whose parts do not fit are refused before the first client trains."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.api import run
from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.engine.base import InProcess
from atoll.engine.processes import Processes

PLAN = Plan(partition={"num_clients": 6}, policy={"size": 4}, rounds=2, engine="inline")
FEEDBACK = {"name": "top_k", "fraction": 0.1, "error_feedback": True}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "packed before low rank": ({"uplink": ["half", "low_rank"]}, "put low_rank earlier"),
    "bits before values": ({"uplink": ["eden", "top_k"]}, "put top_k earlier"),
    "some before all": ({"uplink": [{"name": "top_k", "fraction": 0.1}, "low_rank"]}, "put it before"),
    "a residual of changing length": (
        {"uplink": [{"name": "threshold", "magnitude": 0.5}, FEEDBACK]},
        "put it earlier",
    ),
    "a packed difference": ({"downlink": ["delta", "half", "prune"]}, "put prune earlier"),
    "differences that grow": ({"downlink": ["delta", {"name": "random_k", "fraction": 0.2}]}, "use top_k"),
    "differences of one bit": ({"downlink": ["delta", {"name": "quantise", "bits": 1}]}, "more bits"),
    "64 bits": ({"secagg": {"scheme": "ckks", "modulus_bits": 64}}, "modulus_bits = 32"),
    "a batch of one": ({"model": "helpers:batch_normed", "partition": {"num_clients": 1437}}, "two samples"),
    "a rest of one": ({"model": "helpers:batch_normed", "local": {"batch_size": 119}}, "two samples"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_misfit_is_refused_before_training(misfit: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    for kind in (InProcess, Processes):
        monkeypatch.setattr(kind, "works", lambda *args: begun.append("trained") or [])
    change, way_out = MISFITS[misfit]
    with pytest.raises(PlanError, match=way_out):
        run(PLAN.replace({**change, "engine": engine}))
    assert not begun


def test_a_rest_that_no_client_reaches_is_no_misfit() -> None:
    """Clients of 239 or 240 samples take two steps of 119 and never meet the last one or two samples."""
    local = {"batch_size": 119, "steps": 2}
    assert run(PLAN.replace({"model": "helpers:batch_normed", "local": local})).reason == "all rounds done"


def test_a_failing_part_is_named_with_what_it_said() -> None:
    def broken() -> Any:
        from atoll.core.aggregator import stacked

        return stacked(lambda updates_CD, weight_C: updates_CD @ weight_C)

    with pytest.raises(PlanError, match=r"aggregator does not fit.*another aggregator"):
        run(Plan(partition={"num_clients": 6}, aggregator=broken))
