"""The page about federated and split learning side by side: one self-contained HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from atoll.report.figures import curves
from atoll.report.main_figure import title_of
from atoll.report.reading import read_run
from atoll.report.shell import html_table, image, shell
from atoll.report.ways import WaysTable, notes, table_rows


def ways_page(table: WaysTable, out: Path, plan_text: str) -> str:
    """Return the comparison as HTML text; its runs lie below `out`, and `plan_text` is the plan that they vary."""
    head, rows = table_rows(table)
    cells = [[escape(cell) for cell in row] for row in rows]
    said = "".join(f'<p class="note">{escape(text)}</p>' for text in notes(table))
    sections = [("Table", html_table(head, cells, text=1) + said)]
    records = [read_run(out / table.of(way)[0].directory) for way in table.ways if table.of(way)]
    if records:
        figure = title_of(table.metric)
        sections = [
            ("Bytes", image(curves(records, "bytes"), f"Test {figure} by bytes")),
            ("Rounds", image(curves(records), f"Test {figure} by round")),
            *sections,
        ]
    if table.problems:
        why = [[escape(run.way), str(run.seed), escape(run.why)] for run in table.problems]
        sections.append(("Without a result", html_table(["way", "seed", "why"], why, text=3)))
    runs = [[escape(run.way), str(run.seed), run.status, f"<code>{escape(run.directory)}</code>"] for run in table.runs]
    sections.append(("All runs", html_table(["way", "seed", "", "run directory"], runs, text=1)))
    sections.append(("Plan", f"<pre>{escape(plan_text)}</pre>"))
    body = "".join(f"<section><h2>{title}</h2>{inside}</section>" for title, inside in sections)
    what = "with its columns apart and in one place" if "parties" in table.cut else "as federated and as split learning"
    lead = f"One plan {what}, {len(table.seeds)} seed{'s' * (len(table.seeds) != 1)}."
    return shell(brand="Atoll compare", heading=table.title, lead=lead, body=body)
