"""What a red team found out about a plan: records, as plain data and as text. Shapes: H, W of a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from atoll.core.probe import Probe

OPEN, SOME, NOTHING = "laid open", "something", "nothing"
"""How much a probe got: what it was after, more than guessing gives, or no more than that."""
HOLDS, BROKEN, UNCHECKED = "holds", "broken", "not checked"
"""What became of a plan's claim."""
NO_TIME = "there was no time: raise --seconds"
"""Why something was not tried that could have been."""
FAILED = "it ended with an error, which is a bug:"
"""What the reason begins with if something broke that should have worked."""
GOAL_WORDS = {
    "samples": "clients' samples",
    "labels": "how many samples of each class a client has",
    "tokens": "words of clients' texts",
    "membership": "whether a known sample was trained on",
    "property": "what a client is like",
    "source": "whose a known sample is",
    "attribute": "an unknown column of a known sample",
    "sample labels": "the label of each sample",
}
"""Goal of a probe -> what it is after, in words."""


class Picture(NamedTuple):
    """A client's sample beside what a probe made of its update."""

    original: np.ndarray
    """(H, W) or (H, W, 3) of uint8 for an image, (F,) of numbers for other features."""
    guess: np.ndarray
    psnr: float
    ssim: float

    @property
    def is_image(self) -> bool:
        """Return whether there is something to draw."""
        return self.original.ndim > 1


class Text(NamedTuple):
    """A client's text beside what a probe read out of its update."""

    original: str
    guess: str
    right: float
    """Share of positions, or words, that are right."""


class Finding(NamedTuple):
    """What one probe got."""

    probe: str
    goal: str
    why_not: str
    """Why it was not tried, or not judged; empty if it was."""
    figures: Mapping[str, float]
    """What it got, by name and unit; the largest over all rows. The first is the one that counts."""
    seconds: float
    assumes: str
    level: str = NOTHING
    """How much that is: one of OPEN, SOME and NOTHING."""
    floor: float = math.nan
    """What the first figure is without any attack, at best."""
    chance: float = math.nan
    """What it may be by chance, where few are judged; not a number where that does not matter."""
    pictures: tuple[Picture, ...] = ()
    texts: tuple[Text, ...] = ()
    active: bool = False
    """Whether the server sends a model of its own making."""

    @property
    def topic(self) -> tuple[str, bool]:
        """Return what findings are compared by: the goal, and whether the server is active."""
        return self.goal, self.active

    @property
    def main(self) -> tuple[str, float]:
        """Return the figure that counts, by name; an empty name if there is none."""
        return next(iter(self.figures.items()), ("", math.nan))


def untried(name: str, probe: Probe, why: str, seconds: float) -> Finding:
    """Return the finding of a probe that was not tried, or found nothing that could be judged."""
    return Finding(
        probe=name,
        goal=probe.goal,
        why_not=why,
        figures={},
        seconds=seconds,
        assumes=probe.assumes,
        active=probe.plant is not None,
    )


class Change(NamedTuple):
    """The same attacks on the same plan with one defence switched off, or on."""

    defence: str
    """The defence, in words."""
    setting: str
    """How a plan sets it, as TOML."""
    off: bool
    """Whether it was switched off; else the plan does without it, and it was switched on."""
    findings: tuple[Finding, ...] = ()
    sees: str = ""
    why_not: str = ""
    """Why this was not tried; empty if it was."""


class Claim(NamedTuple):
    """What a plan claims of a defence, and what was seen of it."""

    defence: str
    claim: str
    seen: str
    verdict: str
    """One of HOLDS, BROKEN and UNCHECKED."""


class Poisoned(NamedTuple):
    """How a plan's model fares if some of its clients attack."""

    attack: str
    rule: str
    rounds: int
    figure: str
    """Name of the figure on the test set, such as accuracy."""
    value: float | None
    success: float | None = None
    """Share of test samples with a backdoor's trigger that are taken for its target."""
    why_not: str = ""


