"""The page about a sweep: one self-contained HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from atoll.report.main_figure import title_of
from atoll.report.shell import html_table, image, shell
from atoll.report.spread import figure_text
from atoll.report.sweep import SAMPLES, SweepTable, chosen_text, label, notes, table_rows, value_text
from atoll.report.sweep_picture import curves_picture, settings_picture


def sweep_page(table: SweepTable, out: Path, plan_text: str) -> str:
    """Return the sweep as HTML text; its runs lie below `out`, and `plan_text` is the plan that it varies."""
    sections = [f"<section><h2>{title}</h2>{inside}</section>" for title, inside in _sections(table, out, plan_text)]
    warning = _warning(table)
    return shell(brand="Atoll sweep", heading=table.title, lead=_lead(table), body=warning + "".join(sections))


def _lead(table: SweepTable) -> str:
    """Return a sentence about the size of the sweep and its best."""
    seeds = f"{len(table.seeds)} seed{'s' * (len(table.seeds) != 1)}"
    size = f"{len(table.combinations)} combinations of {', '.join(table.keys)}, {seeds}"
    if table.best is None:
        return f"{size}: none has a result."
    return f"{size}. The best, chosen on {SAMPLES[table.chosen_on]}: {label(table.best.settings)}."


def _warning(table: SweepTable) -> str:
    """Return what the reader must not overlook."""
    texts = [chosen_text(table)] if table.chosen_on == "test" else []
    texts += notes(table)[-1:] if table.protection else []
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def _sections(table: SweepTable, out: Path, plan_text: str) -> list[tuple[str, str]]:
    """Return title and HTML of each section."""
    sections, figure = [], title_of(table.metric)
    if table.best is not None:
        best = [[escape(key), f"<code>{escape(value_text(v))}</code>"] for key, v in table.best.settings.items()]
        best.append([f"{figure} on {SAMPLES[table.chosen_on]}", escape(figure_text(table.metric, table.best.figure))])
        if table.chosen_on != "test" and table.best.test is not None:
            best.append([f"{figure} on the test set", escape(figure_text(table.metric, table.best.test))])
        how = '<p class="note">best.toml beside this page is its plan: <code>atoll run best.toml</code> runs it.</p>'
        sections += [
            ("Best", html_table(["setting", ""], best, text=2) + how),
            ("Settings", image(settings_picture(table), f"{figure} by settings")),
            ("Curves", image(curves_picture(table, out), f"Test {figure} by round")),
        ]
    head, rows = table_rows(table)
    if table.problems:  # reasons are too long for a cell: a table of their own follows
        head, rows = head[:-1], [row[:-1] for row in rows]
    cells = [[escape(cell) for cell in row] for row in rows]
    if table.best is not None:
        place = len(table.keys)
        cells[0][place] = f'<span class="best">{cells[0][place]}</span>'
    said = "".join(f'<p class="note">{escape(text)}</p>' for text in notes(table))
    sections.append(("Table", html_table(head, cells, text=len(table.keys)) + said))
    places = [place for place in range(len(table.combinations)) if table.why(place)]
    if places:
        why = [[escape(label(table.combinations[place])), escape(table.why(place))] for place in places]
        sections.append(("Without a result", html_table(["settings", "why"], why, text=2)))
    runs = [
        [
            *map(escape, (label(table.combinations[run.combination]), str(run.seed), run.status, str(run.rounds))),
            f"<code>{escape(run.directory)}</code>",
        ]
        for run in table.runs
    ]
    titles = ["settings", "seed", "", "rounds", "run directory"]
    sections.append(("All runs", f"<details><summary>Show</summary>{html_table(titles, runs, text=1)}</details>"))
    return [*sections, ("Plan", f"<pre>{escape(plan_text)}</pre>")]
