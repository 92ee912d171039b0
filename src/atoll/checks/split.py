"""Rules on split learning: what does not go with a model that is cut between clients and server."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.checks.personal import NEW
from atoll.checks.privacy import CENTRAL, NORMED, SAMPLE
from atoll.checks.public import HELD_OUT
from atoll.checks.rule import Rule, Values, first
from atoll.checks.views import Parts
from atoll.core.algorithm import Algorithm, add_delta
from atoll.core.plan import Plan
from atoll.core.split import VERTICAL, Split

SPLIT: Mapping[str, object] = {"model": "mlp_2nn", "split": {"cut": "2"}}
IN_TURN: Mapping[str, object] = {"model": "mlp_2nn", "split": {"cut": "2", "way": "in_turn"}}
PLAIN = Algorithm()
KEPT: Mapping[str, object] = {"model": "mlp_2nn", "split": {"cut": "2", "tail": "5", "frozen": True}}
AT_CUT: Mapping[str, object] = {"privacy": {"name": "activations", "clip": 1.0, "sigma": 4.0, "delta": 1e-5}}
PEEK: Mapping[str, object] = {"split.defences": [{"name": "nopeek", "weight": 0.1}]}
CLIENT_SLOTS = (
    *("init_client", "broadcast", "local_loss", "local_grad", "local_memory", "start", "moves", "finish", "plausible"),
    *("personal", "adapt", "keep", "needs_loss", "needs_updates", "needs_public", "work", "prepare", "mask", "measure"),
)
"""Slots that see or change what a client does, or need whole updates."""
ENGINES = ("auto", "inline")


def _split(plan: Plan) -> Split:
    assert plan.split is not None
    return plan.split


def _changes_clients(view: Parts) -> Values | None:
    """Name an algorithm that fills a slot of the clients, who run half of a model only."""
    changed = any(getattr(view.algorithm, slot) != getattr(PLAIN, slot) for slot in CLIENT_SLOTS)
    return first({view.plan.algorithm.name: changed})


def _watched(view: Parts) -> Values | None:
    plan = view.plan
    return first({"attack": plan.attack, "detection": plan.detection, "contribution": plan.contribution})


def _tells_labels(split: Split) -> bool:
    """Return whether whoever gets activations of a sample gets its label too; parties that hold columns do not."""
    return split.tail is None and split.way != VERTICAL


def _uncovered(view: Parts) -> Values | None:
    """Say what of the samples leaves a client without noise on activations."""
    split = _split(view.plan)
    uses = {
        "their labels, which travel in the open,": split.tail is None,
        "the clients' first layers, which are trained on samples,": not split.frozen,
        f"{view.mixer}, by which a sample's activations tell of others,": view.mixer,
    }
    return first(uses) if view.protection.at_cut is not None else None


def _hides_labels(view: Parts) -> bool:
    return any(each.perturb is not None for each in view.defences)


def _cannot_peek(view: Parts) -> Values | None:
    """Say why the pieces of a batch cannot be compared with their activations."""
    plan, split = view.plan, _split(view.plan)
    least = max((each.min_samples for each in view.defences), default=1)
    batch = plan.local.batch_size or 10
    few = isinstance(batch, int) and batch // split.micro_batches < least
    peeks = any(each.penalty is not None for each in view.defences)
    uses = {
        f"a piece has {batch // split.micro_batches if isinstance(batch, int) else batch}, {least} are needed": few,
        "the layers that it would train are frozen": split.frozen,
        "samples are ids of tokens, whose distances say nothing": view.tokens,
    }
    return first(uses) if peeks else None


def _moves_more(view: Parts) -> Values | None:
    """Say what moves layers that are handed on by something else than their own training."""
    plan, algorithm = view.plan, view.algorithm
    rate = algorithm.server_lr if plan.server.lr is None else plan.server.lr
    return first(
        {
            f"{plan.algorithm.name} has a step of the server of its own": algorithm.server_step is not add_delta,
            f"server.lr is {rate:g}": rate != 1,
        }
    )


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="split-has-no-sum",
        parts=("split", "secagg"),
        reason="the server of split learning gets the activations of each client's batches, and there is no update to "
        "add in secret",
        way_out="leave secagg out, or leave split out",
        finding=lambda view: True,
        refused=[{**SPLIT, "secagg": {}}],
        mended={"secagg": None},
    ),
    Rule(
        name="split-is-not-private",
        parts=("split", "privacy"),
        reason="{privacy|noise} covers updates, and the activations and labels of split learning, which the server "
        "gets for every batch, would go without",
        way_out="leave privacy out, or leave split out",
        finding=lambda view: view.protection.at_cut is None,
        refused=[{**SPLIT, **CENTRAL}, {**SPLIT, **SAMPLE}],
        mended={"privacy": None},
    ),
    Rule(
        name="activations-need-a-cut",
        parts=("privacy",),
        reason="{privacy|noise on activations} protects what clients of split learning send, and nobody sends "
        "activations in this plan",
        way_out='set split.cut, or use another mechanism, such as privacy = {name = "local", ...}',
        finding=lambda view: view.plan.split is None and view.protection.at_cut is not None,
        refused=[{**AT_CUT}],
        mended={"privacy": None},
    ),
    Rule(
        name="activations-claim-features-alone",
        parts=("split", "privacy"),
        reason="{privacy|noise on activations} covers what is computed from them, and {use|what else was computed from "
        "samples} leaves the client without noise, so that no epsilon can be claimed",
        way_out="set split.tail, so that labels stay, and split.frozen = true, so that the first layers learn nothing; "
        'use group norm for batch norm; or leave privacy out and put "noise" into split.defences, which claims nothing',
        finding=_uncovered,
        refused=[
            {**SPLIT, **AT_CUT},
            {**KEPT, "split.frozen": False, **AT_CUT},
            {**SPLIT, "split.frozen": True, **AT_CUT},
        ],
        mended={"split.tail": "5", "split.frozen": True},
    ),
    Rule(
        name="defences-of-labels-need-labels-to-keep",
        parts=("split.defences",),
        reason="the labels of {use|each sample} travel beside its activations, and noise on gradients would hide what "
        "the server is told anyway",
        way_out="set split.tail, so that labels stay with the clients, or leave out isotropic, max_norm and marvell",
        finding=lambda view: first({"each sample": _hides_labels(view) and _tells_labels(_split(view.plan))}),
        refused=[{**SPLIT, "split.defences": ["max_norm"]}],
        mended={"split.tail": "5"},
    ),
    Rule(
        name="two-classes-for-marvell",
        parts=("split.defences",),
        reason="{use|the noise} is chosen for two classes, and the data have others",
        way_out="use isotropic or max_norm in split.defences, or data with two classes",
        finding=lambda view: first(
            {
                "the noise": any(each.binary for each in view.defences)
                and not (view.kind == "binary" or (view.classes and view.outputs == 2))
            }
        ),
        refused=[{**KEPT, "split.defences": [{"name": "marvell", "scale": 1.0}]}],
        mended={"split.defences": ["max_norm"]},
    ),
    Rule(
        name="nopeek-compares-samples",
        parts=("split.defences",),
        reason="nopeek compares the samples of a piece of a batch with each other, and {use|there are too few}",
        way_out="set local.batch_size to at least 4 samples a piece, and split.frozen = false; or leave nopeek out",
        finding=_cannot_peek,
        refused=[
            {**SPLIT, **PEEK, "local.batch_size": 3},
            {**SPLIT, **PEEK, "split.micro_batches": 4},
            {**SPLIT, **PEEK, "split.frozen": True, "split.tail": "5"},
        ],
        mended={"split.defences": None},
    ),
    Rule(
        name="split-is-not-watched",
        parts=("split",),
        reason="{use|attack, detection and contribution} look at or change whole updates, which no client of split "
        "learning sends",
        way_out="leave it out, or leave split out",
        finding=_watched,
        refused=[
            {**SPLIT, "attack": "sign_flip", "attackers.num": 1},
            {**SPLIT, "detection": "distance"},
            {**SPLIT, "contribution": "leave_one_out", "server.samples": 20},
        ],
        mended={"attack": None, "detection": None, "contribution": None, "server.samples": None},
    ),
    Rule(
        name="split-takes-means",
        parts=("split", "aggregator"),
        reason="{aggregator|a robust rule} compares whole updates, and layers of split learning are averaged or shared",
        way_out='use aggregator = "mean", or leave split out',
        finding=lambda view: view.plan.aggregator.name != "mean",
        refused=[{**SPLIT, "aggregator": "median"}, {**SPLIT, "aggregator": {"name": "krum", "f": 0}}],
        mended={"aggregator": "mean"},
    ),
    Rule(
        name="split-takes-plain-steps",
        parts=("split", "algorithm"),
        reason="clients of {use|such an algorithm} look at the whole model while they train, and those of split "
        "learning have a part of it",
        way_out="use fedavg, or an algorithm that changes the server's step alone, such as fedavgm; or leave split out",
        finding=_changes_clients,
        refused=[
            {**SPLIT, "algorithm": {"name": "fedprox", "mu": 0.1}},
            {**SPLIT, "algorithm": "scaffold"},
            {**SPLIT, "algorithm": "fedper"},
            {**SPLIT, "algorithm": "feddf", **HELD_OUT},
        ],
        mended={"algorithm": "fedavg", "public": None},
    ),
    Rule(
        name="split-hands-layers-on",
        parts=("split", "algorithm"),
        reason="{use|a step of the server} would move layers that clients hand on to each other, which nothing else "
        "than their training changes",
        way_out='use fedavg without server.lr, or split.way = "splitfed_v1"',
        finding=lambda view: _moves_more(view) if _split(view.plan).way == "in_turn" else None,
        refused=[{**IN_TURN, "algorithm": "fedavgm"}, {**IN_TURN, "server.lr": 0.5}],
        mended={"algorithm": "fedavg", "server.lr": None},
    ),
    Rule(
        name="split-codecs-are-its-own",
        parts=("split",),
        reason="{use|uplink and downlink} encode updates and broadcasts, and split learning sends activations and "
        "gradients",
        way_out="name codecs in split.codecs instead",
        finding=lambda view: first({"uplink": view.plan.uplink, "downlink": view.plan.downlink}),
        refused=[{**SPLIT, "uplink": ["quantise"]}, {**SPLIT, "downlink": ["half"]}],
        mended={"uplink": None, "downlink": None, "split.codecs": ["half"]},
    ),
    Rule(
        name="split-rounds-end",
        parts=("split", "policy"),
        reason="{policy|a policy that overlaps rounds} lets clients work on old versions, and layers of the server's "
        "that clients share have one",
        way_out='use policy = "cohort"',
        finding=lambda view: view.policy.overlaps_rounds,
        refused=[{**SPLIT, "policy": {"name": "buffered", "concurrency": 4, "size": 2}}],
        mended={"policy": "cohort"},
    ),
    Rule(
        name="split-devices-are-links",
        parts=("split", "devices"),
        reason="{devices|devices} take time for a broadcast and an update, and split learning sends a message for "
        "every batch",
        way_out="set split.bandwidth and split.latency instead of devices",
        finding=lambda view: True,
        refused=[{**SPLIT, "devices": "fleet"}],
        mended={"devices": None, "split.latency": 0.02},
    ),
    Rule(
        name="split-shares-all",
        parts=("split",),
        reason="clients of split learning have the layers before the cut, and {use|nothing else that they keep}",
        way_out="leave share, keep, models, work and local.buffers out, or leave split out",
        finding=lambda view: first(
            {
                "the plan keeps others of the model": view.keeps,
                "the plan has several models": view.plan.models,
                "the plan has other work": view.plan.work,
                'local.buffers = "local" would keep statistics of layers that they do not have': (
                    view.plan.local.buffers == "local"
                ),
            }
        ),
        refused=[
            {**SPLIT, "keep": ["5.*"]},
            {**SPLIT, "models": ["mlp_2nn"]},
            {**SPLIT, "work": "sgd"},
            {**SPLIT, "local.buffers": "local"},
        ],
        mended={"keep": None, "models": None, "work": None, "local.buffers": "average"},
    ),
    Rule(
        name="split-new-clients-train-alone",
        parts=("split", "evaluation.new_clients"),
        reason="new clients adapt the whole model by themselves, and those of split learning have a part of it",
        way_out="leave evaluation.new_clients out, or leave split out",
        finding=lambda view: True,
        refused=[{**SPLIT, **NEW}],
        mended={"evaluation.new_clients": None},
    ),
    Rule(
        name="split-runs-in-one-process",
        parts=("split", "engine"),
        reason="{engine|another engine} trains whole models, and split learning exchanges messages in one process",
        way_out='leave engine out, or set engine = "inline"',
        finding=lambda view: view.plan.engine.name not in ENGINES,
        refused=[{**SPLIT, "engine": "vectorised"}, {**SPLIT, "engine": "processes"}],
        mended={"engine": "inline"},
    ),
    Rule(
        name="split-pieces-are-alike",
        parts=("split", "model"),
        reason="{use|batch norm} in the model mixes the samples of a batch, so that the gradients of its pieces do not "
        "add up to its own",
        way_out="set split.micro_batches = 1, use a model with group norm, or leave split out",
        finding=lambda view: first({str(view.mixer): view.mixer and _split(view.plan).micro_batches > 1}),
        refused=[{**NORMED, "split": {"cut": "1", "micro_batches": 2}}],
        mended={"split": None},
    ),
)
