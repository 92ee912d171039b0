"""Run probes against a plan, and judge what they get. Shapes: N samples, K classes, C candidates.

The largest figure over all rows counts, not the mean: one client that is laid open is one too many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError, PlanError
from atoll.core.parts import Part, members
from atoll.core.plan import Plan
from atoll.core.probe import ATTRIBUTE, LABELS, MEMBERSHIP, SAMPLES, TOKENS, Guess, Probe, Work
from atoll.core.seeds import generator
from atoll.redteam.attribute_judge import attribute_figures
from atoll.redteam.image_judge import floors, match
from atoll.redteam.membership_judge import fair_candidates, membership_verdict
from atoll.simulation.seat import Watched, samples_of, watch

MAX_TRUE = 256
"""Samples of one row that guesses are compared with."""
CANDIDATES = 200
"""Samples that attacks on membership are tried on, half of them trained on."""


class Finding(NamedTuple):
    """What one probe got."""

    probe: str
    goal: str
    why_not: str
    """Why it was not tried, or not judged; empty if it was."""
    figures: Mapping[str, float]
    """What it got, by name and unit; the largest over all rows."""
    seconds: float
    assumes: str


class RedTeam(NamedTuple):
    """What a plan gave away to whoever sees what its server sees."""

    sees: str
    """What the server sees of a round, in words."""
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON; figures that are not finite are None."""
        rows = [
            {
                **each._asdict(),
                "figures": {name: value if math.isfinite(value) else None for name, value in each.figures.items()},
            }
            for each in self.findings
        ]
        return {"sees": self.sees, "findings": rows}


def red_team(
    plan: Plan,
    *,
    probes: Sequence[str] = (),
    rounds: int = 2,
    seconds: float = 120.0,
    progress: Callable[[str], None] = lambda text: None,
) -> RedTeam:
    """Let probes attack what a plan's server sees of its first rounds, and judge them.

    All probes are tried unless some are named. Each gets an equal share of `seconds`, and says what it has when that
    is over.
    """
    if rounds < 1 or seconds <= 0:
        raise PlanError(f"rounds and seconds must be above 0, got {rounds} and {seconds}: raise them")
    known_names = [name for name in members("probes") if _is_member(name)]
    unknown = sorted(set(probes) - set(known_names))
    if unknown:
        raise PlanError(f"there are no probes {', '.join(unknown)}: known are {', '.join(known_names)}")
    chosen = list(probes) or known_names
    progress(f"{rounds} rounds of the plan, as its server sees them")
    watched = watch(plan, rounds)
    findings = []
    for name in chosen:
        progress(name)
        findings.append(_tried(plan, name, watched, seconds / len(chosen)))
    return RedTeam(_sees(plan, watched), tuple(findings))


def _is_member(name: str) -> bool:
    try:
        return isinstance(Part(name).build("probes"), Probe)
    except PlanError:
        return False  # what probes share lies beside them


def _tried(plan: Plan, name: str, watched: Watched, seconds: float) -> Finding:
    probe: Probe = Part(name).build("probes")
    until = time.monotonic() + seconds
    rng = generator(plan.seed, "probe", *name.encode())
    work = Work(rng, lambda: time.monotonic() > until)
    why, figures, began = probe.why_not(watched.known, watched.sights), dict[str, float](), time.monotonic()
    if why is None and probe.plant is not None:
        plant = probe.plant
        watched = watch(plan, 1, plant=lambda known, model_M: plant(known, model_M, work))
    if why is None:
        try:
            figures = dict(_judged(probe, watched, work))
            why = "" if figures else "it found nothing that could be judged"
        except DataError as error:
            why = str(error)
    return Finding(name, probe.goal, why or "", figures, time.monotonic() - began, probe.assumes)


