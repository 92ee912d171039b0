"""Rules on what clients do: public samples to distil on, scores instead of a model, own work."""

from __future__ import annotations

from atoll.checks.rule import Rule, Values, first
from atoll.checks.views import Parts
from atoll.core.algorithm import Algorithm
from atoll.core.transform import no_memory

HELD_OUT = {"public": {"name": "held_out", "fraction": 0.1}}
FEDMD = {"algorithm": "fedmd", **HELD_OUT}
FEEDBACK = {"name": "top_k", "fraction": 0.1, "error_feedback": True}


def _feeds_back(view: Parts) -> Values | None:
    num, remembers = 0 if view.public is None else len(view.public.x), (t.init for t in view.uplink.transforms)
    some = view.algorithm.work is not None and view.algorithm.work.options.get("samples", num) < num
    return {"num": num} if some and any(init is not no_memory for init in remembers) else None


def _statistics(view: Parts) -> Values | None:
    lacks = "runs the clients' models on the server, which lacks batch-norm statistics that stay with the clients"
    leaves = "leaves batch-norm statistics with the clients, as all of their models"
    return first({leaves: not view.sends_models, lacks: view.algorithm.needs_public})


def _unused(view: Parts) -> Values | None:
    """Say what takes effect in the local loop alone, where clients do something else."""
    if view.plan.work is None:
        return None
    if view.work.uses_algorithm:
        return first({f"is not what clients of {view.plan.algorithm.name} do": view.algorithm.work is not None})
    loop = (
        "init_client",
        "local_loss",
        "local_grad",
        "local_memory",
        "start",
        "moves",
        "mask",
        "finish",
        "needs_loss",
        "local",
    )
    slots = (*loop, "personal", "adapt", "keep")
    changed = [slot for slot in slots if getattr(view.algorithm, slot) != getattr(Algorithm(), slot)]
    return first(
        {
            "is what clients of another algorithm do": view.work.layout is not None or view.algorithm.work is not None,
            f"does not take the steps that {view.plan.algorithm.name} changes": changed,
            "takes no steps that could be private": view.mechanism is not None and view.mechanism.steps is not None,
            "reads its samples itself, which no attack can change": view.attack is not None
            and view.attack.data is not None,
        }
    )


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="work-fits-the-rest",
        parts=("work",),
        reason="work {work|of the plan's own} {use|takes the place of the local loop, which other parts change}",
        way_out="leave work out, or use an algorithm whose clients do what fedavg's do, privacy of whole clients, and "
        "no attack on samples",
        finding=_unused,
        refused=[
            {"work": "consensus", **HELD_OUT},
            {"work": "consensus", "algorithm": "scaffold", **HELD_OUT},
            {"work": "sgd", "algorithm": "ifca"},
        ],
        mended={"work": None},
    ),
    Rule(
        name="public-samples-given",
        parts=("algorithm",),
        reason="{algorithm|an algorithm that distils} learns from public samples{use|}",
        way_out='set public, e.g. public = {name = "held_out", fraction = 0.05}, or the name of a data set of the same '
        "shape",
        finding=lambda view: (
            view.public is None
            and first({", and the plan has none": view.algorithm.needs_public or not view.sends_models})
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
        finding=lambda view: view.sends_models,
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
            not view.sends_models and (view.plan.server.lr not in (None, 1.0) or view.aggregator.unit_steps)
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
            view.algorithm.work is not None
            and view.algorithm.work.options.get("public_epochs", 0) > 0
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
