"""Rules on low-rank adapters whose products the server makes of single clients' factors."""

from __future__ import annotations

from atoll.checks.rule import Changes, Rule
from atoll.checks.views import Parts

ADAPTED: Changes = {"model": {"name": "lora_mlp", "hidden": 8}}

RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="products-are-averaged",
        parts=("algorithm", "aggregator"),
        reason="{algorithm|flora} adds the mean of the clients' products to the model, which {aggregator|a robust "
        "rule} on their factors cannot give",
        way_out='set aggregator = "mean", or use ffa_lora, whose updates are linear, so that every rule is exact',
        finding=lambda view: view.algorithm.multiplies and view.plan.aggregator.name != "mean",
        refused=[{**ADAPTED, "algorithm": name, "aggregator": "median"} for name in ("flora", "fedex_lora")],
        mended={"algorithm": "ffa_lora"},
    ),
    Rule(
        name="both-factors-travel",
        parts=("algorithm",),
        reason="{algorithm|flora} multiplies the two factors of each client, but clients keep some of their parameters",
        way_out="leave keep and share out, or use fedavg",
        finding=lambda view: view.algorithm.multiplies and view.keeps,
        refused=[{**ADAPTED, "algorithm": "flora", "keep": ["*lora_B*"]}],
        mended={"algorithm": "fedavg"},
    ),
)
