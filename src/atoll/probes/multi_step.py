"""Samples behind an update of several local steps. Shapes: N samples, T steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.options import Count
from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work
from atoll.probes.dlg import NEAR, lbfgs
from atoll.probes.matching import Search, no_search, search, squared_distance


def multi_step(restarts: Count = 3, iterations: Count = 600) -> Probe:
    """Simulate a client's steps, and differentiate through them (Dimitrov et al. 2022, arXiv:2206.12395).

    x* = argmin_x |w_T(x) - w_T|^2, where w_{t+1} = w_t - lr grad L(w_t, x_t) are the steps of FedAvg (also Geiping et
    al. 2020, arXiv:2003.14053, section 6), by L-BFGS from up to `restarts` beginnings. It is exact where each step is
    on all samples. Else the order of batches is not known: it is taken to be the same in every epoch.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        how = Search(
            distance=squared_distance,
            descend=lambda objective, x, is_over: lbfgs(objective, x, is_over, iterations),
            restarts=restarts,
            near=NEAR,
            simulate=True,
            dtype=torch.float64,
        )
        return search(known, sights, work, how)

    return Probe(goal=SAMPLES, run=run, why_not=_why_not)


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if all(steps == 1 for sight in sights for steps in known.steps(sight)):
        return "clients take one step: `dlg` and `inverting_gradients` do the same for less"
    return no_search(known, sights)
