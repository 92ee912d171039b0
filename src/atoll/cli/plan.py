"""`atoll plan`: whether a plan would run, by the rules on what goes together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings
from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.core.plan import Plan

plan_app = typer.Typer(help="Plans: check them, and see what will travel, before they run.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@plan_app.command()
def travels(plan: PlanArgument = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """List what of a plan's model travels and what clients keep: names, shapes, parameters and bytes."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.commit.travels import BOTH, DOWN, FROZEN, KEPT, UP
    from atoll.commit.travels import travels as travels_of
    from atoll.train.build import build_job

    found = travels_of(build_job(chosen))
    if as_json:
        rows = [each._asdict() for each in found.values]
        print(json.dumps({"values": rows, "bytes_down": found.bytes_down, "bytes_up": found.bytes_up}, indent=1))
        return
    table = [("name", "shape", "values", "bytes", "goes")]
    for each in found.values:
        shape = "x".join(map(str, each.shape)) or "1"
        table.append((each.name, shape, f"{each.num_values:,}", f"{each.num_bytes:,}", each.goes))
    width = [max(len(row[column]) for row in table) for column in range(5)]
    for name, shape, num, size, goes in table:
        print(f"{name:{width[0]}}  {shape:{width[1]}}  {num:>{width[2]}}  {size:>{width[3]}}  {goes}")
    both, down, up, kept, frozen = (f"{found.total(goes):,}" for goes in (BOTH, DOWN, UP, KEPT, FROZEN))
    print(f"{both} values travel both ways, {down} more down and {up} more up; a client keeps {kept}")
    if found.total(FROZEN):
        print(f"{frozen} values are never trained")
    sent = "what masks make of it" if found.bytes_up is None else f"{found.bytes_up:,} bytes"
    print(f"a client and round: {found.bytes_down:,} bytes down and {sent} up, packed")


@plan_app.command()
def check(
    plan: PlanArgument = None,
    settings: SetOption = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, help="As a server of so many clients builds it, over a network; as a simulation unless given."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build a plan without training, and list the rules that apply to it; what is refused ends with code 2."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.checks.rule import general
    from atoll.checks.table import rules

    error = _refusal(chosen, clients)
    rule, table = getattr(error, "rule", ""), list(rules(network=clients is not None))
    if as_json:
        rows = [
            {
                "name": each.name,
                "parts": each.parts,
                "reason": general(each.reason),
                "way_out": general(each.way_out),
                "applies": each.applies_to(chosen),
            }
            for each in table
        ]
        refused = {"rule": rule or None, "error": str(error)} if error else None
        print(json.dumps({"passed": error is None, "refused": refused, "rules": rows}, indent=1))
        raise typer.Exit(0 if error is None else error.exit_code)
    if error is not None:
        raise type(error)(f"{error} (rule {rule})") if rule else error
    applied = [each for each in table if each.applies_to(chosen)]
    width = max(len(each.name) for each in applied)
    for each in applied:
        print(f"passed  {each.name:{width}}  {general(each.reason)}")
    print(f"{len(applied)} rules apply and are kept; {len(table) - len(applied)} are about what the plan does not set")


def _refusal(plan: Plan, clients: int | None) -> AtollError | None:
    """Build the plan as a simulation or a server does, and return what it is refused for."""
    try:
        if clients is None:
            from atoll.simulation.dry_run import dry_run

            dry_run(plan)
        else:
            from atoll.network.server.parts import dry_run_for

            dry_run_for(plan, clients)
    except AtollError as error:
        return error
    return None
