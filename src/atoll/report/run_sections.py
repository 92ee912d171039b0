"""Sections of the report about one run: headline numbers, settings, figures, last rounds.

Shapes: C clients, K classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.core.parts import Part
from atoll.report import figures
from atoll.report.answers import answers_section
from atoll.report.contribution_picture import contribution_picture, gain_text
from atoll.report.cut_section import cut_section
from atoll.report.main_figure import best_of, main_figure, shown, title_of
from atoll.report.new_clients import has_new_clients, new_clients_note, new_clients_picture, new_clients_table
from atoll.report.privacy_picture import spending_picture
from atoll.report.reading import (
    NONE,
    Json,
    RunRecord,
    class_names,
    clients_own_data,
    contributions,
    count_text,
    dig,
    diverged,
    end_reason,
    failure_advice,
    human_bytes,
    human_seconds,
    lost_tasks,
    model_text,
    number,
    part_text,
    partition_text,
    rounds_to,
    secret_note,
    series,
    share_text,
    site_rows,
    statement_text,
    targets_of,
)
from atoll.report.shell import html_table, image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNFAIR = 0.1
"""A gap between groups in accuracy that is warned about."""
LAST_ROUNDS = 10
"""Number of rounds in the table of the last rounds."""


class RunPicture(NamedTuple):
    """A figure of a run, which is drawn when it is needed."""

    name: str
    """File name without its ending."""
    draw: Callable[[], Figure]
    title: str
    note: str
    """Caption."""
    table: str = ""
    """HTML that stands under the figure."""


def lead(record: RunRecord) -> str:
    """Return a sentence about what was run, and one about how it ended."""
    plan, info = record.plan, record.info
    clients = count_text(info.get("num_clients"))
    in_full = clients_own_data(record) or plan.partition.name == "mixture"
    partition = partition_text(record) if in_full else plan.partition.name
    summary = f"{plan.algorithm.name} on {plan.data.name}, {partition}, {clients} clients, model {model_text(plan)}."
    rounds = record.rows[-1]["round"] if record.rows else 0
    if why := end_reason(record):
        return f"{summary} Ended after {rounds:,} of {plan.rounds:,} rounds: {why}."
    return f"{summary} Not finished: {rounds:,} of {plan.rounds:,} rounds are recorded; it is running or was killed."


def warnings(record: RunRecord) -> str:
    """Return the warnings about a run as HTML: divergence, failure, missing rounds, noise without protection."""
    texts = []
    if bad := diverged(record):
        texts.append(
            f"The training loss is not a finite number in {len(bad)} of {len(record.rows)} rounds, first in round "
            f"{bad[0]}: training diverged; a lower local.lr may help."
        )
    if advice := failure_advice(record):
        texts.append(f"The run ended early or without a usable model ({end_reason(record)}): {advice}.")
    if not record.rows:
        texts.append("No round is recorded yet.")
    texts += _unfair(record)
    if warning := dig(record.info, "privacy.warning"):
        texts.append(f"{warning}. This run was a test: its epsilon gives no protection.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def _unfair(record: RunRecord) -> list[str]:
    """Return a warning if the model does much worse for one group than for others."""
    table = (record.charts or {}).get("fairness") or {}
    accuracy = {name: value for name, value in (table.get("accuracy") or {}).items() if value is not None}
    if len(accuracy) < 2 or max(accuracy.values()) - min(accuracy.values()) < UNFAIR:
        return []
    worst, best = min(accuracy, key=lambda name: accuracy[name]), max(accuracy, key=lambda name: accuracy[name])
    return [
        f"The model is right for {100 * accuracy[worst]:.1f} % of the group {worst}, and for "
        f"{100 * accuracy[best]:.1f} % of {best}, on the test set."
    ]


def cards(record: RunRecord) -> str:
    """Return the headline numbers as HTML, each with its unit."""
    last = record.rows[-1] if record.rows else {}
    seconds, up, down = (number(last, key) for key in ("seconds", "bytes_up", "bytes_down"))
    items = [
        *_accuracy_cards(record),
        card("Rounds", f"{last.get('round', 0):,}", f"of {record.plan.rounds:,} planned"),
    ]
    if seconds is not None:
        pace = human_seconds(seconds / max(len(record.rows), 1))
        items.append(card("Wall time", human_seconds(seconds), f"{pace} a round"))
    for title, amount in (("Uplink", up), ("Downlink", down)):
        if amount is not None:
            items.append(card(title, human_bytes(amount), "all clients, all rounds"))
    if (epsilon := number(last, "privacy.epsilon")) is not None:
        privacy = last["privacy"]
        items.append(
            card("Epsilon spent", f"{epsilon:.2f}", f"delta {privacy['delta']:g}, by {privacy['unit']}", main=True)
        )
    updates = number(last, "clients")
    in_last_round = f"{updates:,.0f} updates in the last round" if updates is not None else ""
    items.append(card("Clients", count_text(record.info.get("num_clients")), in_last_round))
    params = dig(record.info, "model.num_params")
    largest_of = "the largest of " if record.plan.models and len(record.plan.models) > 1 else ""
    items.append(card("Parameters", count_text(params), largest_of + model_text(record.plan)))
    if lost := lost_tasks(record):
        total = sum(lost.values())
        items.append(card("Lost tasks", f"{total:,}", ", ".join(f"{n:,} {kind}" for kind, n in lost.items())))
    targets = [
        card(f"To {share_text(target)} accuracy", f"{rounds:,.1f} rounds", "on the test set")
        for target in targets_of([record])
        if (rounds := rounds_to(record, target)) is not None
    ]
    rule = "Rounds to a target: best test accuracy so far, linear between evaluated rounds (McMahan et al. 2017)."
    note = f'<p class="note">{rule}</p>' if targets else ""
    return f'<dl class="cards">{"".join(items + targets)}</dl>{note}'


def _accuracy_cards(record: RunRecord) -> list[str]:
    """Return the cards of the last and the best main figure, or none if the model was not tested."""
    name = main_figure([record])
    xs, ys = series(record, f"test.{name}")
    if not xs:
        return []
    best, title = ys.index(best_of(name, ys)), title_of(name)
    num_models = number(record.rows[-1], "models_test.num_clients")
    on = "test set" if num_models is None else f"test set, mean of {num_models:,.0f} clients' own models"
    final = f"{'Final' if end_reason(record) else 'Latest'} {title}"
    return [
        card(final, shown(name, ys[-1]), f"{on}, round {xs[-1]:,.0f}", main=True),
        card(f"Best {title}", shown(name, ys[best]), f"{on}, round {xs[best]:,.0f}", main=True),
    ]


def card(title: str, value: str, small: str, main: bool = False) -> str:
    """Return a headline number as HTML, with its unit in smaller type than the digits."""
    marked = re.sub(r"[^\W\d]+|%", lambda unit: f'<span class="unit">{unit[0]}</span>', escape(value))
    return (
        f'<div class="card{" main" * main}"><dt>{escape(title)}</dt><dd class="value">{marked}</dd>'
        f'<dd class="small">{escape(small)}</dd></div>'
    )


def run_section(record: RunRecord, name: str, index: int, single: bool) -> str:
    """Return everything about one run as HTML; folded unless it is the report's single run."""
    parts = [("What was run", _facts(record))]
    for picture in run_pictures(record):
        kind = "square" if picture.title == "Confusion" else ""
        figure = image(picture.draw(), picture.title, kind)
        parts.append((picture.title, f'{figure}{picture.table}<p class="note">{escape(picture.note)}</p>'))
    if record.plan.split is not None and (cut := record.info.get("split")):
        parts.append(("The cut", cut_section(record, cut)))
    if record.sites is not None:
        parts.append(("Sites", _sites(record.sites)))
    if record.answers is not None:
        parts.append(("What the model says", answers_section(record.answers)))
    if record.rows:
        parts.append(("Last rounds", _last_rounds(record)))
    parts.append(("Plan", f"<pre>{escape(record.plan.to_toml())}</pre>"))
    if single:
        return "".join(f"<section><h2>{title}</h2>{body}</section>" for title, body in parts)
    key = f'<span class="key" style="background:var(--c{index % len(figures.PALETTE)})"></span>'
    inside = "".join(f"<h3>{title}</h3>{body}" for title, body in parts)
    body = f'<p class="note">{escape(lead(record))}</p>{warnings(record)}{cards(record)}{inside}'
    return f'<details class="run"><summary>{key}{escape(name)}</summary>{body}</details>'


