"""The page about a red team's findings: one self-contained HTML file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np

from atoll.report.main_figure import shown, title_of
from atoll.report.redteam import (
    BROKEN,
    HOLDS,
    NOTHING,
    OPEN,
    SOME,
    Change,
    Finding,
    Picture,
    RedTeam,
    beside_floor,
    best_of,
    figure_name,
    figure_text,
    topic_words,
    with_unit,
)
from atoll.report.redteam_words import CHECK, PRIVACY_OF_THE_PAGE, advice, got, not_tried, tried
from atoll.report.run_sections import card
from atoll.report.shell import html_table, shell

MARKS = {OPEN: "bad", SOME: "fair", NOTHING: "good", BROKEN: "bad", HOLDS: "good"}
"""Verdict -> its class in the style."""
FLOORS = (
    "Floors need no attack: a blank sample, the mean of public samples, the nearest public sample (which takes the "
    "truth to find), the usual labels or words, and guessing. All of them are the best over the same samples, as the "
    "figures of attacks are: the largest counts, not the mean."
)
MOST_PICTURES = 12
"""Pairs of pictures on a page."""


def redteam_page(found: RedTeam) -> str:
    """Return the findings as HTML text."""
    sections = "".join(f"<section><h2>{title}</h2>{inside}</section>" for title, inside in _sections(found) if inside)
    broken = "".join(
        f'<p class="warning"><strong>Broken:</strong> {escape(claim.defence)}. The plan claims {escape(claim.claim)}; '
        f"{escape(claim.seen)}.</p>"
        for claim in found.broken
    )
    notice = f'<p class="warning">{escape(PRIVACY_OF_THE_PAGE)}</p>'
    lead = f"What somebody gets who sees what the server sees: {found.sees}."
    body = notice + broken + _cards(found) + sections
    return shell(brand="Atoll red team", heading=found.title, lead=lead, body=body)


def _cards(found: RedTeam) -> str:
    items = []
    for topic in found.topics:
        best = best_of(found.findings, topic)
        if best is not None:
            name, value = best.main
            beside = f"{best.level}: {figure_name(name)} by {best.probe}; {beside_floor(best)}"
            items.append(card(_upper(topic_words(topic)), with_unit(name, value), beside, main=best.level == OPEN))
    return f'<dl class="cards">{"".join(items)}</dl>' if items else ""


def _sections(found: RedTeam) -> list[tuple[str, str]]:
    """Return title and HTML of each section; one without HTML is left out."""
    return [
        ("In words", _words(found)),
        ("What the plan claims", _claims(found)),
        ("Samples beside what was made of updates", _pictures(found.findings)),
        ("Texts beside what was read out of updates", _texts(found.findings)),
        ("All attacks", _attacks(found)),
        ("What each defence changes", _changes(found)),
        ("Clients that attack the model", _poisoned(found)),
        ("A server that plants a model", _note(CHECK) if any(each.active for each in found.findings) else ""),
        ("Plan", f"<details><summary>Show</summary><pre>{escape(found.plan_text)}</pre></details>"),
    ]


def _words(found: RedTeam) -> str:
    blocks = {
        "What was tried": tried(found),
        "What was got": got(found),
        "Which setting to change": advice(found),
        "What was not tried, and why": not_tried(found),
    }
    return "".join(
        f"<h3>{title}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for title, lines in blocks.items()
        if lines
    )


def _claims(found: RedTeam) -> str:
    rows = [
        [_mark(claim.verdict), *(escape(text) for text in (claim.defence, claim.claim, claim.seen))]
        for claim in found.claims
    ]
    if not rows:
        return _note("The plan claims nothing: it has no noise, no secure aggregation and no clip.")
    return html_table(["verdict", "defence", "what the plan claims", "what was seen"], rows, text=4)


def _pictures(findings: Sequence[Finding]) -> str:
    """Return the best pairs of samples and reconstructions, of attacks that got most first."""
    order = (OPEN, SOME, NOTHING)
    with_pictures = [each for each in findings if each.pictures]
    chosen = sorted(with_pictures, key=lambda each: (order.index(each.level), -each.main[1]))
    blocks, left = [], MOST_PICTURES
    for finding in chosen:
        shown_pictures = finding.pictures[: min(left, 6 if finding.level != NOTHING else 2)]
        left -= len(shown_pictures)
        if not shown_pictures:
            break
        pairs = "".join(map(_pair, shown_pictures))
        title = f"{escape(finding.probe)} {_mark(finding.level)}"
        blocks.append(f'<h3>{title}</h3><div class="pairs">{pairs}</div>')
    left_side = (
        "Left: the sample of a client. Right: what the attack made of its update. The best pairs of the best row."
    )
    return "".join(blocks) + _note(left_side) if blocks else ""


def _pair(picture: Picture) -> str:
    caption = f"{figure_text(picture.psnr)} dB" + (f", SSIM {picture.ssim:.2f}" if picture.is_image else "")
    if not picture.is_image:
        numbers = (" ".join(f"{value:.3g}" for value in side.tolist()) for side in (picture.original, picture.guess))
        lines = "\n".join(map(escape, numbers))
        return f'<figure class="pair"><pre>{lines}</pre><figcaption>{caption}</figcaption></figure>'
    sides = "".join(
        f'<img alt="{what}" src="data:image/png;base64,{_png(side)}">'
        for what, side in (("a client's sample", picture.original), ("its reconstruction", picture.guess))
    )
    return f'<figure class="pair">{sides}<figcaption>{caption}</figcaption></figure>'


def _png(pixels: np.ndarray) -> str:
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2), format="png")
    return base64.b64encode(file.getvalue()).decode()


def _texts(findings: Sequence[Finding]) -> str:
    rows = [
        [escape(finding.probe), escape(text.original), escape(text.guess), f"{text.right:.0%}"]
        for finding in findings
        for text in finding.texts[:3]
    ]
    return html_table(["attack", "a client's text", "what was read", "right"], rows, text=3) if rows else ""


def _attacks(found: RedTeam) -> str:
    """Return a table for each topic, with all figures and their floors."""
    blocks = []
    for topic in found.topics:
        findings = [each for each in found.findings if each.topic == topic and each.figures]
        names = list(dict.fromkeys(name for each in findings for name in each.figures))
        rows = []
        for each in sorted(findings, key=lambda each: -each.main[1]):
            cells = [with_unit(name, each.figures[name]) if name in each.figures else "" for name in names]
            claimed = [_epsilon(found)] if "empirical epsilon" in names else []
            rows.append([escape(each.probe), _mark(each.level), *cells, *claimed, f"{each.seconds:.1f}"])
        if rows:
            claimed_title = ["claimed epsilon"] if "empirical epsilon" in names else []
            head = ["attack", "got", *map(figure_name, names), *claimed_title, "seconds"]
            blocks.append(f"<h3>{escape(_upper(topic_words(topic)))}</h3>{html_table(head, rows, text=2)}")
    assumed = dict.fromkeys(each.assumes for each in found.findings if each.figures)
    said = "".join(_note(f"Assumed: {text}.") for text in assumed)
    return "".join(blocks) + _note(FLOORS) + said if blocks else _note("No attack could be tried.")


def _epsilon(found: RedTeam) -> str:
    return "none" if found.epsilon is None else f"{figure_text(found.epsilon)} (delta {found.delta:g}, all rounds)"


def _changes(found: RedTeam) -> str:
    """Return a table of the best figure of each topic: with the plan as it is, and with one defence off or on."""
    done = [change for change in found.changes if change.findings]
    rows = []
    for topic in found.topics:
        cells = [_best_cell(each, topic) for each in (found.findings, *(change.findings for change in done))]
        if any(cells):
            rows.append([escape(_upper(topic_words(topic))), *(cell or "nothing to judge" for cell in cells)])
    head = ["the most that was got", "this plan", *(_change_title(change) for change in done)]
    sees = "".join(_note(f"{_change_title(change)}, the server sees {change.sees}.") for change in done)
    missing = "".join(_note(f"{_change_title(change)}: {change.why_not}") for change in found.changes if change.why_not)
    settings = [change.setting for change in found.changes if not change.off]
    on = _note(f"Could be switched on: {'; '.join(settings)}.") if settings else ""
    none = "" if any(change.off for change in found.changes) else _note("This plan has no defence to switch off.")
    return (html_table(head, rows, text=len(head)) if rows and done else "") + none + on + sees + missing


def _best_cell(findings: Sequence[Finding], topic: tuple[str, bool]) -> str:
    best = best_of(findings, topic)
    if best is None:
        return ""
    beside = f"{figure_name(best.main[0])} by {best.probe}"
    return f"{_mark(best.level)} {escape(beside_floor(best))} <small>{escape(beside)}</small>"


def _change_title(change: Change) -> str:
    return f"{'without' if change.off else 'with'} {change.defence}"


def _poisoned(found: RedTeam) -> str:
    if not found.poisoned:
        return ""
    rows, clean = [], {each.rule: each.value for each in found.poisoned if each.attack == found.poisoned[0].attack}
    for each in found.poisoned:
        value = escape(each.why_not) if each.value is None else shown(each.figure, each.value)
        base = clean.get(each.rule)
        before = "" if base is None or each.value is None else shown(each.figure, base)
        success = "" if each.success is None else f"{each.success:.1%}"
        rows.append([escape(each.attack), escape(each.rule), value, before, success, str(each.rounds or "")])
    figure = next((each.figure for each in found.poisoned if each.figure), "accuracy")
    head = ["attack", "rule", title_of(figure), "without attack", "trigger works", "rounds"]
    note = f"{found.attackers} attack, from the first round on; one seed. Compare more rules with atoll matrix."
    return html_table(head, rows, text=2) + _note(note)


def _mark(verdict: str) -> str:
    return f'<span class="mark {MARKS.get(verdict, "fair")}">{escape(verdict)}</span>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(_upper(text))}</p>'


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
