"""Compare what a plan claims of its defences at a cut with what is seen of them. Shapes: N samples of a task."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.core.plan import Plan
from atoll.redteam.claims import SURE, claimed_epsilon
from atoll.report.redteam import BROKEN, HOLDS, UNCHECKED, Claim
from atoll.simulation.cut_seat import CutWatched
from atoll.split.shield import clipped


def check_cut_claims(plan: Plan, watched: CutWatched) -> list[Claim]:
    """Return what became of the claims of a plan whose model is cut."""
    split = plan.split
    assert split is not None
    claims = list[Claim]()
    if split.tail is not None:
        told = sum(sight.labels_N is not None for sight in watched.sights)
        seen = f"{told} of {len(watched.sights)} tasks sent labels"
        claims.append(Claim("split.tail", "labels stay with the clients", seen, BROKEN if told else HOLDS))
    if split.frozen:
        moved = sum(not torch.equal(a, b) for a, b in _heads(watched))
        seen = f"they moved in {moved} of {len(watched.sights)} tasks"
        claims.append(Claim("split.frozen", "the clients' first layers stay", seen, BROKEN if moved else HOLDS))
    if plan.privacy is not None:
        claims += _noise_claims(plan, watched)
    return claims


def _heads(watched: CutWatched) -> list[tuple[Tensor, Tensor]]:
    """Return the clients' first layers at the start and at the end of each task."""
    slots = [slot for slot in watched.parties.cut.client.spec.slots if slot.name.startswith("head.")]

    def head(values: Tensor) -> Tensor:
        return torch.cat([values[slot.offset : slot.offset + slot.size] for slot in slots])

    return [(head(a), head(b)) for a, b in zip(watched.clients, watched.ends, strict=True)]


def _noise_claims(plan: Plan, watched: CutWatched) -> list[Claim]:
    """Measure the noise of activations with the samples that the judge knows, and look for noise that comes twice."""
    assert plan.privacy is not None
    name, mechanism = f"{plan.privacy.name} noise", watched.parties.job.mechanism
    assert mechanism is not None and mechanism.at_cut is not None
    clip, sigma = mechanism.at_cut
    noises = list[Tensor]()
    for sight, true, layers in zip(watched.sights, watched.truths, watched.clients, strict=True):
        with torch.no_grad():
            exact = watched.known.client(layers).train()["head"](true.x)
        noises.append((sight.activations_N - clipped(exact, clip)).flatten(1).double() / (sigma * clip))
    claimed = claimed_epsilon(plan)
    epsilon = "" if claimed is None else f", epsilon {claimed[0]:.3g} at delta {claimed[1]:g}"
    if not noises:
        return [Claim(name, f"noise of {sigma:g} times {clip:g}{epsilon}", "no task ended", UNCHECKED)]
    values = torch.cat([each.flatten() for each in noises])
    size, least = float(values.square().mean().sqrt()), 1 - SURE / math.sqrt(2 * len(values))
    seen = f"over {len(values):,} values it has {size:.4f} times that size"
    claims = [Claim(name, f"noise of {sigma:g} times {clip:g}{epsilon}", seen, HOLDS if size >= least else BROKEN)]
    rows = torch.cat([each[:64] for each in noises])[:512]
    cosine = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0.0)
    most, allowed = float(cosine.abs().max()), (SURE + 1) / math.sqrt(rows.shape[1])
    seen = f"two of {len(rows)} samples' noises have a correlation of {most:.3g}, {allowed:.3g} is chance"
    claims.append(Claim(name, "noise is never used twice", seen, HOLDS if most <= max(allowed, 0.5) else BROKEN))
    return claims