def _sites(sites: Json) -> str:
    """Return what clients measured at home as an HTML table: figures of each site, of all pooled, and the worst."""
    names = list(sites.get("pooled", {}))
    worst = dig(sites, "worst.client")
    lines = []
    rows = site_rows(sites)
    for site in rows:
        note = f"rejected: {site['rejected']}" if "rejected" in site else site.get("reason", "")
        note = note or "worst" * (worst is not None and site["client"] == worst)
        figures = [NONE if (v := number(site, f"figures.{name}")) is None else f"{v:.4g}" for name in names]
        lines.append([str(site["name"]), count_text(site.get("samples")), *figures, note])
    if names:
        pooled = [NONE if (v := number(sites, f"pooled.{name}")) is None else f"{v:.4g}" for name in names]
        lines.append(["all pooled", count_text(sum(row.get("samples") or 0 for row in rows)), *pooled, ""])
    table = html_table(["site", "samples", *names, ""], [[escape(cell) for cell in line] for line in lines])
    note = (
        f"Measured by the clients on their own samples after round {sites.get('round', NONE)}; the server adds up sums."
    )
    return f'{table}<p class="note">{escape(f"{note} {secret_note(sites)}".rstrip())}</p>'


def _facts(record: RunRecord) -> str:
    """Return the settings of a run as an HTML list."""
    plan, info = record.plan, record.info
    amount, unit = (plan.local.steps, "step") if plan.local.steps else (plan.local.epochs or 1, "epoch")
    work = f"{amount:,} {unit}{'s' * (amount != 1)}"
    batch = f", batch {plan.local.batch_size}" if plan.local.batch_size else ""
    server = "" if plan.server.lr is None else f", server lr {plan.server.lr:g}"
    train, test, classes = (count_text(dig(info, f"data.{key}")) for key in ("num_train", "num_test", "num_classes"))
    facts = [
        ("Data", f"{part_text(plan.data)}\n{train} training and {test} test samples, {classes} classes"),
        *([("Public data", part_text(plan.public))] if plan.public else []),
        ("Partition", f"{partition_text(record)}\n{count_text(info.get('num_clients'))} clients"),
        ("Model", f"{model_text(plan)}\n{count_text(dig(info, 'model.num_params'))} parameters"),
        ("Algorithm", part_text(plan.algorithm)),
        (
            "Local work",
            f"{work}{batch}\n{part_text(plan.local.optimizer)}, lr {plan.local.lr:g}, {part_text(plan.local.schedule)}",
        ),
        ("Client sampling", f"{part_text(plan.sampler)}\n{part_text(plan.policy)}"),
        *([("Devices", part_text(plan.devices))] if plan.devices else []),
        ("Aggregation", f"{part_text(plan.aggregator)}{server}"),
        ("Uplink", ", ".join(map(part_text, plan.uplink)) or "no transform"),
        ("Downlink", ", ".join(map(part_text, plan.downlink)) or "no transform"),
    ]
    if plan.privacy is not None:
        statement = dig(info, "privacy")
        facts.append(("Privacy", f"{part_text(plan.privacy)}\n{statement_text(statement) if statement else ''}"))
    if plan.attack is not None:
        attackers = ", ".join(f"{key} {value}" for key, value in plan.attackers.to_dict().items() if value)
        facts.append(("Attack", f"{part_text(plan.attack)}\n{attackers}"))
    engine = dig(info, "engine")
    engine_text = (
        part_text(Part.of(engine))
        if isinstance(engine, dict) and engine.get("name")
        else str(engine or plan.engine.name)
    )
    facts += [
        ("Engine", engine_text),
        ("Seed", str(plan.seed)),
        ("Started", _time_text(info.get("started"))),
        ("Atoll", f"{info.get('atoll', NONE)}, plan {str(info.get('identity', NONE))[:12]}"),
    ]
    items = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in facts)
    return f'<dl class="facts">{items}</dl>'


