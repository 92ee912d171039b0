"""`atoll plan`: whether a plan would run, by the rules on what goes together."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings
from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.core.plan import Plan
    from atoll.split.columns import VerticalParties

plan_app = typer.Typer(help="Plans: check them, and see what will travel, before they run.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@plan_app.command()
def travels(plan: PlanArgument = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """List what of a plan's model travels and what clients keep: names, shapes, parameters and bytes."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.commit.travels import BOTH, DOWN, FROZEN, KEPT, UP
    from atoll.commit.travels import travels as travels_of
    from atoll.train.build import build_job

    if chosen.split is not None:
        return _travels_over_cut(chosen, as_json)
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


def _travels_over_cut(plan: Plan, as_json: bool) -> None:
    """List what crosses the cut of a plan, where the model could be cut, and what that would cost."""
    from atoll.split.cut import places
    from atoll.split.rehearsal import rehearse_split
    from atoll.split.vertical import rehearse_vertical
    from atoll.train.build import build_job

    job = build_job(plan)
    if plan.split is not None and plan.split.parties:
        return _travels_of_parties(rehearse_vertical(plan, job), as_json)
    cut, found = rehearse_split(plan, job).cut, places(job)
    if as_json:
        named = [{"name": place.name, "shape": place.shape, "width": place.width} for place in found]
        print(json.dumps({"cut": cut.describe(), "places": named}, indent=1))
        return
    table = [("cut after", "shape", "values a sample", "bytes an epoch of a client")]
    size = 2 * job.spec.dtype.itemsize * int(job.federation.partition.sizes().mean())
    table += [(p.name, "x".join(map(str, p.shape)), f"{p.width:,}", f"{size * p.width:,}") for p in found]
    width = [max(len(row[column]) for row in table) for column in range(4)]
    for name, shape, num, num_bytes in table:
        print(f"{name:{width[0]}}  {shape:{width[1]}}  {num:>{width[2]}}  {num_bytes:>{width[3]}}")
    labels = "with the labels" if cut.tail is None else f"and back before '{cut.tail}'; labels stay with clients"
    print(f"cut after '{cut.after}': activations up {labels}, gradients down; {cut.width:,} values a sample each way")
    print(f"a client has {cut.client.num_params:,} parameters, the server {cut.server.num_params:,}")
    federated = 2 * job.spec.num_params * job.spec.dtype.itemsize
    print(
        f"a client and epoch: {cut.cost(int(job.federation.partition.sizes().mean()), 1).epoch:,} bytes over the cut; "
        f"a client and round: {2 * cut.client.num_bytes:,} bytes of its layers, federated learning {federated:,} bytes"
    )
    print(f"with fewer than {cut.break_even:,.0f} samples an epoch over the cut takes less than federated learning")


@plan_app.command()
def cost(plan: PlanArgument = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """Predict the seconds, memory and bytes of a round on this machine, from rounds of two small cohorts."""
    chosen = read_plan(plan, read_settings(settings))
    from atoll.report.reading import human_bytes
    from atoll.simulation.cost import round_cost

    if not as_json:
        print("measuring rounds of small cohorts ...", file=sys.stderr)
    found = round_cost(chosen)
    if as_json:
        print(json.dumps(found._asdict(), indent=1))
        return
    where = f"{found.num_workers} workers" if found.num_workers else "this process"
    how = f"{found.stack} trained as one" if found.stack else "each trained alone"
    print(f"{found.num_clients:,} clients a round in {where}, {how}")
    print(f"{found.seconds:.3g} s a round: {found.once:.3g} s once, and {found.group:.3g} s for each group of a worker")
    memory = f"{human_bytes(found.memory)} of memory"
    if found.num_workers:
        memory += f", and {human_bytes(found.worker_memory)} in each worker, most of which they share"
    print(memory)
    print(f"{human_bytes(found.bytes_down)} down and {human_bytes(found.bytes_up)} up a round, packed")
    print("without evaluation")


def _travels_of_parties(parties: VerticalParties, as_json: bool) -> None:
    """List which columns parties hold, what each has of the model, and what crosses their cuts."""
    said = parties.describe()
    if as_json:
        print(json.dumps({"cut": said}, indent=1))
        return
    table = [("party", "columns", "values a row", "parameters", "bytes an epoch")]
    for party in said["parties"]:
        name = party["name"] + (", labels" if party["name"] == said["labels"] else "")
        numbers = (party["columns"], party["width"], party["params"], party["sample_bytes"] * said["rows"])
        table.append((name, *(f"{number:,}" for number in numbers)))
    width = [max(len(row[column]) for row in table) for column in range(5)]
    for name, *cells in table:
        print(
            "  ".join([name.ljust(width[0]), *(cell.rjust(size) for cell, size in zip(cells, width[1:], strict=True))])
        )
    labels = "go to the server" if said["tail"] is None else f"stay there, with the layers from '{said['tail']}' on"
    print(f"{said['rows']:,} rows; labels of {said['labels']} {labels}")
    print(f"the server has {said['server_params']:,} parameters")


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
