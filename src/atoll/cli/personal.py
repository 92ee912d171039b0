"""`atoll personal`: personal methods beside training alone and one model for all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings, slug, whole_numbers, words
from atoll.core.errors import TrainingError


def personal(
    plan: PlanArgument = None,
    settings: SetOption = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Algorithms, e.g. fedper,ditto:lam=0.5; by default all that give clients own models."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Number of seeds, from the plan's on; or the seeds themselves, e.g. 0,7.")
    ] = "3",
    workers: Annotated[int | None, typer.Option(help="Number of runs at once; by default one for each core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default runs/NAME-personal.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; the result only.")] = False,
) -> None:
    """Compare personal methods with training alone. Ctrl-C keeps everything; the same command continues."""
    chosen = read_plan(plan, read_settings(settings))
    numbers = whole_numbers("--seeds", seeds)
    from atoll.personal.compare import compare_personal
    from atoll.report.personal import problems_text, table_text

    directory = out or Path("runs") / f"{slug(chosen)}-personal"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        table = compare_personal(
            chosen,
            out=directory,
            methods=words(methods) if methods is not None else None,
            seeds=numbers if "," in seeds else numbers[0] if numbers else [],
            workers=workers,
            progress=not quiet,
        )
    except KeyboardInterrupt:
        print(f"stopped; everything is kept in {directory}: go on with the same command")
        raise typer.Exit(130) from None
    print(table_text(table))
    if table.problems:
        print(problems_text(table))
    print(f"table {directory / 'personal.json'}\npage {directory / 'personal.html'}")
    if any(run.status == "failed" for run in table.runs):
        raise typer.Exit(TrainingError.exit_code)
