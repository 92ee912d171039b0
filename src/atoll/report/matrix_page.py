"""The page about attacks against defences: one self-contained HTML file."""

from __future__ import annotations

from html import escape

from atoll.report.compare import table_of
from atoll.report.html import image
from atoll.report.matrix import Matrix, percent, worst_rows
from atoll.report.matrix_picture import matrix_picture, worst_picture
from atoll.report.shell import shell


def matrix_page(matrix: Matrix, plan_text: str) -> str:
    """The matrix as HTML text; `plan_text` is the plan that all cells share."""
    sections = [f"<section><h2>{title}</h2>{inside}</section>" for title, inside in _sections(matrix, plan_text)]
    return shell("Atoll matrix", matrix.title, _lead(matrix), "".join(sections))


def _lead(matrix: Matrix) -> str:
    seeds = f"{len(matrix.seeds)} seed{'s' * (len(matrix.seeds) != 1)}"
    done = sum(each.status == "done" for each in matrix.outcomes)
    return (
        f"{len(matrix.attacks)} attacks against {len(matrix.defences)} defences with "
        f"{', '.join(map(str, matrix.f))} bad clients, {seeds}: {done} of {len(matrix.outcomes)} cells have a result."
    )


def _sections(matrix: Matrix, plan_text: str) -> list[tuple[str, str]]:
    star = "A star: some seeds, or attacks, gave no number. " if matrix.problems else ""
    note = f"{star}Numbers are means over the seeds, after the last round."
    head, rows = worst_rows(matrix)
    worst = table_of(head, [[escape(cell) for cell in row] for row in rows], text=1)
    found = [
        ("Worst case", image(worst_picture(matrix), "Accuracy under the worst attack") + worst),
        ("Accuracy", image(matrix_picture(matrix), "Accuracy by attack and defence") + _note(note)),
    ]
    if matrix.targeted:
        what = (
            "The share of test samples of other classes that the model puts into the target class with the trigger on."
        )
        picture = image(matrix_picture(matrix, "attack_success"), "Attack success by attack and defence")
        found.append(("Attack success", picture + _note(what)))
    if matrix.problems:
        told = [
            [escape(str(value)) for value in (each.attack, each.defence, each.f, each.seed, each.status, each.why)]
            for each in matrix.problems
        ]
        found.append(("Cells without a number", table_of(["attack", "defence", "f", "seed", "", "why"], told, text=6)))
    cells = [
        [escape(str(value)) for value in (each.attack, each.defence, each.f, each.seed, percent(each.accuracy))]
        + [escape(percent(each.attack_success)), f"<code>{escape(each.directory)}</code>"]
        for each in matrix.outcomes
    ]
    titles = ["attack", "defence", "f", "seed", "accuracy", "attack success", "run directory"]
    found.append(("All cells", f"<details><summary>Show</summary>{table_of(titles, cells, text=2)}</details>"))
    return [*found, ("Plan", f"<pre>{escape(plan_text)}</pre>")]


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
