"""`atoll compare`: one plan as federated and as split learning."""

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
)
from atoll.core.errors import TrainingError


def compare(
    plan: PlanArgument = None,
    settings: SetOption = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes a second of each client's link; by default the plan's, or 1.25e6.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Seconds of a round trip; by default the plan's, or 0.02.")
    ] = None,
    seeds: SeedsOption = "1",
    workers: WorkersOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default runs/NAME-compare.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare a plan as federated and as split learning. Ctrl-C keeps everything; the same command continues."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.compare import compare_ways
    from atoll.report.ways import problems_text, table_text

    directory = out or Path("runs") / f"{slug(chosen)}-compare"
    with continued_in(directory):
        table = compare_ways(
            chosen,
            out=directory,
            seeds=read_seeds(seeds),
            bandwidth=bandwidth,
            latency=latency,
            workers=workers,
            progress=not quiet,
        )
    print(table_text(table))
    if table.problems:
        print(problems_text(table.problems))
    print(f"table {directory / 'compare.json'}\npage {directory / 'compare.html'}")
    if any(run.status == "failed" for run in table.runs):
        raise typer.Exit(TrainingError.exit_code)
