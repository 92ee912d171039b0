"""The page about personal methods: one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from atoll.report.main_figure import title_of
from atoll.report.personal import (
    ALONE,
    COLUMNS,
    GLOBAL,
    PersonalTable,
    notes,
    problem_rows,
    table_rows,
    unequal,
)
from atoll.report.personal_picture import personal_picture
from atoll.report.shell import html_table, image, shell

DOTS = "A dot is a client with one seed. Those that gain the same lie beside each other."


def personal_page(table: PersonalTable, plan_text: str) -> str:
    """Return the table as HTML text; `plan_text` is the plan that all runs share."""
    sections = [f"<section><h2>{title}</h2>{inside}</section>" for title, inside in _sections(table, plan_text)]
    warning = _warning(table)
    return shell(brand="Atoll personal", heading=table.title, lead=_lead(table), body=warning + "".join(sections))


def _lead(table: PersonalTable) -> str:
    """Return a sentence about what is compared."""
    others = [method for method in table.methods if method not in (ALONE, GLOBAL)]
    ran = sum(table.row(method) is not None for method in others)
    seeds = f"{len(table.seeds)} seed{'s' * (len(table.seeds) != 1)}"
    return (
        f"{ran} of {len(others)} personal methods beside training alone ({ALONE}) and one model for all ({GLOBAL}), on "
        f"the samples that each client holds out; {table.rounds} rounds, {seeds}."
    )


def _warning(table: PersonalTable) -> str:
    """Return what the reader must not overlook."""
    texts = notes(table)[-1:] if table.protection else []
    texts += [f"{', '.join(unequal(table))}: more local steps than training alone."] if unequal(table) else []
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def _sections(table: PersonalTable, plan_text: str) -> list[tuple[str, str]]:
    """Return title and HTML of each section."""
    sections = []
    figure = title_of(table.metric)
    if table.ranked():
        picture = image(personal_picture(table), f"{figure} of methods, and gains of clients over training alone")
        said = "".join(f'<p class="note">{escape(text)}</p>' for text in notes(table))
        head, rows = table_rows(table)
        cells = html_table(head, _marked(table, rows), text=1)
        meanings = "".join(
            f"<dt>{escape(title.format(figure=figure))}</dt><dd>{escape(meaning.format(figure=figure))}</dd>"
            for title, meaning in COLUMNS.values()
        )
        sections += [
            ("Clients' own models", picture + f'<p class="note">{escape(DOTS)}</p>'),
            ("Table", cells + said),
            ("Columns", f'<dl class="facts">{meanings}</dl>'),
        ]
    if table.problems:
        problems = [[escape(cell.strip()) for cell in row] for row in problem_rows(table)]
        sections.append(("Without a result", html_table(["", "method", "seeds", "why"], problems, text=4)))
    runs = [
        [
            *map(escape, (run.method, str(run.seed), run.status, str(run.rounds))),
            f"<code>{escape(run.directory)}</code>",
        ]
        for run in table.runs
    ]
    titles = ["method", "seed", "", "rounds", "run directory"]
    sections.append(("All runs", f"<details><summary>Show</summary>{html_table(titles, runs, text=1)}</details>"))
    return [*sections, ("Plan", f"<pre>{escape(plan_text)}</pre>")]


def _marked(table: PersonalTable, rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows of cells as HTML, with the best figures marked."""
    cells = [[escape(cell) for cell in row] for row in rows]
    methods = [table.row(method) for method in table.ranked()]
    for place, name in enumerate(COLUMNS, 1):
        if name not in ("mean", "gain", "worst", "better"):
            continue
        sign = 1 if table.larger_is_better or name in ("gain", "better") else -1
        values = [math.nan if row is None else sign * getattr(row, name).mean for row in methods]
        best = max((value for value in values if not math.isnan(value)), default=math.nan)
        for row, value in zip(cells, values, strict=True):
            row[place] = f'<span class="best">{row[place]}</span>' if value == best else row[place]
    return cells
