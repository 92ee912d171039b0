"""Attack a plan whose model is cut: probes from the seat of its server, with defences off and on, and its claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from atoll.core.defence import defences_of
from atoll.core.errors import AtollError, DataError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.probe import Probe, Work
from atoll.core.seeds import generator
from atoll.redteam.claims import claimed_epsilon
from atoll.redteam.clock import Clock
from atoll.redteam.cut_claims import check_cut_claims
from atoll.redteam.cut_judge import judge_cut
from atoll.redteam.defences import Switch, toml_of
from atoll.report.redteam import FAILED, NO_TIME, Change, Finding, RedTeam, untried
from atoll.simulation.cut_seat import CutWatched, watch_cut
from atoll.split.cut import places
from atoll.train.build import build_job

PROBES_UNTIL = 0.5
"""Share of the time after which probes on the plan as it is end; changed defences get the rest."""
LOUD, QUIET = 0.1, 1.0
"""The weight of nopeek that is tried, and the length of noise in lengths of activations."""


class _Seat(NamedTuple):
    names: Sequence[str]
    rounds: int
    num_public: int
    clock: Clock

    def watch(self, plan: Plan) -> CutWatched:
        """Return what the plan's server sees; at least of one round."""
        is_over = self.clock.over_in(self.clock.left() / 4)
        return watch_cut(plan, self.rounds, elsewhere=self.num_public, is_over=is_over)

    def attacked(self, plan: Plan, watched: CutWatched, until: float, where: str) -> list[Finding]:
        """Try probes one after another, each with an equal share of the time that those before it left."""
        findings = []
        for place, name in enumerate(self.names):
            probe: Probe = Part(name).build("probes")
            left = self.clock.left(until)
            why = probe.why_not_at_cut(watched.known, watched.sights)
            if why is None and left <= 0:
                why = NO_TIME
            if why is None:
                self.clock.say(f"{name}: {probe.goal}{where}")
                findings.append(self._tried(plan, name, probe, watched, left / (len(self.names) - place)))
            else:
                findings.append(untried(name, probe, why, 0.0))
        return findings

    def _tried(self, plan: Plan, name: str, probe: Probe, watched: CutWatched, seconds: float) -> Finding:
        began, why = self.clock.now(), "it found nothing that could be judged"
        work, judged = Work(generator(plan.seed, "probe", *name.encode()), self.clock.over_in(seconds)), None
        assert probe.at_cut is not None
        try:
            judged = judge_cut(probe.goal, watched, probe.at_cut(watched.known, watched.sights, work))
        except DataError as error:
            why = str(error)
        except RuntimeError as error:  # of torch: the page is worth more than one probe
            why = f"{FAILED} {error}"
        taken = self.clock.now() - began
        if judged is None:
            return untried(name, probe, why, taken)
        return Finding(
            probe=name,
            goal=probe.goal,
            why_not="",
            figures=dict(judged.figures),
            seconds=taken,
            assumes=probe.assumes,
            level=judged.level,
            floor=judged.floor,
            chance=judged.chance,
            pictures=judged.pictures,
        )


def attack_cut(plan: Plan, names: Sequence[str], rounds: int, num_public: int, clock: Clock, *, some: bool) -> RedTeam:
    """Let probes attack what the server of split learning sees of a plan's first rounds; see `red_team`."""
    seat, began = _Seat(names, rounds, num_public, clock), clock.began
    clock.say(f"{rounds} rounds of the plan, as its server sees them")
    watched = seat.watch(plan)
    seat = seat._replace(clock=clock._replace(began=clock.now()))
    findings = seat.attacked(plan, watched, PROBES_UNTIL, "")
    claims = check_cut_claims(plan, watched)
    changes, switches = list[Change](), [*_switches_off(plan), *_switches_on(plan, watched)]
    for place, switch in enumerate(switches, 1):
        until = PROBES_UNTIL + (1 - PROBES_UNTIL) * place / len(switches)
        changes.append(_change(seat, switch, until))
    claimed = claimed_epsilon(plan) if plan.privacy is not None else None
    left_out = ["Clients that attack, and a server that does not keep to the protocol, were not tried at a cut."]
    if watched.num_rounds < rounds:
        left_out.append(f"Only {watched.num_rounds} of {rounds} rounds were watched, for want of time.")
    if some:
        left_out.append(f"Only {', '.join(names)} were asked for.")
    return RedTeam(
        title=plan.name or f"{plan.data.name}, {plan.split.way if plan.split else ''}",
        plan_text=plan.to_toml(),
        sees=sees(plan, watched),
        findings=tuple(findings),
        changes=tuple(changes),
        claims=tuple(claims),
        epsilon=None if claimed is None else claimed[0],
        delta=None if claimed is None else claimed[1],
        seconds=clock.now() - began,
        budget=clock.ends - began,
        not_tried=tuple(left_out),
    )


