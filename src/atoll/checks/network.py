"""Rules on plans that organisations run together: what is simulated elsewhere is real there."""

from __future__ import annotations

from atoll.checks.rule import NETWORK, Rule, Values, first
from atoll.checks.vertical import PLAIN
from atoll.checks.views import Networked, Served


def _simulated(view: Networked) -> Values | None:
    plan, secagg = view.plan, view.plan.secagg
    uses = {
        "attack is for simulations, and over a network nobody is asked to attack": plan.attack,
        "devices is for simulations, and over a network they are what they are": plan.devices,
        "secagg.lost is for simulations, and over a network clients are lost by themselves": secagg and secagg.lost,
        "secagg.scheme is pairwise over a network": secagg and secagg.scheme.name != "pairwise",
        "models is for simulations so far": plan.models,
        "public is for simulations so far": plan.public,
        "split.latency and split.bandwidth are for simulations, and over a network links are what they are": plan.split
        and plan.split.takes_time,
        "split.missing is for simulations, and over a network parties join their rows by atoll align": plan.split
        and plan.split.missing,
    }
    return first(uses)


RULES: tuple[Rule[Networked], ...] = (
    Rule(
        name="network-new-clients-join",
        parts=(NETWORK, "evaluation.new_clients"),
        reason="evaluation.new_clients holds simulated clients out of training, and over a network a new client joins "
        "by itself when it likes",
        way_out="leave evaluation.new_clients out; who comes later runs atoll join, and with evaluation.clients_every "
        "every site measures on its own samples",
        finding=lambda view: True,
        refused=[{"evaluation.new_clients": 2, "evaluation.holdout": 0.2}],
        mended={"evaluation.new_clients": None},
    ),
    Rule(
        name="network-simulates-nothing",
        parts=(NETWORK,),
        reason="{use|attack, devices, secagg.lost, schemes other than pairwise, models, public, and split.latency, "
        "split.bandwidth and split.missing are for simulations}",
        way_out="leave it out",
        finding=_simulated,
        refused=[
            {"attack": "zero", "attackers.num": 1},
            {"devices": "fleet"},
            {"secagg.lost": 0.1},
            {"secagg.scheme": "additive"},
            {"public": {"name": "held_out", "fraction": 0.1}},
            {"model": "mlp_2nn", "split": {"cut": "2", "latency": 0.02}},
            {**PLAIN, "split.missing": 0.2},
        ],
        mended={"attack": None, "devices": None, "secagg": None, "public": None, "split": None},
    ),
    Rule(
        name="network-layers-go-through-the-server",
        parts=(NETWORK, "split"),
        reason='split.handover = "peer" sends layers from client to client, and over a network every connection is one '
        "of a client to the server",
        way_out='use split.handover = "server", which is the default',
        finding=lambda view: view.plan.split is not None and view.plan.split.handover == "peer",
        refused=[{"model": "mlp_2nn", "split": {"cut": "2", "way": "in_turn", "handover": "peer"}}],
        mended={"split.handover": "server"},
    ),
    Rule(
        name="network-sessions-are-not-accounted",
        parts=(NETWORK, "split", "privacy"),
        reason="a server that begins a client's session again is sent activations with fresh noise, and "
        "{privacy|noise} accounts for it once",
        way_out="leave privacy out, and use split.defences, which claim no epsilon; or leave split out",
        finding=lambda view: True,
        refused=[
            {
                "model": "mlp_2nn",
                "split": {"cut": "2", "frozen": True},
                "privacy": {"name": "activations", "clip": 1.0, "sigma": 1.0, "delta": 1e-3},
            }
        ],
        mended={"privacy": None},
    ),
    Rule(
        name="network-split-models-are-measured-by-the-server",
        parts=(NETWORK, "split", "evaluation.clients_every"),
        reason="evaluation.clients_every lets clients measure whole models, and those of split learning have the "
        "layers before the cut",
        way_out="leave evaluation.clients_every out, and measure on the server's test set",
        finding=lambda view: True,
        refused=[{"model": "mlp_2nn", "split": {"cut": "2"}, "evaluation.clients_every": 1}],
        mended={"evaluation.clients_every": None},
    ),
    Rule(
        name="network-equal-shares",
        parts=(NETWORK, "secagg", "sampler"),
        reason="{sampler|a sampler} draws clients with replacement and gives each a share, by which a server that lies "
        "could let one outweigh all others in their sum",
        way_out='with secagg use sampler = "uniform" without replacement',
        finding=lambda view: "with replacement" in view.sampler.scheme,
        refused=[{"secagg": {}, "sampler": "weighted"}],
        mended={"sampler": "uniform"},
    ),
)

SERVED: tuple[Rule[Served], ...] = (
    Rule(
        name="network-accuracy-of-shared-models",
        parts=(NETWORK, "stop.accuracy"),
        reason="stop.accuracy would never be reached, since clients have models of their own and the server of a "
        "network has none to measure",
        way_out="leave stop.accuracy out, and set evaluation.clients_every to let clients measure theirs",
        finding=lambda view: not view.shares_model,
        refused=[
            {"stop.accuracy": 0.9, "model": "mlp_2nn", "algorithm": "fedper"},
            {"stop.accuracy": 0.9, "algorithm": "ifca"},
        ],
        mended={"stop.accuracy": None, "evaluation.clients_every": 1},
    ),
)
