"""`atoll personal`: personal methods beside training alone and one model for all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import (
    PlanArgument,
    QuietOption,
    SeedsOption,
    SetOption,
    WorkersOption,
    continued_in,
    read_plan,
    read_seeds,
    read_settings,
    slug,
    words,
)
from atoll.core.errors import TrainingError


def personal(
    plan: PlanArgument = None,
    settings: SetOption = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Algorithms, e.g. fedper,ditto:lam=0.5; by default all that give clients own models."),
    ] = None,
    seeds: SeedsOption = "3",
    workers: WorkersOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default runs/NAME-personal.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare personal methods with training alone. Ctrl-C keeps everything; the same command continues."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.personal.compare import compare_personal
    from atoll.report.personal import problems_text, table_text

    directory = out or Path("runs") / f"{slug(chosen)}-personal"
    with continued_in(directory):
        table = compare_personal(
            chosen,
            out=directory,
            methods=words(methods) if methods is not None else None,
            seeds=read_seeds(seeds),
            workers=workers,
            progress=not quiet,
        )
    print(table_text(table))
    if table.problems:
        print(problems_text(table))
    print(f"table {directory / 'personal.json'}\npage {directory / 'personal.html'}")
    if any(run.status == "failed" for run in table.runs):
        raise typer.Exit(TrainingError.exit_code)
