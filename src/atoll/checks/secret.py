"""Rules on secure aggregation: the server sees sums, and nothing of single clients."""

from __future__ import annotations

from atoll.checks.rule import Changes, Rule, Values, first, said
from atoll.checks.views import Parts, Simulated

SECRET: Changes = {"secagg": {}}


def _single_clients(view: Parts) -> Values | None:
    plan = view.plan
    uses = {
        f"{plan.algorithm.name} needs each client's update": view.algorithm.needs_updates,
        f"{plan.sampler.name} needs each client's {view.sampler.score}": view.sampler.score,
        "detection compares single updates": plan.detection,
        "contribution tries coalitions of single updates": plan.contribution,
        "evaluation.new_clients lets new clients tell how well models do": plan.evaluation.new_clients,
    }
    return first(uses)


def _few_groups(view: Parts) -> Values | None:
    groups = view.masks.groups
    use = f"{view.aggregator.needs}, and secagg.groups = {groups} gives it {groups}"
    return first({use: 1 < groups < view.aggregator.min_updates})


def _small_groups(view: Parts) -> Values | None:
    groups, asked, smallest = view.masks.groups, view.asked, view.asked // view.masks.groups
    use = f"secagg.groups = {groups} leaves {smallest} of {asked} clients in a group, and"
    return first({use: smallest < view.masks.required_survivors})


SIMULATED: tuple[Rule[Simulated], ...] = (
    Rule(
        name="secagg-simulates-no-evaluation",
        parts=("secagg", "evaluation.clients_every"),
        reason="evaluation.clients_every lets each client of a simulation tell how well the model does, which secure "
        "aggregation hides; between organisations clients add it in secret",
        way_out="leave it out, or leave secagg out",
        finding=lambda view: True,
        refused=[{**SECRET, "evaluation.clients_every": 1}],
        mended={"evaluation.clients_every": 0},
    ),
)
RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="secagg-rule-sees-groups",
        parts=("secagg", "aggregator"),
        reason="{aggregator|a rule that compares} must see each update, but secure aggregation shows their sum only",
        way_out="set secagg.groups, e.g. to 10, so that the rule sees the sum of each group of clients, or "
        'aggregator = "mean"',
        finding=lambda view: view.masks.groups == 1 and view.plan.aggregator.name != "mean",
        refused=[{**SECRET, "aggregator": "median"}],
        mended={"aggregator": "mean"},
    ),
    Rule(
        name="secagg-enough-groups",
        parts=("secagg", "aggregator"),
        reason="{use|a robust rule needs enough updates to outvote bad ones, and gets one a group}",
        way_out="raise it, or lower f",
        finding=_few_groups,
        refused=[{"secagg.groups": 2, "aggregator": {"name": "trimmed_mean", "f": 1}, "policy.size": 6}],
        mended={"secagg.groups": 3, "policy.size": 9, "partition.num_clients": 9},
    ),
    Rule(
        name="secagg-hides-clients",
        parts=("secagg",),
        reason="{use|some algorithms and samplers, detection, contribution and evaluation.new_clients look at single "
        "clients}, which secure aggregation hides",
        way_out="leave it out, or leave secagg out",
        finding=_single_clients,
        refused=[
            {**SECRET, "algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}},
            {**SECRET, "algorithm": "flora", "model": "lora_mlp"},
            {**SECRET, "sampler": "importance"},
            {**SECRET, "detection": "distance"},
            {**SECRET, "contribution": "leave_one_out", "server.samples": 50},
            {**SECRET, "evaluation.new_clients": 2, "evaluation.holdout": 0.2},
        ],
        mended={"secagg": None},
    ),
    Rule(
        name="secagg-linear-uplink",
        parts=("secagg", "uplink"),
        reason="uplink: {use|a codec such as quantise} does not survive addition, so that it cannot sit behind secure "
        "aggregation",
        way_out="leave it out, or take fewer bytes by secagg.modulus_bits = 32",
        finding=lambda view: first(
            {p.name: not step.linear for p, step in zip(view.plan.uplink, view.uplink.transforms, strict=True)}
        ),
        refused=[{**SECRET, "uplink": ["quantise"]}],
        mended={"uplink": None},
    ),
    Rule(
        name="secagg-groups-hide",
        parts=("secagg", "policy"),
        reason="{use|a client hides among those of its group, so that} no sum of fewer than "
        "{secagg.required_survivors|secagg.min_survivors} is opened",
        way_out="lower secagg.groups, raise policy.size, or lower secagg.min_survivors",
        finding=_small_groups,
        refused=[{**SECRET, "policy.size": 2}, {"secagg.groups": 4}],
        mended={"secagg.groups": 1, "policy.size": 4},
    ),
    Rule(
        name="secagg-scheme-fits-cohort",
        parts=("secagg.scheme", "policy"),
        reason="a scheme needs so many clients that those who drop out or collude cannot undo it",
        way_out="ask more clients",
        finding=lambda view: said(lambda: view.scheme and view.scheme.check(view.asked // view.masks.groups)),
        refused=[{"secagg.scheme": {"name": "pairwise", "dropouts": 0.5}}],
        mended={"secagg.scheme.dropouts": 0.2},
    ),
    Rule(
        name="secagg-scheme-fits-modulus",
        parts=("secagg.scheme",),
        reason="{secagg.scheme|ckks} has no room for values of {secagg.modulus_bits|64} bits",
        way_out="set secagg.modulus_bits = {bits|32}",
        finding=lambda view: (
            view.scheme and view.masks.modulus_bits not in view.scheme.moduli and {"bits": view.scheme.moduli[0]}
        ),
        refused=[{"secagg": {"scheme": "ckks", "modulus_bits": 64}}],
        mended={"secagg.modulus_bits": 32},
    ),
)
