"""What a red team found, in sentences for somebody who decides about data: tried, got, not tried, what to change."""

from __future__ import annotations

from atoll.report.main_figure import SMALLER_IS_BETTER, shown, title_of
from atoll.report.redteam import (
    NO_TIME,
    NOTHING,
    OPEN,
    SOME,
    UNCHECKED,
    Change,
    Finding,
    Poisoned,
    RedTeam,
    beside_floor,
    best_of,
    figure_name,
    figure_text,
    topic_words,
)

Topic = tuple[str, bool]
PRIVACY_OF_THE_PAGE = (
    "This page shows samples of the clients that were simulated, and what was read out of their updates. Treat it like "
    "the data itself: do not pass it on to anybody who may not see them."
)
CHECK = (
    "A server that plants a model is stopped by sites, not by the plan. A site that sets floors.max_change (see the "
    "federation guide) trains on the first model only if it is the one that the plan's own seed gives, and on a later "
    "one only if it is no farther from the last that it saw than max_change for each version since: a planted model is "
    "far away at once, and is refused before any sample is touched. Without this floor a site checks that everybody is "
    "sent the model that the signed ledger names, so that nobody can be singled out; a server that writes the planted "
    "model into its ledger gets past that. A server that moves slowly, within max_change, is stopped by neither."
)
LIMITS = (
    "A low figure says that these attacks failed in the time they had, not that nothing could be had. Figures are of a "
    "simulation with this plan's data, model and settings; with others they differ. Attacks over many more rounds than "
    "were watched, and clients that collude with the server were not tried."
)


def tried(found: RedTeam) -> list[str]:
    """Return what was tried."""
    names = [each.probe for each in found.findings if each.figures]
    lines = [
        f"Somebody who sees what the server sees, {found.sees}, attacked with {len(names)} methods "
        f"({', '.join(names) or 'none'}) in {found.seconds:.0f} seconds."
    ]
    for change in found.changes:
        if change.findings:
            lines.append(f"The same again {'without' if change.off else 'with'} {change.defence}.")
    if runs := [each for each in found.poisoned if each.value is not None]:
        attacks = dict.fromkeys(each.attack for each in runs if each.attack != found.poisoned[0].attack)
        lines.append(f"{found.attackers} attacked the model: {', '.join(attacks) or 'none of them in time'}.")
    return lines


def got(found: RedTeam) -> list[str]:
    """Return what was got, the worst first."""
    best = [each for topic in found.topics if (each := best_of(found.findings, topic)) is not None]
    order = (OPEN, SOME, NOTHING)
    return [_sentence(each, found) for each in sorted(best, key=lambda each: order.index(each.level))]


def _sentence(finding: Finding, found: RedTeam) -> str:
    what = topic_words(finding.topic)
    beside = f"{figure_name(finding.main[0])} {beside_floor(finding)}"
    claimed = ""
    if "empirical epsilon" in finding.figures:
        shown_epsilon = figure_text(finding.figures["empirical epsilon"])
        plan = "the plan claims none" if found.epsilon is None else f"the plan claims {figure_text(found.epsilon)}"
        claimed = f"; epsilon is at least {shown_epsilon}, {plan}"
    how = {OPEN: "Laid open", SOME: "Partly known", NOTHING: "Not beyond guessing and chance"}[finding.level]
    return f"{how}: {what}; {finding.probe} has {beside}{claimed}."


def not_tried(found: RedTeam) -> list[str]:
    """Return what was not tried, and why."""
    lines = [f"{each.probe}: {each.why_not}." for each in found.findings if each.why_not]
    for change in found.changes:
        if change.why_not:
            lines.append(f"{'Without' if change.off else 'With'} {change.defence}: {change.why_not}.")
    lines += [f"{claim.defence}: {claim.seen}." for claim in found.claims if claim.verdict == UNCHECKED]
    lines += [f"{each.attack} against {each.rule}: {each.why_not}." for each in found.poisoned if each.why_not]
    return [*(line.replace("..", ".") for line in lines), *found.not_tried, LIMITS]


def advice(found: RedTeam) -> list[str]:
    """Return which settings to change, by what was measured."""
    lines = [
        f"Mend {claim.defence} before anything else: the plan claims {claim.claim}, but {claim.seen}."
        for claim in found.broken
    ]
    for change in found.changes:
        better = [text for topic in found.topics if (text := _change_text(found, change, topic)) is not None]
        if better and not change.off:
            lines.append(f"Set {change.setting}: {'; '.join(better)}.")
        elif better:
            lines.append(f"Keep {change.defence}: without it {'; '.join(better)}.")
        elif change.findings and change.off:
            lines.append(f"{change.defence} changed nothing that these attacks could get: do not count on it.")
    planted = best_of(found.findings, ("samples", True))
    if planted is not None and planted.level != NOTHING:
        lines.append(
            "Let sites set floors.max_change: a server that plants a model is stopped by no setting of a plan."
        )
    lines += _poison_advice(found.poisoned)
    if not lines:
        lines.append("No setting that was tried would make these attacks fare worse.")
    return lines


def _change_text(found: RedTeam, change: Change, topic: Topic) -> str | None:
    """Return by how much a changed defence moves what is got of a topic, if it moves its level."""
    levels = (NOTHING, SOME, OPEN)
    before, after = best_of(found.findings, topic), best_of(change.findings, topic)
    findings: tuple[Finding, ...] = change.findings
    if change.off:
        before, after, findings = after, before, found.findings  # `before` is without the defence
    if before is None or before.level == NOTHING:
        return None
    reasons = [each.why_not for each in findings if each.topic == topic]
    if after is None and (not reasons or NO_TIME in reasons):
        return None  # nobody has tried
    if levels.index(after.level if after is not None else NOTHING) >= levels.index(before.level):
        return None
    now = f"nothing ({reasons[0]})" if after is None else beside_floor(after)
    joined = ", with it" if change.off else " becomes"
    return f"{topic_words(topic)}: {figure_name(before.main[0])} {beside_floor(before)}{joined} {now}"


def _poison_advice(poisoned: tuple[Poisoned, ...]) -> list[str]:
    """Return advice where the plan's own rule lets attackers spoil the model."""
    own = [each for each in poisoned if each.value is not None and each.rule == poisoned[0].rule]
    if len(own) < 2 or own[0].value is None:
        return []
    clean, sign = own[0], -1 if own[0].figure in SMALLER_IS_BETTER else 1
    assert clean.value is not None
    losses = [
        (sign * (clean.value - each.value) / max(abs(clean.value), 1e-12), each) for each in own[1:] if each.value
    ]
    worst = max(losses, key=lambda pair: pair[0], default=None)
    lines = []
    if worst is not None and worst[0] > 0.1 and worst[1].value is not None:
        one = worst[1]
        lines.append(
            f"{title_of(clean.figure).capitalize()} goes from {shown(clean.figure, clean.value)} to "
            f"{shown(one.figure, worst[1].value)} in {one.rounds} rounds under {one.attack} with the rule {one.rule}: "
            "compare robust rules with atoll matrix, e.g. --defences trimmed_mean,multi_krum,centered_clipping."
        )
    if hit := [each for each in own[1:] if each.success is not None and each.success > 0.5]:
        lines.append(
            f"A backdoor works for {hit[0].success:.0%} of the samples with its trigger: bound norms, or detect."
        )
    return lines
