"""The report: one self-contained HTML file about one run, or about several. Shapes: C clients, K classes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from atoll.core.errors import RunError
from atoll.core.parts import Part
from atoll.report import figures
from atoll.report.codecs import codec_picture, codec_table, codecs_of
from atoll.report.compare import comparison, table_of
from atoll.report.contribution_picture import contribution_picture, gain_text
from atoll.report.privacy_picture import spending_picture
from atoll.report.reading import (
    AXES,
    NONE,
    Against,
    RunRecord,
    class_names,
    contributions,
    count_text,
    dig,
    diverged,
    ended,
    failure,
    human_bytes,
    human_seconds,
    labels,
    lost_tasks,
    model_text,
    number,
    own_data,
    part_text,
    partition_text,
    read_run,
    rounds_to,
    series,
    share_text,
    statement_text,
    targets_of,
)
from atoll.report.shell import packaged, shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_ROUNDS = 10

MEASURES = {
    "test.accuracy": "Test accuracy",
    "test.f1": "Test F1 (macro)",
    "test.precision": "Test precision (macro)",
    "test.recall": "Test recall (macro)",
    "test.attack_success": "Attack success: other classes with the trigger, taken for the target",
    "models_test.worst_decile": "Clients' own models on the test set: the worst tenth",
    "clients_test.mean": "Clients: mean accuracy",
    "clients_test.worst_decile": "Clients: accuracy of the worst tenth",
}
LOSSES = {"test.loss": "test loss", "train_loss": "train loss"}


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write one HTML file about the runs: `DIR/report.html` for one run, `./report.html` for several."""
    if not run_dirs:
        raise RunError("no run was given: name at least one run directory, as in: atoll report DIR")
    records = [read_run(run) for run in run_dirs]
    if out is None:
        out = records[0].path if len(records) == 1 else Path()
    out = out / "report.html" if out.is_dir() else out
    return figures.write_whole(out, page(records).encode("utf-8", "replace"))


def export_png(run_dirs: Sequence[Path], out_dir: Path) -> list[Path]:
    """Write every figure of the runs as a PNG file into a directory, and say which."""
    if not run_dirs:
        raise RunError("no run was given: name at least one run directory, as in: atoll report DIR --png OUT")
    records = [read_run(run) for run in run_dirs]
    written = [
        figures.save_png(figures.curves(records, against), out_dir / f"curves-{against}.png")
        for against in _axes(records)
    ]
    if codecs_of(records):
        written.append(figures.save_png(codec_picture(records), out_dir / "codecs.png"))
    for record, slug in zip(records, _slugs(labels(records)), strict=True):
        prefix = f"{slug}-" if len(records) > 1 else ""
        for name, figure, _ in _pictures(record):
            written.append(figures.save_png(figure(), out_dir / f"{prefix}{name}.png"))
    return written


def page(records: Sequence[RunRecord]) -> str:
    """The report as HTML text."""
    names, one = labels(records), len(records) == 1
    several = ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
    top = (_warning(records[0]) + _cards(records[0])) if one else comparison(records, names) + _codecs(records)
    still = image(figures.curves(records), "Test accuracy and loss by round")
    body = [
        top,
        packaged("curves.html").replace("{{still}}", still),
        *(_run(record, name, index, one) for index, (record, name) in enumerate(zip(records, names, strict=True))),
        f'<script type="application/json" id="atoll-data">{_data(records, names)}</script>',
    ]
    return shell(
        "Atoll report",
        names[0] if one else f"{len(records)} runs compared",
        _lead(records[0]) if one else several,
        "\n".join(body),
        packaged("page.js"),
    )


def _codecs(records: Sequence[RunRecord]) -> str:
    """The section about codecs with its picture, if the runs differ in them."""
    table = codec_table(records)
    return table.replace("</section>", f"{image(codec_picture(records), 'Accuracy against bytes')}</section>")


