"""Rules on privacy: nothing may be looked at, measured or drawn that the guarantee does not cover."""

from __future__ import annotations

from atoll.checks.rule import Changes, Rule, Values, first, said
from atoll.checks.views import Budget, Parts, Round
from atoll.core.messages import STATISTICS
from atoll.core.privacy import IN_TURN
from atoll.privacy.accounting import spent

NOISE = {"clip": 1.0, "sigma": 1.0, "delta": 1e-5}
CENTRAL: Changes = {"sampler": "poisson", "privacy": {"name": "central", **NOISE}}
DISTRIBUTED: Changes = {"sampler": "round_robin", "privacy": {"name": "distributed", **NOISE}}
FTRL: Changes = {"sampler": "round_robin", "privacy": {"name": "ftrl", **NOISE}}
LOCAL: Changes = {"sampler": "uniform", "privacy": {"name": "local", **NOISE}}
SAMPLE: Changes = {"sampler": "uniform", "privacy": {"name": "sample", **NOISE}}
NORMED: Changes = {
    "data": {"name": "synthetic", "num_features": 10},
    "model": {"name": "torch.nn:BatchNorm1d", "num_features": 10},
}


def _large_delta(view: Parts) -> Values | None:
    unit, delta = view.protection.unit, view.protection.delta
    num = view.num_clients if unit == "client" else view.every_round.num_samples
    use = f"privacy.delta is {delta:g}, but {num:,} {unit}s are to be hidden:"
    return {"use": use, "most": f"{1 / num:.2g}"} if delta * num >= 1 else None


def _not_protected(view: Parts) -> Values | None:
    name, score = view.plan.sampler.name, view.sampler.score
    uses = {
        f"{view.plan.algorithm.name} weighs clients by the losses on their data": view.algorithm.needs_loss,
        f"{name} prefers clients by their {score}": score,
        f"{name} prefers clients by how many samples they have": "by size" in view.sampler.scheme,
    }
    return first(uses)


def _not_charged(view: Parts) -> Values | None:
    every, stop = view.plan.evaluation.clients_every, view.plan.stop
    names = ("samples", "simulated_seconds", *(["bytes"] if view.protection.hides_cohort else []))
    uses = {f"stop.{name} tells of clients' data or of who was asked": getattr(stop, name) for name in names}
    on_clients = {
        "evaluation.clients_every measures the model on clients' own data": every,
        "evaluation.new_clients measures models on clients' own data": view.plan.evaluation.new_clients,
    }
    return first({**on_clients, **uses})


def _single_updates(view: Parts) -> Values | None:
    plan, colludes = view.plan, view.attack is not None and view.attack.collude is not None
    uses = {
        f"{plan.algorithm.name} looks": view.algorithm.needs_updates,
        f"{plan.aggregator.name} looks": plan.aggregator.name != "mean",
        "detection looks": plan.detection,
        "contribution looks": plan.contribution,
        "the attack looks": colludes and plan.secagg is None,
    }
    return first(uses) if view.protection.on_grid is not None else None


def _no_room(view: Parts) -> Values | None:
    bound, cohort = view.protection.sum_bound, view.exposure.cohort
    return {"cohort": cohort} if bound and bound(cohort) >= 1 << view.masks.modulus_bits - 1 else None


def _changing_cohort(view: Parts) -> Values | None:
    own, least, over = view.protection.min_reports is not None, view.policy.min_reports, view.asked != view.goal
    uses = {
        "policy.over_selection lets it depend on others who counts, which no accountant knows": over,
        f"policy.min_reports is {least}, but the mechanism says how many must answer": own and least > 1,
    }
    return first(uses)


def _unpaid(view: Budget) -> Values | None:
    budget = view.mechanism.epsilon
    price = 0.0 if budget is None else spent(view.mechanism, view.exposure._replace(attempts=1)).epsilon
    use = f"privacy.epsilon of {budget}, where a round takes {price:g},"
    return {"use": use} if budget is not None and price > budget else None