def _judged(probe: Probe, watched: Watched, work: Work) -> Mapping[str, float]:
    """Run a probe, and return its figures beside what needs no attack."""
    known, sights = watched.known, watched.sights
    if probe.goal == MEMBERSHIP:
        candidates, member_C = fair_candidates(watched, CANDIDATES, work.rng)
        guesses = probe.run(known, sights, work._replace(candidates=candidates))
        verdicts = [membership_verdict(each.score_C, member_C) for each in guesses if each.score_C is not None]
        if not verdicts:
            return {}
        best = max(verdicts, key=lambda verdict: verdict.auc)
        return {
            "AUC": best.auc,
            "members found at 1 % false alarms": best.tpr_at_0_01,
            "least epsilon": best.epsilon,
            "AUC of guessing": 0.5,
        }
    if probe.goal == ATTRIBUTE:
        return attribute_figures(probe, watched, work)
    if probe.goal not in (SAMPLES, LABELS, TOKENS):
        raise DataError(f"{probe.goal} is judged by its own tests, not by this command")
    judge = {SAMPLES: _samples, LABELS: _labels, TOKENS: _tokens}[probe.goal]
    guesses = probe.run(known, sights, work)
    rows = [judge(watched, guess, true) for guess, true in _with_truth(watched, guesses)]
    return max((row for row in rows if row), key=lambda row: next(iter(row.values())), default={})


def _with_truth(watched: Watched, guesses: Sequence[Guess]) -> Iterator[tuple[Guess, Any]]:
    truths = [truth for sight in watched.truths for truth in sight]
    for guess in guesses:
        if guess.row is not None:
            yield guess, samples_of(watched, truths[guess.row])


def _samples(watched: Watched, guess: Guess, true: Any) -> dict[str, float]:
    if guess.x is None or not len(guess.x):
        return {}
    known, x = watched.known, true.x[:MAX_TRUE]
    found, floor = match(guess.x, x, known.high - known.low), floors(known, x)
    return {
        "best PSNR in dB": max(found.psnr),
        "share of samples above 30 dB": found.share_sharp,
        "best SSIM": max(found.ssim),
        "dB of a blank one": floor.blank,
        "dB of the mean one": floor.mean,
    }


def _labels(watched: Watched, guess: Guess, true: Any) -> dict[str, float]:
    if guess.counts_K is None or true.y.dim() != 1:
        return {}
    own_K = _counts(true.y, watched.known.num_classes)
    usual_K = _counts(watched.known.elsewhere.y, watched.known.num_classes)
    return {
        "share of labels right": _overlap(guess.counts_K, own_K),
        "share right by the usual ones": _overlap(usual_K, own_K),
    }


def _tokens(watched: Watched, guess: Guess, true: Any) -> dict[str, float]:
    num = watched.known.num_classes
    own = _counts(true.x.flatten(), num)
    found = guess.counts_K if guess.counts_K is not None else None
    found = _counts(guess.y, num) if found is None and guess.y is not None else found
    if found is None:
        return {}
    usual = _counts(watched.known.elsewhere.x.flatten(), num)
    return {"share of tokens right": _overlap(found, own), "share right by the usual ones": _overlap(usual, own)}


def _counts(values: Tensor, num: int) -> Tensor:
    return torch.bincount(values.flatten().long().clamp(min=0), minlength=num).double()


def _overlap(found_K: Tensor, own_K: Tensor) -> float:
    """Return the share of true ones that guessed counts cover, brought to the same total."""
    scaled_K = found_K.double().clamp(min=0) * own_K.sum() / found_K.double().clamp(min=0).sum().clamp(min=1e-12)
    return float(torch.minimum(scaled_K, own_K).sum() / own_K.sum())


def _sees(plan: Plan, watched: Watched) -> str:
    nums = [num for sight in watched.sights for num in sight.num_clients_R]
    single = sum(num == 1 for num in nums)
    what = (
        f"{single} updates of single clients" if single else f"{len(nums)} sums of {min(nums)} to {max(nums)} clients"
    )
    after = f", after {' and '.join(part.name for part in plan.uplink)}" if plan.uplink else ""
    noise = f", with {plan.privacy.name} noise" if plan.privacy is not None else ""
    return f"in {len(watched.sights)} rounds {what}{after}{noise}" if nums else "nothing"


def as_text(found: RedTeam) -> str:
    """Return findings as lines, those that got something first."""
    lines = [f"the server sees {found.sees}"]
    for each in sorted(found.findings, key=lambda finding: bool(finding.why_not)):
        figures = ", ".join(f"{name} {np.format_float_positional(value, 4)}" for name, value in each.figures.items())
        lines.append(f"{each.probe} ({each.goal}, {each.seconds:.1f} s): {figures or f'not tried: {each.why_not}'}")
    return "\n".join(lines)
