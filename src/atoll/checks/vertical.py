"""Rules on vertical learning: what does not go with parties that hold different columns of the same rows."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.checks.rule import Rule, Values, first
from atoll.checks.split import AT_CUT
from atoll.checks.views import Parts
from atoll.core.algorithm import add_delta
from atoll.core.parts import Part
from atoll.core.split import VERTICAL

PARTIES = [{"name": "bank", "columns": ["0-31"]}, {"name": "shop", "columns": ["32-63"]}]
PLAIN: Mapping[str, object] = {
    "partition": None,
    "policy": None,
    "split": {"way": VERTICAL, "labels": "bank", "parties": PARTIES},
}
"""Makes a plan vertical."""


def _is_vertical(view: Parts) -> bool:
    return view.plan.split is not None and view.plan.split.way == VERTICAL


def _deals_rows(view: Parts) -> bool:
    return _is_vertical(view) and view.plan.partition != Part("iid")


def _leaves_out(view: Parts) -> Values | None:
    """Say why not all parties would be in a round."""
    plan = view.plan
    return first(
        {
            f"the policy asks {view.goal} of {view.num_clients} parties": view.goal != view.num_clients,
            f"the policy would ask {view.asked} of {view.num_clients} parties": view.asked != view.num_clients,
            f"sampler {plan.sampler.name} may leave some out": plan.sampler.name != "uniform",
        }
    )


def _moves_more(view: Parts) -> Values | None:
    plan, algorithm = view.plan, view.algorithm
    rate = algorithm.server_lr if plan.server.lr is None else plan.server.lr
    return first(
        {
            f"{plan.algorithm.name} has a step of the server of its own": algorithm.server_step is not add_delta,
            f"server.lr is {rate:g}": rate != 1,
        }
    )


def _needs_rows(view: Parts) -> Values | None:
    """Say what looks at whole rows, or at rows that one party draws for itself."""
    plan = view.plan
    return first(
        {
            "evaluation.holdout is drawn by each client for itself": plan.evaluation.holdout,
            "evaluation.validation is drawn by each client for itself": plan.evaluation.validation,
            "evaluation.clients_every measures whole models at clients": plan.evaluation.clients_every,
            "server.samples are whole rows": plan.server.samples,
            "public samples are whole rows": plan.public,
        }
    )


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="vertical-claims-no-privacy",
        parts=("split", "privacy"),
        reason="{privacy|a mechanism} accounts for one release of a sample's activations at a time, and every party of "
        "vertical learning releases some of the same row",
        way_out='leave privacy out, and put "noise" into split.defences, which claims nothing',
        finding=_is_vertical,
        refused=[{**PLAIN, "split.tail": 3, "split.frozen": True, "model": "mlp", **AT_CUT}],
        mended={"privacy": None, "split.defences": [{"name": "noise", "clip": 1.0, "sigma": 1.0}], "sampler": None},
    ),
    Rule(
        name="vertical-shares-rows",
        parts=("split", "partition"),
        reason="parties that hold columns share all rows, so that there is nothing for {partition|a partition} to deal "
        "out",
        way_out="leave partition out; split.missing says what share of the rows a party lacks",
        finding=_deals_rows,
        refused=[{**PLAIN, "partition": {"name": "iid", "num_clients": 2}}, {**PLAIN, "partition": "shards"}],
        mended={"partition": None, "split.missing": None},
    ),
    Rule(
        name="vertical-asks-all",
        parts=("split", "policy"),
        reason="every step of vertical learning needs the columns of all parties, and {use|the policy and the sampler "
        "must ask them all}",
        way_out="leave policy and sampler out",
        finding=lambda view: _leaves_out(view) if _is_vertical(view) else None,
        refused=[
            {**PLAIN, "policy.size": 1},
            {**PLAIN, "sampler": "round_robin"},
        ],
        mended={"policy": None, "sampler": None},
    ),
    Rule(
        name="vertical-averages-nothing",
        parts=("split", "algorithm"),
        reason="{use|a step of the server} would move layers of parties by something else than their training, and "
        "vertical learning averages nothing",
        way_out="use fedavg without server.lr",
        finding=lambda view: _moves_more(view) if _is_vertical(view) else None,
        refused=[{**PLAIN, "algorithm": "fedavgm"}, {**PLAIN, "server.lr": 0.5}],
        mended={"algorithm": "fedavg", "server.lr": None},
    ),
    Rule(
        name="vertical-rows-are-nobodys",
        parts=("split",),
        reason="{use|rows that clients or the server look at by themselves} need whole rows, and a party of vertical "
        "learning has columns of the rows that all agreed on",
        way_out="leave it out: the test set measures the model",
        finding=lambda view: _needs_rows(view) if _is_vertical(view) else None,
        refused=[
            {**PLAIN, "evaluation.holdout": 0.2},
            {**PLAIN, "evaluation.validation": 0.2},
            {**PLAIN, "evaluation.clients_every": 1},
            {**PLAIN, "server.samples": 20},
            {**PLAIN, "public": {"name": "held_out", "fraction": 0.1}},
        ],
        mended={
            "evaluation.holdout": None,
            "evaluation.validation": None,
            "evaluation.clients_every": None,
            "server.samples": None,
            "public": None,
        },
    ),
)