def run_pictures(record: RunRecord) -> list[RunPicture]:
    """Return the figures that a run has data for."""
    pictures: list[RunPicture] = []
    if record.rows and number(record.rows[-1], "privacy.epsilon") is not None:
        note = "Epsilon is that of all rounds so far; accuracy is that on the test set."
        pictures.append(RunPicture("privacy", lambda: spending_picture(record), "Privacy", note))
    if record.clients is not None and _have_figures(record.clients):
        holdout = record.plan.evaluation.holdout
        samples = (
            f"the {share_text(holdout)} of its samples that it does not train on"
            if holdout
            else "its own training samples"
        )
        note = f"The worst tenth is orange. Each client is tested on {samples}."
        pictures.append(RunPicture("clients", lambda: figures.client_spread(record), "Spread over clients", note))
    if has_new_clients(record):
        note, table = new_clients_note(record), new_clients_table(record)
        pictures.append(RunPicture("new-clients", lambda: new_clients_picture(record), "New clients", note, table))
    if record.plan.contribution is not None and contributions(record):
        samples = f"{count_text(record.plan.server.samples)} samples of the server's own"
        method = part_text(record.plan.contribution)
        note = f"The {gain_text(record)} on {samples}, divided among clients by {method}. Harmful clients are orange."
        pictures.append(
            RunPicture("contribution", lambda: contribution_picture(record), "Contribution of each client", note)
        )
    if record.confusion is not None:
        note = "Rows are true classes, columns are predicted classes. Colour grows with the root of the share."
        pictures.append(RunPicture("confusion", lambda: figures.confusion(record), "Confusion", note))
    pictures += _chart_pictures(record)
    if record.partition is not None:
        pictures.append(_partition_picture(record, record.partition))
    return pictures


