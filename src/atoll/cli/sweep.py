"""`atoll sweep`: a plan with many settings and seeds, side by side."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.plans import (
    PlanArgument,
    QuietOption,
    RayOption,
    SeedsOption,
    SetOption,
    WorkersOption,
    continued_in,
    read_plan,
    read_seeds,
    read_settings,
    slug,
)
from atoll.core.errors import PlanError, TrainingError
from atoll.core.toml_text import read_toml, split_values


def sweep(
    plan: PlanArgument = None,
    settings: SetOption = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="A key and its values, e.g. local.lr=0.01,0.1. May be repeated."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="Instead of a grid: log:0.001:1, float:0:1, int:1:20 or choice:a,b; needs Optuna. May be repeated.",
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Number of combinations that a search tries.")] = None,
    seeds: SeedsOption = "3",
    workers: WorkersOption = None,
    ray: RayOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default runs/NAME-sweep.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Run a plan with all combinations of settings. Ctrl-C keeps everything; the same command continues."""
    chosen = read_plan(plan, read_settings(settings))
    values = {key: [read_toml(value) for value in split_values(text)] for key, text in _pairs("--grid", grid).items()}
    ranges: dict[str, Any] | None = _pairs("--search", search) if search else None
    from atoll.report.sweep import table_text
    from atoll.sweeps.run import sweep as run_sweep

    directory = out or Path("runs") / f"{slug(chosen)}-sweep"
    with continued_in(directory):
        table = run_sweep(
            chosen,
            out=directory,
            grid=values if values or ranges is None else None,
            search=ranges,
            trials=trials,
            seeds=read_seeds(seeds),
            workers=workers,
            ray=ray,
            progress=not quiet,
        )
    print(table_text(table))
    print(f"table {directory / 'sweep.csv'}\npage {directory / 'sweep.html'}")
    if table.best is None:
        raise TrainingError("no combination has a result: the table says why; correct the plan or the values")
    print(f"best plan {directory / 'best.toml'}: atoll run {shlex.quote(str(directory / 'best.toml'))}")


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Split KEY=VALUE, refusing a key that is named twice."""
    pairs: dict[str, str] = {}
    for text in texts or []:
        key, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals or not key:
            example = "local.lr=0.01,0.1" if option == "--grid" else "local.lr=log:0.001:1"
            raise PlanError(f"{option} must be KEY=VALUE, e.g. {option} {example}, got '{text}'")
        if key in pairs:
            raise PlanError(f"{option} names {key} twice: put all of its values into one {option}")
        pairs[key] = value
    return pairs
