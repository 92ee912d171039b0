"""The page about attacks against defences: one self-contained HTML file."""

from __future__ import annotations

from html import escape

from atoll.report.matrix import Matrix, percent, worst_rows
from atoll.report.matrix_picture import matrix_picture, worst_picture
from atoll.report.shell import html_table, image, shell


def matrix_page(matrix: Matrix, plan_text: str) -> str:
    """Return the matrix as HTML text; `plan_text` is the plan that all cells share."""
    sections = [f"<section><h2>{title}</h2>{inside}</section>" for title, inside in _sections(matrix, plan_text)]
    return shell(brand="Atoll matrix", heading=matrix.title, lead=_lead(matrix), body="".join(sections))


def _lead(matrix: Matrix) -> str:
    """Return a sentence about the size of the matrix and its results."""
    seeds = f"{len(matrix.seeds)} seed{'s' * (len(matrix.seeds) != 1)}"
    done = sum(outcome.status == "done" for outcome in matrix.outcomes)
    return (
        f"{len(matrix.attacks)} attacks against {len(matrix.defences)} defences with "
        f"{', '.join(map(str, matrix.f))} bad clients, {seeds}: {done} of {len(matrix.outcomes)} cells have a result."
    )


def _sections(matrix: Matrix, plan_text: str) -> list[tuple[str, str]]:
    """Return title and HTML of each section."""
    star = "A star: some seeds, or attacks, have no result. " if matrix.problems else ""
    note = f"{star}Numbers are means over the seeds, after the last round."
    head, rows = worst_rows(matrix)
    worst = html_table(head, [[escape(cell) for cell in row] for row in rows], text=1)
    sections = [
        ("Worst case", image(worst_picture(matrix), "Accuracy under the worst attack") + worst),
        ("Accuracy", image(matrix_picture(matrix), "Accuracy by attack and defence") + _note(note)),
    ]
    if matrix.targeted:
        definition = (
            "The share of test samples of other classes that the model puts into the target class with the trigger on."
        )
        picture = image(matrix_picture(matrix, "attack_success"), "Attack success by attack and defence")
        sections.append(("Attack success", picture + _note(definition)))
    if matrix.problems:
        problems = [
            [escape(str(value)) for value in (cell.attack, cell.defence, cell.f, cell.seed, cell.status, cell.why)]
            for cell in matrix.problems
        ]
        titles = ["attack", "defence", "f", "seed", "", "why"]
        sections.append(("Cells without a result", html_table(titles, problems, text=6)))
    cells = [
        [escape(str(value)) for value in (cell.attack, cell.defence, cell.f, cell.seed, percent(cell.accuracy))]
        + [escape(percent(cell.attack_success)), f"<code>{escape(cell.directory)}</code>"]
        for cell in matrix.outcomes
    ]
    titles = ["attack", "defence", "f", "seed", "accuracy", "attack success", "run directory"]
    sections.append(("All cells", f"<details><summary>Show</summary>{html_table(titles, cells, text=2)}</details>"))
    return [*sections, ("Plan", f"<pre>{escape(plan_text)}</pre>")]


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
