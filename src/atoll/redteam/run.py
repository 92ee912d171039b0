"""Attack a plan in a given time: probes from its server's seat, with defences off, its claims, and bad clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from atoll.core.errors import AtollError, DataError, PlanError
from atoll.core.parts import Part, members
from atoll.core.plan import Plan
from atoll.core.probe import ATTRIBUTE, LABELS, MEMBERSHIP, PROPERTY, SAMPLES, SOURCE, TOKENS, Known, Probe, Work
from atoll.core.seeds import generator
from atoll.probes.shadows import OutOfTime
from atoll.redteam.attribute_judge import attribute_figures
from atoll.redteam.claims import check_claims, claimed_epsilon
from atoll.redteam.clock import Clock, Progress
from atoll.redteam.cut import attack_cut
from atoll.redteam.defences import Switch, quiet, switches_off, switches_on
from atoll.redteam.judges import (
    Case,
    Judge,
    Judged,
    judge_labels,
    judge_membership,
    judge_property,
    judge_samples,
    judge_source,
    judge_tokens,
    num_candidates,
    owned_candidates,
)
from atoll.redteam.membership_judge import fair_candidates
from atoll.redteam.poisoning import poison
from atoll.report.redteam import FAILED, NO_TIME, Change, Claim, Finding, Poisoned, RedTeam, as_text, untried
from atoll.simulation.seat import Watched, watch
from atoll.train.federation import build_federation

__all__ = ["as_text", "red_team"]

JUDGES: Mapping[str, Judge] = {
    SAMPLES: judge_samples,
    LABELS: judge_labels,
    TOKENS: judge_tokens,
    MEMBERSHIP: judge_membership,
    PROPERTY: judge_property,
    SOURCE: judge_source,
}
"""Goal -> its judge."""
CANDIDATES = 2000
"""Samples that attacks on membership are tried on at most, half of them trained on."""
PUBLIC = 2000
"""Test samples that the attacker has of its own at most; at most half of them."""
QUICK = (
    "told_labels",
    "gradient_norm",
    "gradient_direction",
    "tail_replay",
    "linear_leak",
    "label_counts",
    "loss_threshold",
    "token_bag",
    "token_order",
    "source",
    "trap_weights",
)
"""Probes that take little time: they come first."""
SEARCHES = ("inverting_gradients", "dlg", "multi_step")
"""Probes that use all the time they get: they come last, so that they have what others left."""
PROBES_UNTIL, CLAIMS_UNTIL, CHANGES_UNTIL = 0.45, 0.6, 0.85
"""Shares of the time after which probes, checks of claims, and changed defences end; poisoning gets the rest."""


def red_team(
    plan: Plan,
    *,
    probes: Sequence[str] = (),
    rounds: int = 2,
    seconds: float = 240.0,
    progress: Progress = lambda text: None,
    now: Callable[[], float] = time.monotonic,
    recorded: Callable[[int], Watched] | None = None,
) -> RedTeam:
    """Let probes attack what a plan's server sees of its first rounds, and judge them and the plan's defences.

    `seconds` are for all of it, by the clock `now`. All probes are tried unless some are named, and then clients do not
    attack. The largest figure over all rows counts. With `recorded` (number of public samples -> what a server saw)
    the updates of a real federation are attacked, and nothing is simulated: no other defences, and no planted model.
    """
    if rounds < 1 or seconds <= 0:
        raise PlanError(f"rounds and seconds must be above 0, got {rounds} and {seconds}: raise them")
    names = _chosen(probes, at_cut=plan.split is not None)
    began = now()
    clock = Clock(began, began + seconds, progress, now)
    if plan.split is not None:
        if recorded is not None:
            raise PlanError("what sites record are updates, and this plan's model is cut: leave recorded out")
        return attack_cut(quiet(plan), names, rounds, _num_public(plan), clock, some=bool(probes))
    seat = _Seat(quiet(plan), rounds, _num_public(plan), clock, recorded is None)
    clock.say("what was recorded" if recorded else f"{rounds} rounds of the plan, as its server sees them")
    watched = recorded(seat.num_public) if recorded else seat.watch(seat.plan)
    clock = clock._replace(began=now())
    seat = seat._replace(clock=clock, round_seconds=(clock.began - began) / max(1, len(watched.sights)))
    findings = seat.attacked(seat.plan, names, watched, PROBES_UNTIL if seat.simulates else 1.0, "")
    claims, changes, poisoned, attackers = list[Claim](), list[Change](), list[Poisoned](), ""
    if seat.simulates:
        if plan.privacy or plan.secagg or plan.uplink:
            clock.say("claims of the plan's defences")
            claims = check_claims(seat.plan, watched, findings, lambda: clock.left(CLAIMS_UNTIL) <= 0)
        changes = _changed(seat, names, watched)
    if seat.simulates and not probes:
        poisoned, attackers = poison(
            plan, clock.left, seat.round_seconds, lambda text: clock.say(f"clients that attack: {text}")
        )
    claimed = claimed_epsilon(seat.plan)
    return RedTeam(
        title=plan.name or f"{plan.data.name}, {plan.algorithm.name}",
        plan_text=plan.to_toml(),
        sees=_sees(plan, watched),
        findings=tuple(findings),
        changes=tuple(changes),
        claims=tuple(claims),
        poisoned=tuple(poisoned),
        attackers=attackers,
        epsilon=None if claimed is None else claimed[0],
        delta=None if claimed is None else claimed[1],
        seconds=now() - began,
        budget=seconds,
        not_tried=_not_tried(seat, watched, names, probes),
    )


class _Seat(NamedTuple):
    """A plan, and how it is watched and attacked."""

    plan: Plan
    rounds: int
    num_public: int
    clock: Clock
    simulates: bool
    """Whether rounds are simulated; else they were recorded."""
    round_seconds: float = 0.0
    """Seconds that a round takes: what takes longer than there is time is not begun."""

    def watch(self, plan: Plan) -> Watched:
        """Return what the plan's server sees; at least of one round."""
        is_over = self.clock.over_in(self.clock.left() / 4)
        return watch(plan, self.rounds, elsewhere=self.num_public, is_over=is_over)

    def attacked(self, plan: Plan, names: Sequence[str], watched: Watched, until: float, where: str) -> list[Finding]:
        """Try probes one after another, each with an equal share of the time that those before it left."""
        findings = dict[str, Finding]()
        for place, name in enumerate(names):
            left = self.clock.left(until)
            probe: Probe = Part(name).build("probes")
            why = probe.why_not(watched.known, watched.sights)
            if why is None and probe.plant is not None and not self.simulates:
                why = "what was recorded is of a server that did not plant a model"
            if why is None and left <= (0 if probe.plant is None else self.round_seconds):
                why = NO_TIME
            if why is None:
                self.clock.say(f"{name}: {probe.goal}{where}")
                findings[name] = self._tried(plan, name, probe, watched, left / (len(names) - place))
            else:
                findings[name] = untried(name, probe, why, 0.0)
        return list(findings.values())

    def _tried(self, plan: Plan, name: str, probe: Probe, watched: Watched, seconds: float) -> Finding:
        began = self.clock.now()
        work = Work(generator(plan.seed, "probe", *name.encode()), self.clock.over_in(seconds))
        try:
            if probe.plant is not None:
                plant = probe.plant

                def planted(known: Known, model_M: torch.Tensor) -> torch.Tensor:
                    return plant(known, model_M, work)

                watched = watch(plan, 1, plant=planted, elsewhere=self.num_public)
            judged = _judged(probe, watched, work, plan)
        except OutOfTime:
            judged, why = None, NO_TIME
        except DataError as error:
            judged, why = None, str(error)
        except RuntimeError as error:  # of torch: the page is worth more than one probe
            judged, why = None, f"{FAILED} {error}"
        else:
            why = "" if judged is not None else "it found nothing that could be judged"
        seconds = self.clock.now() - began
        if judged is None:
            return untried(name, probe, why, seconds)
        return Finding(
            probe=name,
            goal=probe.goal,
            why_not="",
            figures=dict(judged.figures),
            seconds=seconds,
            assumes=probe.assumes,
            level=judged.level,
            floor=judged.floor,
            chance=judged.chance,
            pictures=judged.pictures,
            texts=judged.texts,
            active=probe.plant is not None,
        )


