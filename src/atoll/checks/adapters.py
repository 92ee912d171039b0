"""Rules on low-rank adapters whose products the server makes of single clients' factors."""

from __future__ import annotations

from fnmatch import fnmatchcase

from atoll.checks.rule import Changes, Rule
from atoll.checks.views import Parts
from atoll.core.personal_adapters import KEEP

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
    Rule(
        name="personal-adapters-stay",
        parts=("model",),
        reason="model.personal_rank gives clients adapters of their own, and without keep these would be averaged",
        way_out='set keep = ["*.personal.*"], or leave model.personal_rank out',
        finding=lambda view: any(fnmatchcase(slot.name, KEEP) for slot in view.spec.slots),
        refused=[{"model": {"name": "lora_mlp", "hidden": 8, "personal_rank": 2}, "algorithm": "fedit"}],
        mended={"keep": ["*.personal.*"]},
    ),
)
