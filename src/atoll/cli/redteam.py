"""`atoll redteam`: what somebody who sees what the server sees gets out of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings, slug, words


def redteam(
    plan: PlanArgument = None,
    settings: SetOption = None,
    probes: Annotated[str, typer.Option(help="Probes to try, with commas between; all of them unless given.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that the server watches.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="Time for everything together.")] = 240.0,
    recorded: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Attack what a site recorded of a run by atoll join --record, simulating nothing."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for redteam.html and redteam.json, by default runs/NAME-redteam; or a file that ends with "
            ".json, for the findings alone."
        ),
    ] = None,
) -> None:
    """Attack a plan from its server's seat and by its clients, check its defences, and write a page about it."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.redteam.run import as_text, red_team
    from atoll.report.figures import write_whole
    from atoll.report.redteam_page import redteam_page
    from atoll.simulation.recorded import watch_recorded

    found = red_team(
        chosen,
        probes=words(probes),
        rounds=rounds,
        seconds=seconds,
        progress=lambda text: typer.echo(text, err=True),
        recorded=None if recorded is None else lambda num: watch_recorded(recorded, chosen, elsewhere=num),
    )
    print(as_text(found))
    out = out or Path("runs") / f"{slug(chosen)}-redteam"
    alone = out.suffix == ".json"
    write_whole(out if alone else out / "redteam.json", (json.dumps(found.to_dict(), indent=1) + "\n").encode())
    if alone:
        print(f"findings {out}")
        return
    write_whole(out / "redteam.html", redteam_page(found).encode("utf-8", "replace"))
    print(f"findings {out / 'redteam.json'}\npage {out / 'redteam.html'}")
    print("the page shows samples of clients: treat it like the data")
