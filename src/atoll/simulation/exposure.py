"""What a cut exposes of clients' samples once a model is trained: distance correlation, and inversion by a decoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.probe import CutSight, Probe, Work
from atoll.core.seeds import generator
from atoll.core.split import VERTICAL
from atoll.privacy.noise import fresh_secret
from atoll.probes.fidelity import psnr
from atoll.simulation.cut_seat import known_at_cut
from atoll.split.correlation import LEAST_ROWS, dependence
from atoll.split.parties import Parties, build_parties
from atoll.split.shield import Place, Shield
from atoll.train.build import build_job

SAMPLES, PUBLIC, SECONDS = 256, 1000, 10.0
"""Samples of clients that are looked at, test samples that the attacker has, and seconds that it trains a decoder."""


class CutExposure(NamedTuple):
    """What activations say of samples."""

    dcor: float
    """Distance correlation of samples and activations."""
    dcor_squared: float
    """Bias-corrected square of it."""
    psnr: float
    """Mean PSNR of what a decoder makes of activations, in dB."""
    psnr_floor: float
    """Mean PSNR of the mean public sample, in dB: what needs no activations."""
    num_samples: int
    seconds: float


def cut_exposure(
    plan: Plan,
    model_M: Tensor,
    *,
    seconds: float = SECONDS,
    samples: int = SAMPLES,
    public: int = PUBLIC,
    now: Callable[[], float] = time.monotonic,
) -> CutExposure | None:
    """Return what activations of a model at a plan's cut say of clients' samples, after the plan's defences.

    The samples are the first ones of the first clients, the attacker knows the clients' layers, and has half of the
    test samples at most. None where samples are no numbers, and where parties hold columns.
    """
    began = now()
    if plan.split is None or plan.split.way == VERTICAL:
        return None
    job = build_job(plan)
    parties = build_parties(plan, job)
    known = known_at_cut(plan, parties, min(public, max(1, job.federation.dataset.num_test // 2)))
    x = _samples(parties, samples)
    if not x.is_floating_point() or len(x) < LEAST_ROWS:
        return None
    layers = parties.cut.client.take(model_M)
    head = known.client(layers)["head"]
    shield = Shield(parties.shield.defences, fresh_secret())
    with torch.no_grad():
        sent = shield.sent(shield.shaped(head(x)), Place(0, 0, 0, 0))
    sight = CutSight(
        client=0,
        version=0,
        client_M=layers,
        server_M=parties.cut.server.take(model_M),
        activations_N=sent,
        batch_N=torch.zeros(len(x), dtype=torch.long),
    )
    probe: Probe = Part("decoder").build("probes")
    assert probe.at_cut is not None
    work = Work(generator(plan.seed, "exposure"), lambda: now() - began > seconds)
    [guess] = probe.at_cut(known, [sight], work)
    assert guess.x is not None
    span, true = known.high - known.low, x[: len(guess.x)]
    related = dependence(x, sent)
    return CutExposure(
        dcor=related.dcor,
        dcor_squared=related.squared,
        psnr=float(psnr(guess.x, true, span).mean()),
        psnr_floor=float(psnr(known.elsewhere.x.mean(0).expand_as(true), true, span).mean()),
        num_samples=len(x),
        seconds=now() - began,
    )


def _samples(parties: Parties, num: int) -> Tensor:
    """Return the first samples of the first clients, at most `num` different ones."""
    federation, found, left = parties.job.federation, list[Tensor](), num
    for client in range(federation.num_clients):
        x, _ = federation.client_samples(client).load()
        found.append(x[:left])
        left -= len(found[-1])
        if left <= 0:
            break
    x = torch.cat(found)
    first = np.unique(x.flatten(1).numpy(), axis=0, return_index=True)[1]
    return parties.job.inputs(x[torch.from_numpy(np.sort(first))]).contiguous()


def model_vector(plan: Plan, named: dict[str, Tensor]) -> Tensor:
    """Return the flat vector of a model from its named tensors, as a run writes them."""
    spec = build_job(plan).spec
    missing = [slot.name for slot in spec.slots if slot.name not in named]
    if missing:
        raise AtollError(f"the model has no tensors {', '.join(missing[:3])}: give one of the plan's own runs")
    return torch.cat([named[slot.name].reshape(-1).to(spec.dtype) for slot in spec.slots])
