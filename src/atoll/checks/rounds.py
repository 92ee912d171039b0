"""Rules on rounds, local training and what travels: policy, sampler, devices, stops, links."""

from __future__ import annotations

from atoll.checks.rule import Rule, Values, first, said
from atoll.checks.views import Parts, Round, Simulated
from atoll.core.eligibility import ANYBODY

LATE = {"policy": {"name": "buffered", "concurrency": 4, "size": 2}}
DISTILLED = {"algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}}
LOCAL = {"privacy": {"name": "local", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}}


def _contradiction(view: Parts) -> Values | None:
    local, fixed = view.plan.local, view.algorithm.local
    for key, value in fixed.items():
        given = local.optimizer.name if key == "optimizer" else getattr(local, key)
        if given is not None and given != value:
            return {"use": f"fixes local.{key} = {value!r} but the plan says {given!r}"}
    steps = f"fixes local.epochs = {fixed.get('epochs')} but the plan says local.steps = {local.steps}"
    plain = f"takes plain steps, but local.optimizer has the options {local.optimizer.options}"
    return first({steps: "epochs" in fixed and local.steps, plain: "optimizer" in fixed and local.optimizer.options})


def _late(view: Parts) -> Values | None:
    plan = view.plan
    uses = {
        "detection compares": plan.detection,
        "contribution compares": plan.contribution,
        f"{plan.algorithm.name} needs": view.algorithm.needs_updates or not view.sends_models,
        "secure aggregation adds": plan.secagg,
        "privacy is accounted for by": plan.privacy,
    }
    return first(uses) if view.policy.overlaps_rounds else None


def _disorder(view: Parts) -> Values | None:
    late = any(step.against_known for step in view.downlink.chain.transforms[1:])
    twice = "downlink: differences carry what a codec left out before, so that error_feedback would count it twice"
    feeds_back = any(part.options.get("error_feedback") for part in view.plan.downlink)
    return first({"downlink encodes before there is a difference": late, twice: feeds_back})


def _few_candidates(view: Parts) -> Values | None:
    most, asked = view.sampler.max_picks, view.asked
    use = f"sampler.candidates is {most} but a round asks {asked} clients"
    return {"use": use, "asked": asked} if most is not None and most < asked else None


def _too_few_bytes(view: Round) -> Values | None:
    budget, least = view.plan.stop.bytes or 0, view.least_bytes
    return first({f"stop.bytes of {budget:,}, where a round takes at least {least:,},": budget < least})


SIMULATED: tuple[Rule[Simulated], ...] = (
    Rule(
        name="eligibility-needs-devices",
        parts=("eligibility",),
        reason="eligibility is a rule on devices{use|}",
        way_out="set devices, e.g. to fleet",
        finding=lambda view: (
            view.plan.devices is None and first({", but the plan has none": view.plan.eligibility != ANYBODY})
        ),
        refused=[{"eligibility.charging": False}],
        mended={"devices": "fleet"},
    ),
)

RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="stop-accuracy-is-measured",
        parts=("stop.accuracy", "evaluation"),
        reason="stop.accuracy needs evaluation.every of at least 1, or nothing would be measured",
        way_out="set evaluation.every, e.g. to 1",
        finding=lambda view: view.plan.evaluation.every == 0,
        refused=[{"stop.accuracy": 0.9, "evaluation.every": 0}],
        mended={"evaluation.every": 1},
    ),
    Rule(
        name="simulated-seconds-need-devices",
        parts=("stop.simulated_seconds",),
        reason="stop.simulated_seconds needs devices or links that take time",
        way_out="set devices, e.g. to fleet, or split.latency where the model is cut",
        finding=lambda view: view.plan.devices is None and not (view.plan.split and view.plan.split.takes_time),
        refused=[{"stop.simulated_seconds": 60.0}],
        mended={"devices": "fleet"},
    ),
    Rule(
        name="one-version",
        parts=("policy",),
        reason="{use|detection, contribution, secure aggregation, privacy and algorithms that distil need} updates of "
        "one version, but {policy|a policy that overlaps rounds} takes them late by different amounts",
        way_out='use policy = "cohort"',
        finding=_late,
        refused=[
            {**LATE, "detection": "distance"},
            {**LATE, "contribution": "leave_one_out", "server.samples": 50},
            {**LATE, **DISTILLED},
            {**LATE, "secagg": {}},
            {**LATE, **LOCAL},
        ],
        mended={"policy": "cohort"},
    ),
    Rule(
        name="policy-fits-clients",
        parts=("policy", "partition"),
        reason="a policy cannot wait for more clients than there are",
        way_out="make more clients with partition.num_clients",
        finding=lambda view: said(lambda: view.goal),
        refused=[{"policy.size": 7}, {"policy": {"name": "buffered", "concurrency": 7, "size": 2}}],
        mended={"partition.num_clients": 8},
    ),
    Rule(
        name="sampler-has-candidates",
        parts=("sampler", "policy"),
        reason="{use|sampler.candidates must be at least as many as the clients that a round asks}",
        way_out="set it to at least {asked|as many}, or leave it out",
        finding=_few_candidates,
        refused=[{"sampler": {"name": "power_of_choice", "candidates": 2}}],
        mended={"sampler.candidates": 5},
    ),
    Rule(
        name="drawn-cohort-counts-whole",
        parts=("sampler", "policy"),
        reason="{sampler|poisson} draws how many clients are asked, and all who answer count",
        way_out="leave policy.over_selection out, or use another sampler",
        finding=lambda view: view.sampler.draws_size and view.asked != view.goal,
        refused=[{"sampler": "poisson", "policy.over_selection": 1.5}],
        mended={"policy.over_selection": None},
    ),
    Rule(
        name="algorithm-fixes-local",
        parts=("algorithm", "local"),
        reason="{algorithm|an algorithm} {use|may be defined for certain local steps, which no plan can change}",
        way_out="leave it out",
        finding=_contradiction,
        refused=[
            {"algorithm": "fedsgd"},
            {"algorithm": "fedsgd", "local": {"epochs": 2}},
            {"algorithm": "fednova", "local": {"optimizer": {"name": "sgd", "momentum": 0.9}}},
        ],
        mended={"local": {}},
    ),
    Rule(
        name="uplink-sends-differences",
        parts=("uplink",),
        reason="an update on its uplink is a difference already",
        way_out="leave delta out",
        finding=lambda view: any(step.against_known for step in view.uplink.transforms),
        refused=[{"uplink": ["delta"]}],
        mended={"uplink": None},
    ),
    Rule(
        name="downlink-delta-first",
        parts=("downlink",),
        reason="{use|a difference is made before it is encoded, and carries what a codec left out before}",
        way_out="put delta first, before what encodes the difference, and leave error_feedback out",
        finding=_disorder,
        refused=[{"downlink": ["top_k", "delta"]}, {"downlink": ["delta", {"name": "top_k", "error_feedback": True}]}],
        mended={"downlink": ["delta", "top_k"]},
    ),
)

REHEARSED: tuple[Rule[Round], ...] = (
    Rule(
        name="bytes-pay-one-round",
        parts=("stop.bytes",),
        reason="{use|a stop.bytes below what a round takes} does not pay for one round",
        way_out="raise it, ask fewer clients, or compress (uplink, downlink)",
        finding=_too_few_bytes,
        refused=[{"stop.bytes": 1000}],
        mended={"stop.bytes": 1_000_000},
    ),
)