def _noisy(view: Round) -> Values | None:
    names = ", ".join("batch-norm statistics" if name == STATISTICS else name for name in view.exact)
    return {"names": names} if names and view.mechanism is not None and view.mechanism.steps is None else None


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="private-delta",
        parts=("privacy", "partition"),
        reason="{use|of those who are hidden,} a delta of one over their number allows to give one of them away",
        way_out="set it below {most|that}",
        finding=_large_delta,
        refused=[{**LOCAL, "privacy.delta": 0.006, "partition.num_clients": 200}],
        mended={"privacy.delta": 1e-5},
    ),
    Rule(
        name="private-draws-accounted",
        parts=("privacy", "sampler", "policy"),
        reason="a mechanism is accounted for clients that are drawn in a certain way",
        way_out="set sampler = {sampler|what the mechanism is accounted for}",
        finding=lambda view: said(lambda: view.protection.event(view.exposure._replace(attempts=1))),
        refused=[{**CENTRAL, "sampler": "uniform"}, {**CENTRAL, "sampler": "round_robin"}],
        mended={"sampler": "poisson"},
    ),
    Rule(
        name="private-server-samples",
        parts=("privacy", "server.samples"),
        reason="privacy {privacy|of any kind} does not cover server.samples, which are copies of clients' samples that "
        "the server looks at without noise",
        way_out='take them from samples that no client holds, with server.source = "public" and public = {name = '
        '"held_out", fraction = 0.05}, or leave them out',
        finding=lambda view: view.plan.server.source != "public",
        refused=[{**LOCAL, "aggregator": "fltrust", "server.samples": 20}],
        mended={"server.source": "public", "public": {"name": "held_out", "fraction": 0.05}},
    ),
    Rule(
        name="private-preferences",
        parts=("privacy", "algorithm", "sampler"),
        reason="{use|qffl and afl weigh clients by loss, and some samplers prefer them by loss, norm or size}, which "
        "is not protected",
        way_out='use fedavg, and sampler = "poisson" or "round_robin"',
        finding=_not_protected,
        refused=[{**LOCAL, "algorithm": "qffl"}, {**LOCAL, "sampler": "weighted"}, {**LOCAL, "sampler": "importance"}],
        mended={"algorithm": "fedavg", "sampler": "poisson"},
    ),
    Rule(
        name="private-measures",
        parts=("privacy",),
        reason="{use|evaluation.clients_every and .new_clients, and stops by samples, simulated seconds and bytes tell "
        "of clients}, which is not charged",
        way_out="leave it out; the central test set tells how good the model is",
        finding=_not_charged,
        refused=[
            {**LOCAL, "evaluation.clients_every": 1},
            {**LOCAL, "evaluation.new_clients": 2, "evaluation.holdout": 0.2},
            {**LOCAL, "stop.samples": 100},
            {**CENTRAL, "stop.bytes": 10**9},
        ],
        mended={"evaluation": {}, "stop": {}},
    ),
    Rule(
        name="private-steps-by-sample",
        parts=("privacy", "model"),
        reason="{use|batch norm} mixes samples or remembers them, so that a clip cannot bound what one sample does",
        way_out="use group norm or layer norm, and register constants with persistent=False",
        finding=lambda view: view.protection.steps and first({str(view.mixer): view.mixer}),
        refused=[{**SAMPLE, **NORMED}],
        mended={"model": "logistic"},
    ),
    Rule(
        name="private-noise-under-masks",
        parts=("privacy", "secagg"),
        reason="privacy {privacy|central} lets a server that sees each update add the noise, which secure aggregation "
        "hides from it",
        way_out="leave secagg out, or let clients add the noise: use privacy distributed",
        finding=lambda view: view.protection.on_grid is not None and view.protection.sum_bound is None,
        refused=[{**CENTRAL, "secagg": {}}],
        mended=DISTRIBUTED,
    ),
    Rule(
        name="private-one-group",
        parts=("privacy", "secagg"),
        reason="privacy {privacy|distributed} has its noise in the sum of all clients, not of a group",
        way_out="leave secagg.groups out",
        finding=lambda view: view.protection.on_grid is not None and view.masks.groups > 1,
        refused=[{**DISTRIBUTED, "secagg.groups": 2, "policy.size": 6}],
        mended={"secagg.groups": None},
    ),
    Rule(
        name="private-sum-fits",
        parts=("privacy", "secagg", "policy"),
        reason="the sum of {cohort|many} clients with its noise does not fit {secagg.modulus_bits|32} bits",
        way_out="lower privacy.bits, or set secagg.modulus_bits = 64",
        finding=_no_room,
        refused=[{**DISTRIBUTED, "privacy.bits": 24, "privacy.sigma": 20.0, "secagg": {}}],
        mended={"secagg.modulus_bits": 64},
    ),
    Rule(
        name="private-sum-alone",
        parts=("privacy",),
        reason="privacy {privacy|central} releases a sum alone, but {use|feddf, robust rules, detection, contribution "
        "and some attacks look} at each update",
        way_out="leave it out, or use privacy local",
        finding=_single_updates,
        refused=[
            {**CENTRAL, "algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}},
            {**CENTRAL, "algorithm": "fedex_lora", "model": "lora_mlp"},
            {**CENTRAL, "aggregator": "median"},
            {**CENTRAL, "detection": "distance"},
            {**CENTRAL, "attack": "alie", "attackers.num": 1},
        ],
        mended=LOCAL,
    ),
    Rule(
        name="private-cohort-is-fixed",
        parts=("privacy", "policy"),
        reason="{use|policy.over_selection and policy.min_reports change whose work counts, which no accountant knows}",
        way_out="leave it out",
        finding=_changing_cohort,
        refused=[{**LOCAL, "policy.over_selection": 1.5}, {**CENTRAL, "policy.min_reports": 2}],
        mended={"policy": {"size": 4}},
    ),
    Rule(
        name="private-turns",
        parts=("privacy", "sampler", "devices"),
        reason="{sampler|round_robin} skips devices that cannot be reached, so that others come up too often for "
        "privacy",
        way_out="leave devices out",
        finding=lambda view: view.sampler.scheme == IN_TURN,
        refused=[{**FTRL, "devices": "fleet"}],
        mended={"devices": None},
    ),
)

BUDGET: tuple[Rule[Budget], ...] = (
    Rule(
        name="epsilon-pays-one-round",
        parts=("privacy",),
        reason="{use|a privacy.epsilon below what a round costs} does not pay for one round",
        way_out="raise it or privacy.sigma, or ask a smaller share of the clients",
        finding=_unpaid,
        refused=[{**LOCAL, "privacy.epsilon": 0.01}],
        mended={"privacy.epsilon": 50.0},
    ),
)

REHEARSED: tuple[Rule[Round], ...] = (
    Rule(
        name="private-exact-numbers",
        parts=("privacy", "algorithm", "model"),
        reason="privacy of whole clients adds noise to all that they send, but {names|some algorithms' numbers and "
        "batch-norm statistics} must arrive exactly",
        way_out='use fedavg, fedprox or scaffold, and group norm or local.buffers = "local"',
        finding=_noisy,
        refused=[{**LOCAL, "algorithm": "fednova"}, {**LOCAL, **NORMED}],
        mended={"algorithm": "fedavg", "local.buffers": "local"},
    ),
)