class RedTeam(NamedTuple):
    """What a plan gave away to whoever sees what its server sees, and how it fares under attack."""

    title: str
    plan_text: str
    sees: str
    """What the server sees of a round, in words."""
    findings: tuple[Finding, ...]
    changes: tuple[Change, ...] = ()
    claims: tuple[Claim, ...] = ()
    poisoned: tuple[Poisoned, ...] = ()
    attackers: str = ""
    """How many clients attack in `poisoned`, in words."""
    epsilon: float | None = None
    """What the plan claims to spend on all its rounds; None if it is not private."""
    delta: float | None = None
    seconds: float = 0.0
    budget: float = 0.0
    """Seconds that were asked for."""
    not_tried: tuple[str, ...] = ()
    """What was left out for want of time, in sentences."""

    @property
    def topics(self) -> list[tuple[str, bool]]:
        """Return the topics of the probes, in the order of GOAL_WORDS."""
        order = list(GOAL_WORDS)
        named = {each.topic for each in self.findings}
        return sorted(named, key=lambda topic: (order.index(topic[0]) if topic[0] in order else len(order), *topic))

    @property
    def broken(self) -> list[Claim]:
        """Return the claims that do not hold."""
        return [claim for claim in self.claims if claim.verdict == BROKEN]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON; figures that are not finite are None, and pictures and texts are counted."""
        plain = self._asdict()
        plain["findings"] = [_finding_dict(each) for each in self.findings]
        plain["changes"] = [
            {**each._asdict(), "findings": [_finding_dict(one) for one in each.findings]} for each in self.changes
        ]
        plain["claims"] = [each._asdict() for each in self.claims]
        plain["poisoned"] = [each._asdict() for each in self.poisoned]
        return {name: _finite(value) for name, value in plain.items()}


def severity(finding: Finding) -> tuple[int, float]:
    """Return what findings of one goal are ordered by: how much was got, then the figure that counts."""
    return (NOTHING, SOME, OPEN).index(finding.level), finding.main[1]


def best_of(findings: Iterable[Finding], topic: tuple[str, bool]) -> Finding | None:
    """Return the finding of a topic that got most; None if nothing was tried."""
    return max((each for each in findings if each.topic == topic and each.figures), key=severity, default=None)


def topic_words(topic: tuple[str, bool]) -> str:
    """Return what a topic is about.

    >>> topic_words(("samples", True))
    "clients' samples, by a server that plants a model"
    """
    goal, active = topic
    return GOAL_WORDS.get(goal, goal) + (", by a server that plants a model" if active else "")


def figure_text(value: float) -> str:
    """Return a figure with as many digits as matter.

    >>> figure_text(0.12345), figure_text(95.7272), figure_text(1.0), figure_text(float("nan"))
    ('0.123', '95.7', '1', '–')
    """
    if not math.isfinite(value):
        return "–"
    return f"{value:.1f}" if abs(value) >= 10 else np.format_float_positional(value, 3, trim="-")


def with_unit(name: str, value: float) -> str:
    """Return a figure with its unit: decibels, or percent for shares.

    >>> with_unit("best PSNR in dB", 95.72), with_unit("share of samples above 30 dB", 0.703), with_unit("AUC", 0.5)
    ('95.7 dB', '70.3 %', '0.5')
    """
    if not math.isfinite(value):
        return "–"
    if name.startswith(("share", "members")):
        return f"{100 * value:.1f} %"
    return f"{value:.1f} dB" if "dB" in name else figure_text(value)


def figure_name(name: str) -> str:
    """Return the name of a figure that stands beside `with_unit`.

    >>> figure_name("best PSNR in dB")
    'best PSNR'
    """
    return name.removesuffix(" in dB")


def beside_floor(finding: Finding) -> str:
    """Return the figure that counts beside what it is without an attack, and by chance."""
    name, value = finding.main
    chance = f", by chance up to {with_unit(name, finding.chance)}" if math.isfinite(finding.chance) else ""
    return f"{with_unit(name, value)} ({with_unit(name, finding.floor)} without an attack{chance})"


def as_text(found: RedTeam) -> str:
    """Return findings as lines, those that got something first, then changes, claims and poisoning."""
    lines = [f"the server sees {found.sees}"]
    for each in sorted(found.findings, key=lambda finding: bool(finding.why_not)):
        lines.append(f"{each.probe} ({each.goal}, {each.seconds:.1f} s): {_figures_text(each)}")
    for change in found.changes:
        what = f"{'without' if change.off else 'with'} {change.defence}"
        tops = [top for topic in found.topics if (top := best_of(change.findings, topic)) is not None]
        best = [f"{top.probe} {_figures_text(top, 1)}" for top in tops]
        lines.append(f"{what}: {'; '.join(best) or f'not tried: {change.why_not or NO_TIME}'}")
    lines += [f"{each.verdict}: {each.defence}: {each.claim}; {each.seen}" for each in found.claims]
    for one in found.poisoned:
        value = f"{one.figure} {figure_text(one.value)}" if one.value is not None else f"not tried: {one.why_not}"
        success = "" if one.success is None else f", trigger works for {one.success:.0%}"
        lines.append(f"poisoned by {one.attack} ({one.rule}, {one.rounds} rounds): {value}{success}")
    return "\n".join([*lines, *found.not_tried])


def _figures_text(finding: Finding, most: int = 99) -> str:
    figures = [f"{name} {figure_text(value)}" for name, value in list(finding.figures.items())[:most]]
    return ", ".join(figures) or f"not tried: {finding.why_not}"


def _finding_dict(finding: Finding) -> dict[str, Any]:
    plain = finding._asdict()
    plain |= {"pictures": len(finding.pictures), "texts": len(finding.texts), "figures": dict(finding.figures)}
    return {name: _finite(value) for name, value in plain.items()}


def _finite(value: Any) -> Any:
    """Return JSON data with None for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
