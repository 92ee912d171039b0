"""Rules on clients' own models: parameters that they keep, whole models beside the shared one, clusters."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.checks.privacy import CENTRAL, SAMPLE
from atoll.checks.public import FEDMD, HELD_OUT
from atoll.checks.rule import Rule, Values, first, said
from atoll.checks.views import NewClients, Parts


def _wants_whole_models(view: Parts) -> Values | None:
    """Say what runs a model on the server, which has none that serves all clients."""
    return first(
        {
            f"{view.plan.algorithm.name} runs clients' models": view.algorithm.needs_public,
            f"{view.plan.aggregator.name} trains a model": view.aggregator.add_server_update,
            "detection by loss runs a model": view.detector is not None and view.detector.needs_loss,
            "contribution runs models": view.contribution is not None,
        }
    )


def _leaves_no_cohort(view: NewClients) -> Values | None:
    """Say if new clients are why a round cannot ask as many clients as it should."""
    added = (view.plan.attackers.added or 0) if view.plan.attack else 0
    num, left = view.num_clients, max(0, view.num_clients - view.num)
    too_few = not left or (
        said(lambda: view.policy.goal(left + added)) and not said(lambda: view.policy.goal(num + added))
    )
    return first({f"evaluation.new_clients = {view.num} leaves {left} of {num} clients, too few for": too_few})


NEW: Mapping[str, object] = {"evaluation.new_clients": 2, "evaluation.holdout": 0.2}
NEW_CLIENTS: tuple[Rule[NewClients], ...] = (
    Rule(
        name="new-clients-leave-a-cohort",
        parts=("evaluation.new_clients", "policy"),
        reason="{use|clients that are held out of training must leave enough others for} a round by {policy|the plan}",
        way_out="lower evaluation.new_clients, ask fewer clients, or make more with partition.num_clients",
        finding=_leaves_no_cohort,
        refused=[
            {**NEW, "evaluation.new_clients": 3},
            {**NEW, "evaluation.new_clients": 6, "policy.size": 1},
            {**NEW, "policy": {"name": "buffered", "concurrency": 5, "size": 2}},
        ],
        mended={"partition.num_clients": 12},
    ),
    Rule(
        name="new-clients-hold-their-own",
        parts=("evaluation.new_clients", "partition"),
        reason="clients of {partition|this partition} may hold the same samples, so that what is held out of training "
        "with a new client may be trained on by another",
        way_out="leave samples_per_client out, or leave evaluation.new_clients out",
        finding=lambda view: not view.disjoint,
        refused=[{**NEW, "partition": {"name": "iid", "num_clients": 6, "samples_per_client": 50}}],
        mended={"partition.samples_per_client": None},
    ),
    Rule(
        name="new-clients-need-holdout",
        parts=("evaluation.new_clients", "evaluation"),
        reason="new clients are measured on samples that they do not adapt to, and {use|too few clients hold some out}",
        way_out="set evaluation.holdout, e.g. to 0.2, give clients more samples, or lower evaluation.new_clients",
        finding=lambda view: first(
            {f"{view.num_measurable} of {view.num_clients} clients hold some out": view.num > view.num_measurable}
        ),
        refused=[{"evaluation.new_clients": 2}, {"evaluation.new_clients": 2, "evaluation.holdout": 0.001}],
        mended={"evaluation.holdout": 0.2},
    ),
)

KEEPS = {"model": "mlp_2nn", "keep": ["*bias"]}
RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="new-clients-take-steps",
        parts=("evaluation.new_clients",),
        reason="new clients adapt by steps of the local loop, which {use|other work, such as that of fedmd,} replaces",
        way_out="leave evaluation.new_clients out, or use another algorithm and no other work",
        finding=lambda view: first({(view.plan.work or view.plan.algorithm).name: not view.work.stackable}),
        refused=[{**NEW, **FEDMD}],
        mended={"evaluation.new_clients": None},
    ),
    Rule(
        name="kept-parameters-are-trained",
        parts=("work",),
        reason="parameters that clients keep are trained by the local loop, which {work|other work} replaces",
        way_out="leave share and keep out, or leave work out",
        finding=lambda view: view.keeps and not view.work.uses_algorithm,
        refused=[{"work": "consensus", **HELD_OUT, **KEEPS}],
        mended={"work": None},
    ),
    Rule(
        name="kept-parameters-have-no-consensus",
        parts=("algorithm",),
        reason="clients of {algorithm|fedmd} have whole models of their own already",
        way_out="leave share and keep out, or use another algorithm",
        finding=lambda view: view.keeps and view.plan.work is None and not view.work.uses_algorithm,
        refused=[{**FEDMD, **KEEPS}],
        mended={"keep": None, "model": "logistic"},
    ),
    Rule(
        name="kept-parameters-without-private-steps",
        parts=("privacy",),
        reason="what a client keeps is trained without noise and steers later gradients, so that "
        "{privacy|privacy of samples} would promise too much",
        way_out="leave share and keep out, or protect whole clients, e.g. by central",
        finding=lambda view: view.keeps and view.protection.steps is not None,
        refused=[{**KEEPS, "privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}}],
        mended={"keep": None},
    ),
    Rule(
        name="kept-parameters-stay-away",
        parts=("algorithm",),
        reason="{use|what runs a model} on the server, which lacks the parameters that clients keep",
        way_out="leave share and keep out, or leave that out",
        finding=lambda view: _wants_whole_models(view) if view.keeps else None,
        refused=[
            {**KEEPS, "aggregator": "fltrust", "server.samples": 20},
            {**KEEPS, "algorithm": "feddf", **HELD_OUT},
            {**KEEPS, "contribution": "leave_one_out", "server.samples": 20},
            {**KEEPS, "detection": "loss", "server.samples": 20},
        ],
        mended={"keep": None},
    ),
    Rule(
        name="own-models-are-whole",
        parts=("algorithm",),
        reason="clients of {algorithm|ditto} have whole models of their own beside the shared one, so that there is "
        "nothing to keep",
        way_out="leave share and keep out, or use fedper",
        finding=lambda view: view.keeps and (view.algorithm.personal or view.algorithm.start) is not None,
        refused=[{**KEEPS, "algorithm": "ditto"}, {**KEEPS, "algorithm": "mean_regularised"}],
        mended={"algorithm": "fedper"},
    ),
    Rule(
        name="own-models-are-not-told",
        parts=("stop.accuracy", "privacy"),
        reason="stop.accuracy would never be reached, since {privacy|noise} does not cover what clients keep, so that "
        "their models are not measured",
        way_out="leave stop.accuracy out, or leave share and keep out",
        finding=lambda view: view.keeps and not view.protection.test_noise,
        refused=[{**KEEPS, **CENTRAL, "stop.accuracy": 0.9}],
        mended={"stop.accuracy": None},
    ),
    Rule(
        name="phases-need-kept-parameters",
        parts=("algorithm",),
        reason="{algorithm|fedrep} trains what clients keep and what they share in turn, and the plan keeps nothing",
        way_out="keep some parameters, or use fedavg",
        finding=lambda view: not view.keeps and view.algorithm.moves is not None,
        refused=[{"model": "mlp_2nn", "algorithm": "fedrep", "share": ["*"]}],
        mended={"share": None},
    ),
    Rule(
        name="candidates-need-validation",
        parts=("algorithm",),
        reason="clients of {algorithm|interpolation} choose between models by samples that they neither train on nor "
        "are measured on, and the plan sets none apart",
        way_out="set evaluation.validation, e.g. to 0.2",
        finding=lambda view: view.algorithm.needs_validation and not view.plan.evaluation.validation,
        refused=[{"algorithm": "interpolation"}],
        mended={"evaluation.validation": 0.2},
    ),
    Rule(
        name="clusters-are-averaged",
        parts=("algorithm", "aggregator"),
        reason="updates of {algorithm|ifca} are zero for the models of other clusters, of which {aggregator|a robust "
        "rule} would make nothing",
        way_out="use mean, or another algorithm",
        finding=lambda view: (
            view.work.copies is not None and (view.aggregator.needs_individuals or view.aggregator.unit_steps)
        ),
        refused=[{"algorithm": "ifca", "aggregator": "median"}, {"algorithm": "ifca", "aggregator": "majority"}],
        mended={"aggregator": "mean"},
    ),
    Rule(
        name="clusters-have-no-one-model",
        parts=("algorithm",),
        reason="{use|what runs a model} on the server, and {algorithm|ifca} has one for each cluster",
        way_out="leave that out, or use another algorithm",
        finding=lambda view: _wants_whole_models(view) if view.work.copies is not None else None,
        refused=[
            {"algorithm": "ifca", "contribution": "leave_one_out", "server.samples": 20},
            {"algorithm": "ifca", "detection": "loss", "server.samples": 20},
        ],
        mended={"algorithm": "fedavg"},
    ),
    Rule(
        name="clusters-are-not-compared",
        parts=("algorithm", "detection"),
        reason="{detection|a detector} trusts clients whose updates are like their mean, and those of {algorithm|ifca} "
        "are like that of their own cluster only",
        way_out="leave detection out, or use another algorithm",
        finding=lambda view: view.work.copies is not None,
        refused=[{"algorithm": "ifca", "detection": "cosine"}, {"algorithm": "ifca", "detection": "distance"}],
        mended={"detection": None},
    ),
    Rule(
        name="clusters-are-not-chosen-in-private",
        parts=("algorithm", "privacy"),
        reason="clients of {algorithm|ifca} choose a cluster by the losses on their samples and say which, and "
        "{privacy|noise in steps} does not cover that",
        way_out="use another algorithm, or leave privacy out",
        finding=lambda view: view.work.copies is not None and view.protection.steps is not None,
        refused=[{"algorithm": "ifca", **SAMPLE}],
        mended={"algorithm": "fedavg"},
    ),
)