def _judged(probe: Probe, watched: Watched, work: Work, plan: Plan) -> Judged | None:
    """Run a probe, and judge what it says; None if that is nothing."""
    if probe.goal == ATTRIBUTE:
        figures = attribute_figures(probe, watched, work)
        floor = max((value for name, value in figures.items() if name.startswith("share right by")), default=math.nan)
        return Judged(figures, floor=floor, margin=0.1, open_from=0.9) if figures else None
    if probe.goal not in JUDGES:
        raise DataError(f"nobody judges {probe.goal} here: its own tests do")
    truth_C = torch.zeros(0)
    if probe.goal == MEMBERSHIP:
        candidates, truth_C = fair_candidates(watched, num_candidates(watched, CANDIDATES), work.rng)
        work = work._replace(candidates=candidates)
    elif probe.goal == SOURCE:
        candidates, truth_C = owned_candidates(watched, work.rng)
        work = work._replace(candidates=candidates)
    guesses = probe.run(watched.known, watched.sights, work)
    delta = float(plan.privacy.options.get("delta", 0.0)) if plan.privacy is not None else 0.0
    return JUDGES[probe.goal](Case(watched, guesses, truth_C, delta))


def _changed(seat: _Seat, names: Sequence[str], watched: Watched) -> list[Change]:
    """Attack the plan with each of its defences off; then with those on that it does without."""
    switches = [*switches_off(seat.plan), *switches_on(seat.plan, watched.sights)]
    began = CHANGES_UNTIL - seat.clock.left(CHANGES_UNTIL) / (seat.clock.ends - seat.clock.began)
    changes = []
    for place, switch in enumerate(switches, 1):
        until = began + (CHANGES_UNTIL - began) * place / len(switches)
        changes.append(_change(seat, names, switch, until))
    return changes