def _have_figures(clients: Json) -> bool:
    """Return whether some client has the main figure, which need not be defined for each."""
    return any(value is not None for value in clients[clients.get("metric", "accuracy")])


def _chart_pictures(record: RunRecord) -> list[RunPicture]:
    """Return the pictures of what metrics chart."""
    from atoll.report.chart_pictures import PICTURES

    found = []
    for name, chart in (record.charts or {}).items():
        if name in PICTURES and chart:
            picture = PICTURES[name]
            found.append(RunPicture(name, partial(picture.draw, chart), picture.title, picture.note))
    return found


def _partition_picture(record: RunRecord, partition: Json) -> RunPicture:
    """Return the figure of the samples that each client holds of each class."""
    counts_CK = np.asarray(partition["counts"])
    num_shown, K = counts_CK.shape
    num_clients = partition.get("num_clients")
    total = num_clients if isinstance(num_clients, int) else num_shown
    sizes_C, held_C = counts_CK.sum(1), (counts_CK > 0).sum(1)
    note = (
        f"Of the clients shown, the median holds {np.median(sizes_C):,.0f} samples (from {sizes_C.min():,} to "
        f"{sizes_C.max():,}) of {np.median(held_C):.0f} classes (from {held_C.min()} to {held_C.max()})."
    )
    title = f"{record.plan.data.name}, dealt by {part_text(record.plan.partition)}"
    names = class_names(record, K)
    return RunPicture(
        name="partition",
        draw=lambda: figures.partition_picture(counts_CK, names, title, total),
        title="Partition of the data",
        note=note,
    )


def _measured(record: RunRecord) -> list[str]:
    """Return the figures of the test set that the table of rounds shows."""
    known = dict.fromkeys(name for row in record.rows for name in row.get("test") or {})
    return [name for name in known if name not in ("loss", "precision", "recall")]


def _last_rounds(record: RunRecord) -> str:
    """Return the last rounds as an HTML table, newest first, with the columns that have values."""
    main = main_figure([record])
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("round", "round", lambda v: f"{v:,.0f}"),
        ("updates", "clients", lambda v: f"{v:,.0f}"),
        *((title_of(name), f"test.{name}", partial(shown, name)) for name in _measured(record)),
        ("test loss", "test.loss", lambda v: f"{v:.4g}"),
        ("train loss", "train_loss", lambda v: f"{v:.4g}"),
        ("epsilon", "privacy.epsilon", lambda v: f"{v:.3f}"),
        (f"clients' {title_of(main)}", "clients_test.mean", partial(shown, main)),
        ("worst tenth", "clients_test.worst_decile", partial(shown, main)),
        ("clients' loss", "clients_test.loss", lambda v: f"{v:.4g}"),
        ("round time", "round_seconds", human_seconds),
        ("total time", "seconds", human_seconds),
        ("simulated time", "simulated_seconds", human_seconds),
        ("versions late", "staleness", lambda v: f"{v:.2g}"),
        ("lost in secure sums", "secagg.lost", lambda v: f"{v:,.0f}"),
        ("values cut", "secagg.cut", lambda v: f"{100 * v:.2g} %"),
        ("uplink so far", "bytes_up", human_bytes),
        *((f"{kind} so far", kind, lambda v: f"{v:,.0f}") for kind in lost_tasks(record)),
    ]
    rows = record.rows[-LAST_ROUNDS:]
    used = [column for column in columns if any(number(row, column[1]) is not None for row in rows)]
    cells = [
        [NONE if (value := number(row, key)) is None else show(value) for _, key, show in used]
        for row in reversed(rows)
    ]
    return html_table([title for title, _, _ in used], [[escape(cell) for cell in line] for line in cells])


def _time_text(started: object) -> str:
    """Return an ISO time in UTC for readers, or a dash if it is not one."""
    try:
        return datetime.fromisoformat(str(started)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return NONE
