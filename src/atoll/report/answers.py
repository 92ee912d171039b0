"""What a language model says before and after training, as a section of the report."""

from __future__ import annotations

from html import escape

from atoll.report.file_checks import Json
from atoll.report.main_figure import shown, title_of
from atoll.report.reading import NONE, number
from atoll.report.shell import html_table

WHEN = ("before", "after")


def answers_section(found: Json) -> str:
    """Return samples and figures of questions as HTML; the texts are whatever a model said, and are escaped."""
    asked = found.get("questions")
    parts = []
    if found["samples"]:
        rows = [[f"<q>{escape(each[key])}</q>" for key in ("prompt", *WHEN)] for each in found["samples"]]
        parts.append(html_table(["prompt", "before training", "after"], rows, text=3))
    if asked:
        names = [name for name in ("exact_match", "multiple_choice") if number(asked, f"after.{name}") is not None]
        rows = [[escape(title_of(name)), *(_share(asked, f"{when}.{name}", name) for when in WHEN)] for name in names]
        parts.append(html_table([f"of {asked['num']:,} questions", "before training", "after"], rows, text=1))
    note = "The likeliest token each time. A choice is the candidate with the highest sum of log likelihoods."
    return f'{"".join(parts)}<p class="note">{note}</p>'


def _share(asked: Json, key: str, name: str) -> str:
    value = number(asked, key)
    return NONE if value is None else escape(shown(name, value))
