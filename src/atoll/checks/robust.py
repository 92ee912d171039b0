"""Rules on the server's rule, its own samples, detection, contribution and attacks."""

from __future__ import annotations

from atoll.checks.rule import Rule, Values, first
from atoll.checks.views import Parts, ServerSamples

FLTRUST = {"aggregator": "fltrust", "server.samples": 20}
FEDMD = {"algorithm": "fedmd", "public": {"name": "held_out", "fraction": 0.1}}
SHAPLEY = {"contribution": "shapley", "server.samples": 50}


def _unlabelled(view: ServerSamples) -> Values | None:
    public = view.public
    lack = ", but the plan has none" if public is None else f", but {public.name} comes without labels"
    return first({lack: view.num and view.source == "public" and (public is None or public.y is None)})


def _too_few(view: ServerSamples) -> Values | None:
    public = view.public if view.source == "public" else None
    kind, most = ("training", view.num_train) if public is None else ("public", len(public.x))
    return first({f"server.samples is {view.num} but there are only {most} {kind} samples": view.num > most})


def _no_attackers(view: Parts) -> Values | None:
    who, num = view.plan.attackers, view.num_clients
    largest = max(who.clients, default=0)
    uses = {
        "there is an attack but nobody attacks": not who.clients and who.num is who.fraction is who.added is None,
        f"attackers.clients names client {largest}, but there are only 0 to {num - 1}": largest >= num,
        f"attackers.num is {who.num} but the federation has {num} clients": (who.num or 0) > num,
    }
    return first(uses)


def _few_updates(view: Parts) -> Values | None:
    needs, least, goal = view.aggregator.needs, view.aggregator.min_updates, view.goal
    few = view.plan.secagg is None and goal < least  # under masks it sees the sums of groups
    return {"use": f"{needs}, but {goal} make a version", "least": f" to {least}"} if few else None


def _looks_at_samples(view: Parts) -> Values | None:
    uses = {
        f"{view.plan.aggregator.name} needs": view.aggregator.add_server_update,
        "detection by loss needs": view.detector is not None and view.detector.needs_loss,
        "contribution needs": view.contribution,
    }
    return first(uses)


def _looks_at_model(view: Parts) -> Values | None:
    uses = {
        f"{view.plan.aggregator.name} compares changes of": view.aggregator.add_server_update,
        "detection by loss tries": view.detector is not None and view.detector.needs_loss,
        "contribution values": view.contribution,
        "secure aggregation adds changes of": view.plan.secagg,
        "privacy protects": view.plan.privacy,
    }
    return None if view.sends_models else first(uses)


def _many_players(view: Parts) -> Values | None:
    limit = view.contribution.max_clients if view.contribution is not None else None
    most = view.num_clients if view.sampler.draws_size else view.goal
    return {"limit": limit, "most": most} if limit is not None and most > limit else None


SAMPLES: tuple[Rule[ServerSamples], ...] = (
    Rule(
        name="server-samples-are-labelled",
        parts=("server.source", "public"),
        reason='server.source = "public" needs public samples with labels{use|}',
        way_out='set public = {name = "held_out", fraction = 0.05}, which takes labelled samples away from all clients',
        finding=_unlabelled,
        refused=[{**FLTRUST, "server.source": "public"}, {**FLTRUST, "server.source": "public", "public": "digits"}],
        mended={"public": {"name": "held_out", "fraction": 0.05}},
    ),
    Rule(
        name="server-samples-exist",
        parts=("server.samples", "data"),
        reason="{use|the server's samples are picked from the training samples, or from the public ones}",
        way_out="lower it",
        finding=_too_few,
        refused=[{**FLTRUST, "server.samples": 10_000}],
        mended={"server.samples": 100},
    ),
)

RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="attackers-are-clients",
        parts=("attack", "attackers", "partition"),
        reason="{use|an attack needs attackers, who are some of the clients}",
        way_out="set attackers.num, .fraction, .clients or .added so that there are such clients",
        finding=_no_attackers,
        refused=[{"attack": "zero", **who} for who in ({}, {"attackers.num": 7}, {"attackers.clients": [6]})],
        mended={"attackers": {"num": 1}},
    ),
    Rule(
        name="rule-fits-cohort",
        parts=("aggregator", "policy"),
        reason="{use|a robust rule needs enough updates to outvote those of f bad clients}",
        way_out="lower f, or raise policy.size{least|}",
        finding=_few_updates,
        refused=[{"aggregator": {"name": "krum", "f": 1}}],
        mended={"policy.size": 5},
    ),
    Rule(
        name="votes-need-a-step-size",
        parts=("aggregator", "server"),
        reason="{aggregator|a rule that gives votes} moves every parameter by server.lr",
        way_out="set it, e.g. to 0.001",
        finding=lambda view: view.aggregator.unit_steps and view.plan.server.lr is None,
        refused=[{"aggregator": "majority"}],
        mended={"server.lr": 0.001},
    ),
    Rule(
        name="server-samples-wanted",
        parts=("server",),
        reason="{use|rules such as fltrust, detection by loss and contribution need} samples of the server's own",
        way_out="set server.samples, e.g. to 100",
        finding=lambda view: view.plan.server.samples is None and _looks_at_samples(view),
        refused=[{"aggregator": "fltrust"}, {"detection": "loss"}, {"contribution": "leave_one_out"}],
        mended={"server.samples": 100},
    ),
    Rule(
        name="server-samples-used",
        parts=("server.samples",),
        reason="server.samples is {server.samples|set}, but {aggregator|a rule such as median} does not use them",
        way_out="leave it out, or use fltrust",
        finding=lambda view: not _looks_at_samples(view),
        refused=[{"server.samples": 50}, {"server.samples": 50, "detection": "distance"}],
        mended={"server.samples": None},
    ),
    Rule(
        name="one-shared-model",
        parts=("algorithm",),
        reason="{use|rules such as fltrust, detection by loss, contribution, secure aggregation and privacy look at} a "
        "shared model, but clients of {algorithm|fedmd} keep their own and send scores",
        way_out="leave it out, or use fedavg",
        finding=_looks_at_model,
        refused=[
            {**FEDMD, **FLTRUST},
            {**FEDMD, "detection": "loss", "server.samples": 50},
            {**FEDMD, **SHAPLEY},
            {**FEDMD, "secagg": {}},
            {**FEDMD, "privacy": {"name": "local", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}},
        ],
        mended={"algorithm": "fedavg"},
    ),
    Rule(
        name="coalitions-can-be-tried",
        parts=("contribution", "policy"),
        reason="{contribution|shapley} tries every coalition of at most {limit|10} clients, but a round may have "
        "{most|more}",
        way_out="use gtg_shapley or tmc_shapley, or lower policy.size",
        finding=_many_players,
        refused=[{**SHAPLEY, "partition.num_clients": 11, "policy.size": 11}],
        mended={"policy.size": 4},
    ),
)