def sees(plan: Plan, watched: CutWatched) -> str:
    """Return what the server sees of a plan, in words."""
    split = plan.split
    assert split is not None
    num = sum(len(sight.activations_N) for sight in watched.sights)
    width, rounds = watched.parties.cut.width, watched.num_rounds
    labels = "and their labels" if split.tail is None else "and the gradients by its own outputs, without labels"
    names = [part.name for part in split.defences] + ([plan.privacy.name] if plan.privacy else [])
    after = f", after {' and '.join(names)}" if names else ""
    return (
        f"in {rounds} round{'s' * (rounds != 1)} the activations of {num:,} samples, {width:,} values each, "
        f"{labels}{after}"
    )


def _change(seat: _Seat, switch: Switch, until: float) -> Change:
    change = Change(switch.defence, switch.setting, switch.off)
    if seat.clock.left(until) <= 0:
        return change._replace(why_not=NO_TIME)
    what = f"{'without' if switch.off else 'with'} {switch.defence}"
    seat.clock.say(f"{seat.rounds} rounds {what}")
    return _tried_change(seat, switch, change, until, what)


def _tried_change(seat: _Seat, switch: Switch, change: Change, until: float, what: str) -> Change:
    base = switch.base
    assert base is not None
    try:
        plan = base.replace(switch.changes)
        watched = seat.watch(plan)
        findings = seat.attacked(plan, watched, until, f", {what}")
    except AtollError as error:
        return change._replace(why_not=str(error))
    kept = tuple(each._replace(pictures=each.pictures[:1]) for each in findings)
    return change._replace(findings=kept, sees=sees(plan, watched))


def _switches_off(plan: Plan) -> list[Switch]:
    """Return the defences that a plan has at the cut; what needs another goes with it."""
    split = plan.split
    assert split is not None
    found = list[Switch]()
    if plan.privacy is not None:
        setting = f"privacy = {toml_of(plan.privacy)}"
        found.append(Switch(f"{plan.privacy.name} noise and clip", setting, {"privacy": None}, True, plan))
    for place, part in enumerate(split.defences):
        rest = [other.to_dict() for number, other in enumerate(split.defences) if number != place]
        setting = f"split.defences = [{toml_of(part)}]"
        found.append(Switch(part.name, setting, {"split.defences": rest}, True, plan))
    if split.tail is not None:
        built = zip(split.defences, defences_of(plan), strict=True)
        rest = [part.to_dict() for part, defence in built if defence.perturb is None]
        changes: dict[str, object] = {"split.tail": None, "split.defences": rest}
        changes |= {"privacy": None} if plan.privacy is not None else {}
        found.append(Switch("labels that stay with clients", f'split.tail = "{split.tail}"', changes, True, plan))
    return found


def _switches_on(plan: Plan, watched: CutWatched) -> list[Switch]:
    """Return defences that a plan does without: less dependence, noise, labels that stay, noise on gradients."""
    split = plan.split
    assert split is not None
    own = {part.name for part in split.defences}
    tried = list[tuple[str, Part]]()
    if "nopeek" not in own and not split.frozen:
        tried.append(("activations that depend less on samples", Part("nopeek", weight=LOUD)))
    if "noise" not in own and plan.privacy is None and watched.sights:
        norm = float(torch.cat([sight.activations_N.flatten(1) for sight in watched.sights]).norm(dim=1).median())
        clip = float(f"{norm:.2g}") if norm > 0 else 1.0
        sigma = float(f"{QUIET / math.sqrt(np.prod(watched.parties.cut.shape)):.2g}")
        tried.append(("noise on activations, as long as they are", Part("noise", clip=clip, sigma=sigma)))
    if split.tail is not None and not own & {"isotropic", "max_norm", "marvell"}:
        tried.append(("noise on gradients, as long as they are", Part("isotropic", scale=1.0)))
        tried.append(("gradients that are all as long", Part("max_norm")))
    defences = [part.to_dict() for part in split.defences]
    found = [
        Switch(
            what,
            f"split.defences = [{toml_of(part)}]",
            {"split.defences": [*defences, part.to_dict()]},
            False,
            plan,
        )
        for what, part in tried
    ]
    if split.tail is None and (last := _last_layer(plan)) is not None:
        setting: Mapping[str, object] = {"split.tail": last}
        found.append(Switch("labels that stay with clients", f'split.tail = "{last}"', dict(setting), False, plan))
    return found


def _last_layer(plan: Plan) -> str | None:
    """Return the last layer that has parameters, if a tail may begin with it."""
    job, split = build_job(plan), plan.split
    assert split is not None
    model: nn.Module = job.model
    names = [place.name for place in places(job)]
    layers = dict(model.named_modules())
    trained = [name for name in layers if name and next(layers[name].parameters(recurse=False), None) is not None]
    last = trained[-1] if trained else None
    top = None if last is None else next((name for name in [*names, last] if last.startswith(name)), None)
    return last if top is not None and str(split.cut) != last else None