def _change(seat: _Seat, names: Sequence[str], switch: Switch, until: float) -> Change:
    what = f"{'without' if switch.off else 'with'} {switch.defence}"
    change = Change(switch.defence, switch.setting, switch.off)
    if seat.clock.left(until) <= seat.round_seconds:
        return change._replace(why_not=NO_TIME)
    seat.clock.say(f"{seat.rounds} rounds {what}")
    try:
        plan = seat.plan.replace(switch.changes)
        watched = seat.watch(plan)
        findings = seat.attacked(plan, names, watched, until, f", {what}")
    except AtollError as error:
        return change._replace(why_not=str(error))
    kept = [each._replace(pictures=each.pictures[:1], texts=each.texts[:1]) for each in findings]
    return change._replace(findings=tuple(kept), sees=_sees(plan, watched))


def _chosen(probes: Sequence[str], *, at_cut: bool) -> list[str]:
    """Return the probes to try, on updates or at a cut; refuse names that are none."""
    kinds = {name: probe.at_cut is not None for name in members("probes") if (probe := _member(name)) is not None}
    unknown = sorted(set(probes) - set(kinds))
    if unknown:
        raise PlanError(f"there are no probes {', '.join(unknown)}: known are {', '.join(kinds)}")
    names = [name for name, looks_at_cut in kinds.items() if looks_at_cut == at_cut]
    others = sorted(set(probes) - set(names))
    if others:
        what = "activations" if at_cut else "updates"
        raise PlanError(f"{', '.join(others)} cannot look at {what}, which clients of this plan send: try {names}")
    between = [name for name in names if name not in (*QUICK, *SEARCHES)]
    return list(probes) or [name for name in (*QUICK, *between, *SEARCHES) if name in names]


def _member(name: str) -> Probe | None:
    try:
        built = Part(name).build("probes")
    except PlanError:
        return None  # what probes share lies beside them
    return built if isinstance(built, Probe) else None


def _num_public(plan: Plan) -> int:
    """Return how many test samples the attacker gets: the judge needs others, which nobody trained on."""
    return min(PUBLIC, max(1, build_federation(plan).dataset.num_test // 2))


def _sees(plan: Plan, watched: Watched) -> str:
    nums = [num for sight in watched.sights for num in sight.num_clients_R]
    if not nums:
        return "nothing"
    single, smallest, largest = sum(num == 1 for num in nums), min(nums), max(nums)
    of = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
    what = f"{single} updates of single clients" if single else f"{len(nums)} sums of {of} clients"
    after = f", after {' and '.join(part.name for part in plan.uplink)}" if plan.uplink else ""
    noise = f", with {plan.privacy.name} noise" if plan.privacy is not None else ""
    num = len(watched.sights)
    return f"in {num} round{'s' * (num != 1)} {what}{after}{noise}"


def _not_tried(seat: _Seat, watched: Watched, names: Sequence[str], probes: Sequence[str]) -> tuple[str, ...]:
    found = []
    if not seat.simulates:
        found.append(
            "Recorded updates were attacked: claims, other defences and clients that attack take a simulation."
        )
    elif len(watched.sights) < seat.rounds:
        found.append(f"Only {len(watched.sights)} of {seat.rounds} rounds were watched, for want of time.")
    if probes:
        found.append(f"Only {', '.join(names)} were asked for; clients that attack were left out.")
    return tuple(found)
