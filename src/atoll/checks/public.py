"""Rules on algorithms that distil: what public samples they need, and what makes no sense of class scores."""

from __future__ import annotations

from atoll.checks.rule import Rule, Values, first
from atoll.checks.views import Parts
from atoll.core.transform import no_memory

HELD_OUT = {"public": {"name": "held_out", "fraction": 0.1}}
FEDMD = {"algorithm": "fedmd", **HELD_OUT}
FEEDBACK = {"name": "top_k", "fraction": 0.1, "error_feedback": True}


def _feeds_back(view: Parts) -> Values | None:
    num, remembers = 0 if view.public is None else len(view.public.x), (t.init for t in view.uplink.transforms)
    some = view.scores is not None and view.scores.num_samples < num
    return {"num": num} if some and any(init is not no_memory for init in remembers) else None


def _statistics(view: Parts) -> Values | None:
    lacks = "runs the clients' models on the server, which lacks batch-norm statistics that stay with the clients"
    leaves = "leaves batch-norm statistics with the clients, as all of their models"
    return first({leaves: not view.shares_model, lacks: view.algorithm.needs_public})


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="public-samples-given",
        parts=("algorithm",),
        reason="{algorithm|an algorithm that distils} learns from public samples{use|}",
        way_out='set public, e.g. public = {name = "held_out", fraction = 0.05}, or the name of a data set of the same '
        "shape",
        finding=lambda view: (
            view.public is None
            and first({", and the plan has none": view.algorithm.needs_public or not view.shares_model})
        ),
        refused=[{"algorithm": "feddf"}, {"algorithm": "fedmd"}],
        mended={"public": {"name": "held_out", "fraction": 0.05}},
    ),
    Rule(
        name="public-statistics-travel",
        parts=("algorithm", "local.buffers"),
        reason="{algorithm|an algorithm that distils} {use|has no use for local.buffers}",
        way_out='leave local.buffers out, or set it to "average"',
        finding=lambda view: view.plan.local.buffers == "local" and _statistics(view),
        refused=[{**FEDMD, "local.buffers": "local"}, {**FEDMD, "algorithm": "feddf", "local.buffers": "local"}],
        mended={"local.buffers": "average"},
    ),
    Rule(
        name="models-are-averaged",
        parts=("models", "algorithm"),
        reason="{algorithm|an algorithm with a shared model} averages parameters, so that all clients need one model",
        way_out="set model, not models",
        finding=lambda view: view.shares_model,
        refused=[{"models": ["logistic", "mlp_2nn"]}],
        mended={"models": None, "model": "mlp_2nn"},
    ),
    Rule(
        name="scores-are-averaged",
        parts=("algorithm", "server", "aggregator"),
        reason="{algorithm|fedmd} replaces one round's consensus of scores by the next, without a step size, and votes "
        "are no scores",
        way_out="leave server.lr out, and use mean or median",
        finding=lambda view: (
            not view.shares_model and (view.plan.server.lr not in (None, 1.0) or view.aggregator.unit_steps)
        ),
        refused=[{**FEDMD, "server.lr": 0.5}, {**FEDMD, "server.lr": 1.0, "aggregator": "majority"}],
        mended={"server.lr": None, "aggregator": "median"},
    ),
    Rule(
        name="public-labels-known",
        parts=("public", "algorithm"),
        reason="{algorithm|fedmd}.public_epochs needs labels, and public data from elsewhere come without",
        way_out='leave public_epochs out, or set public to "held_out"',
        finding=lambda view: (
            view.scores is not None
            and view.scores.public_epochs > 0
            and view.public is not None
            and view.public.y is None
        ),
        refused=[{"algorithm": {"name": "fedmd", "public_epochs": 1}, "public": "digits"}],
        mended=HELD_OUT,
    ),
    Rule(
        name="scores-have-no-feedback",
        parts=("uplink", "algorithm"),
        reason="error feedback would add what was left out of one round's scores to the scores of other samples",
        way_out="set error_feedback = false, or {algorithm|fedmd}.samples to at least {num|as many as are public}",
        finding=_feeds_back,
        refused=[{**FEDMD, "algorithm": {"name": "fedmd", "samples": 20}, "uplink": [FEEDBACK]}],
        mended={"uplink": [{**FEEDBACK, "error_feedback": False}]},
    ),
)
