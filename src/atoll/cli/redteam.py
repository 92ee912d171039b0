"""`atoll redteam`: what somebody who sees what the server sees gets out of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings


def redteam(
    plan: PlanArgument = None,
    settings: SetOption = None,
    probes: Annotated[str, typer.Option(help="Probes to try, with commas between; all of them unless given.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that the server watches.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="Time for all probes together.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Write the findings to this JSON file too.")] = None,
) -> None:
    """Attack a plan's privacy from the seat of its server: reconstruct samples, labels and words, tell members."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.redteam.run import as_text, red_team

    names = tuple(name.strip() for name in probes.split(",") if name.strip())
    found = red_team(
        chosen, probes=names, rounds=rounds, seconds=seconds, progress=lambda text: typer.echo(f"  {text}", err=True)
    )
    print(as_text(found))
    if out is not None:
        out.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        print(f"findings {out}")