def _data(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """What the script draws, as JSON that cannot end its own script element."""
    measures = {key: title for key, title in MEASURES.items() if any(series(record, key)[0] for record in records)}
    runs = [
        {
            "label": name,
            "x": {axis: [_rounded(number(row, key), axis) for row in record.rows] for axis, key in AXES.items()},
            "y": {key: [_rounded(number(row, key)) for row in record.rows] for key in [*measures, *LOSSES]},
        }
        for record, name in zip(records, names, strict=True)
    ]
    titles = [{"key": key, "title": title} for key, title in measures.items()]
    spoken = {key: key.split(".")[-1].replace("_", " ") for key in measures} | LOSSES
    text = json.dumps({"runs": runs, "measures": titles, "names": spoken}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _rounded(value: float | None, axis: str = "") -> float | None:
    if value is None or axis == "round":
        return None if value is None else int(value)
    return float(f"{value / 1e6 if axis == 'bytes' else value:.6g}")


# ---- one run


def _lead(record: RunRecord) -> str:
    """One sentence about what was run, and how it ended."""
    plan, info = record.plan, record.info
    clients = count_text(info.get("num_clients"))
    dealt = partition_text(record) if own_data(record) or plan.partition.name == "mixture" else plan.partition.name
    what = f"{plan.algorithm.name} on {plan.data.name}, {dealt}, {clients} clients, model {model_text(plan)}."
    rounds = record.rows[-1]["round"] if record.rows else 0
    if why := ended(record):
        return f"{what} Ended after {rounds:,} of {plan.rounds:,} rounds: {why}."
    return f"{what} Not finished: {rounds:,} of {plan.rounds:,} rounds are recorded; it is running or was killed."


def _warning(record: RunRecord) -> str:
    """What a reader must not miss."""
    said = []
    if bad := diverged(record):
        said.append(
            f"The training loss is not a finite number in {len(bad)} of {len(record.rows)} rounds, first in round "
            f"{bad[0]}: training diverged; a lower local.lr may help."
        )
    if advice := failure(record):
        said.append(f"The run ended early or without a usable model ({ended(record)}): {advice}.")
    if not record.rows:
        said.append("No round is recorded yet.")
    if warning := dig(record.info, "privacy.warning"):
        said.append(f"{warning}. This run was a test: its epsilon protects nobody.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in said)


def _cards(record: RunRecord) -> str:
    """The headline numbers, each with its unit."""
    xs, ys = series(record, "test.accuracy")
    last = record.rows[-1] if record.rows else {}
    seconds, up, down = (number(last, key) for key in ("seconds", "bytes_up", "bytes_down"))
    cards = []
    if xs:
        best = ys.index(max(ys))
        own = number(last, "models_test.num_clients")
        what = "test set" if own is None else f"test set, mean of {own:,.0f} clients' own models"
        final = "Final accuracy" if ended(record) else "Latest accuracy"
        cards.append(_card(final, f"{100 * ys[-1]:.2f} %", f"{what}, round {xs[-1]:,.0f}", main=True))
        cards.append(_card("Best accuracy", f"{100 * ys[best]:.2f} %", f"{what}, round {xs[best]:,.0f}", main=True))
    cards.append(_card("Rounds", f"{last.get('round', 0):,}", f"of {record.plan.rounds:,} planned"))
    if seconds is not None:
        pace = human_seconds(seconds / max(len(record.rows), 1))
        cards.append(_card("Wall time", human_seconds(seconds), f"{pace} a round"))
    for title, amount in (("Uplink", up), ("Downlink", down)):
        if amount is not None:
            cards.append(_card(title, human_bytes(amount), "all clients, all rounds"))
    if (epsilon := number(last, "privacy.epsilon")) is not None:
        price = last["privacy"]
        cards.append(
            _card("Epsilon spent", f"{epsilon:.2f}", f"delta {price['delta']:g}, by {price['unit']}", main=True)
        )
    updates = number(last, "clients")
    asked = f"{updates:,.0f} updates in the last round" if updates is not None else ""
    cards.append(_card("Clients", count_text(record.info.get("num_clients")), asked))
    params = dig(record.info, "model.num_params")
    which = "the largest of " if record.plan.models and len(record.plan.models) > 1 else ""
    cards.append(_card("Parameters", count_text(params), which + model_text(record.plan)))
    if lost := lost_tasks(record):
        total = sum(lost.values())
        cards.append(_card("Lost tasks", f"{total:,}", ", ".join(f"{n:,} {kind}" for kind, n in lost.items())))
    targets = [
        _card(f"To {share_text(target)} accuracy", f"{rounds:,.1f} rounds", "on the test set")
        for target in targets_of([record])
        if (rounds := rounds_to(record, target)) is not None
    ]
    rule = "Rounds to a target: best test accuracy so far, linear between evaluated rounds (McMahan et al. 2017)."
    note = f'<p class="note">{rule}</p>' if targets else ""
    return f'<dl class="cards">{"".join(cards + targets)}</dl>{note}'


def _card(title: str, value: str, small: str, main: bool = False) -> str:
    """A headline number; its unit is set smaller than the digits."""
    shown = re.sub(r"[^\W\d]+|%", lambda unit: f'<span class="unit">{unit[0]}</span>', escape(value))
    return (
        f'<div class="card{" main" * main}"><dt>{escape(title)}</dt><dd class="value">{shown}</dd>'
        f'<dd class="small">{escape(small)}</dd></div>'
    )


def _run(record: RunRecord, name: str, index: int, alone: bool) -> str:
    """Everything about one run; folded where there are several."""
    parts = [("What was run", _facts(record))]
    for _, figure, (title, note) in _pictures(record):
        kind = "square" if title == "Confusion" else ""
        parts.append((title, image(figure(), title, kind) + f'<p class="note">{escape(note)}</p>'))
    if record.rows:
        parts.append(("Last rounds", _last_rounds(record)))
    parts.append(("Plan", f"<pre>{escape(record.plan.to_toml())}</pre>"))
    if alone:
        return "".join(f"<section><h2>{title}</h2>{body}</section>" for title, body in parts)
    key = f'<span class="key" style="background:var(--c{index % len(figures.PALETTE)})"></span>'
    inside = "".join(f"<h3>{title}</h3>{body}" for title, body in parts)
    body = f'<p class="note">{escape(_lead(record))}</p>{_warning(record)}{_cards(record)}{inside}'
    return f'<details class="run"><summary>{key}{escape(name)}</summary>{body}</details>'


def _facts(record: RunRecord) -> str:
    plan, info = record.plan, record.info
    amount, what = (plan.local.steps, "step") if plan.local.steps else (plan.local.epochs or 1, "epoch")
    work = f"{amount:,} {what}{'s' * (amount != 1)}"
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
        ("Who is asked", f"{part_text(plan.sampler)}\n{part_text(plan.policy)}"),
        *([("Devices", part_text(plan.devices))] if plan.devices else []),
        ("Aggregation", f"{part_text(plan.aggregator)}{server}"),
        ("Uplink", ", ".join(map(part_text, plan.uplink)) or "no transform"),
        ("Downlink", ", ".join(map(part_text, plan.downlink)) or "no transform"),
    ]
    if plan.privacy is not None:
        stated = dig(info, "privacy")
        facts.append(("Privacy", f"{part_text(plan.privacy)}\n{statement_text(stated) if stated else ''}"))
    if plan.attack is not None:
        who = ", ".join(f"{key} {value}" for key, value in plan.attackers.to_dict().items() if value)
        facts.append(("Attack", f"{part_text(plan.attack)}\n{who}"))
    engine = dig(info, "engine")
    ran = (
        part_text(Part.of(engine))
        if isinstance(engine, dict) and engine.get("name")
        else str(engine or plan.engine.name)
    )
    facts += [
        ("Engine", ran),
        ("Seed", str(plan.seed)),
        ("Started", _when(info.get("started"))),
        ("Atoll", f"{info.get('atoll', NONE)}, plan {str(info.get('identity', NONE))[:12]}"),
    ]
    items = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in facts)
    return f'<dl class="facts">{items}</dl>'


def _pictures(record: RunRecord) -> list[tuple[str, Callable[[], Figure], tuple[str, str]]]:
    """The figures that a run has data for: a file name, how to draw it, a title and a caption."""
    found: list[tuple[str, Callable[[], Figure], tuple[str, str]]] = []
    if record.rows and number(record.rows[-1], "privacy.epsilon") is not None:
        note = "Epsilon is that of all rounds so far. The model, and its accuracy on the test set, are what it buys."
        found.append(("privacy", lambda: spending_picture(record), ("Privacy", note)))
    if record.clients is not None:
        held = record.plan.evaluation.holdout
        where = (
            f"the {share_text(held)} of its samples that it does not train on" if held else "its own training samples"
        )
        note = f"The worst tenth is orange. Each client is tested on {where}."
        found.append(("clients", lambda: figures.client_spread(record), ("Spread over clients", note)))
    if record.plan.contribution is not None and contributions(record):
        where = f"{count_text(record.plan.server.samples)} samples of the server's own"
        how = part_text(record.plan.contribution)
        note = f"The {gain_text(record)} on {where}, shared out by {how}. Who did harm is orange."
        found.append(("contribution", lambda: contribution_picture(record), ("Contribution of each client", note)))
    if record.confusion is not None:
        note = "Rows are true classes, columns what the model said. Colour grows with the root of the share."
        found.append(("confusion", lambda: figures.confusion(record), ("Confusion", note)))
    if record.partition is not None:
        counts_CK = np.asarray(record.partition["counts"])
        shown, K = counts_CK.shape
        total = record.partition.get("num_clients")
        total = total if isinstance(total, int) else shown
        sizes_C, held_C = counts_CK.sum(1), (counts_CK > 0).sum(1)
        note = (
            f"Of the clients shown, the median holds {np.median(sizes_C):,.0f} samples (from {sizes_C.min():,} to "
            f"{sizes_C.max():,}) of {np.median(held_C):.0f} classes (from {held_C.min()} to {held_C.max()})."
        )
        title = f"{record.plan.data.name}, dealt by {part_text(record.plan.partition)}"
        names = class_names(record, K)
        found.append((
            "partition",
            lambda: figures.partition_picture(counts_CK, names, title, total),
            ("Who holds what", note),
        ))  # fmt: skip
    return found


def image(figure: Figure, what: str, kind: str = "") -> str:
    """A figure inside the page, which loads nothing."""
    svg = base64.b64encode(figures.to_svg(figure).encode("utf-8", "replace")).decode()
    source = f"data:image/svg+xml;base64,{svg}"
    return f'<figure class="scroll {kind}"><img alt="{escape(what)}" src="{source}"></figure>'


def _last_rounds(record: RunRecord) -> str:
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("round", "round", lambda v: f"{v:,.0f}"),
        ("updates", "clients", lambda v: f"{v:,.0f}"),
        ("accuracy", "test.accuracy", lambda v: f"{100 * v:.2f} %"),
        ("F1", "test.f1", lambda v: f"{100 * v:.2f} %"),
        ("attack success", "test.attack_success", lambda v: f"{100 * v:.2f} %"),
        ("test loss", "test.loss", lambda v: f"{v:.4g}"),
        ("train loss", "train_loss", lambda v: f"{v:.4g}"),
        ("epsilon", "privacy.epsilon", lambda v: f"{v:.3f}"),
        ("clients' accuracy", "clients_test.mean", lambda v: f"{100 * v:.2f} %"),
        ("worst tenth", "clients_test.worst_decile", lambda v: f"{100 * v:.2f} %"),
        ("round time", "round_seconds", human_seconds),
        ("total time", "seconds", human_seconds),
        ("simulated time", "simulated_seconds", human_seconds),
        ("versions late", "staleness", lambda v: f"{v:.2g}"),
        ("lost under masks", "secagg.lost", lambda v: f"{v:,.0f}"),
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
    return table_of([title for title, _, _ in used], [[escape(cell) for cell in line] for line in cells])


# ---- small things


def _when(started: object) -> str:
    try:
        return datetime.fromisoformat(str(started)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return NONE


def _axes(records: Sequence[RunRecord]) -> list[Against]:
    """The axes along which some run moves; nothing is sent in some simulations."""
    axes: tuple[Against, ...] = get_args(Against)
    moves = [axis for axis in axes if any(a < b for r in records for a, b in pairwise(series(r, "round", axis)[0]))]
    return moves or ["round"]


def _slugs(names: Sequence[str]) -> list[str]:
    """File names for runs: plain letters, none twice."""
    slugs: list[str] = []
    for index, name in enumerate(names, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or f"run-{index}"
        slugs.append(f"{slug}-{index}" if slug in slugs else slug)
    return slugs
