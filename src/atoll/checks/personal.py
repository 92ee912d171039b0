"""Rules on clients' own models: parameters that they keep, whole models beside the shared one, clusters."""

from __future__ import annotations

from atoll.checks.privacy import CENTRAL, SAMPLE
from atoll.checks.public import FEDMD, HELD_OUT
from atoll.checks.rule import Rule, Values, first
from atoll.checks.views import Parts


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


KEEPS = {"model": "mlp_2nn", "keep": ["*bias"]}
RULES: tuple[Rule[Parts], ...] = (
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
