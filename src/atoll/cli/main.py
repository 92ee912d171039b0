"""The command line: `atoll run`, `matrix`, `personal`, `sweep`, `report`, `data` and others, and a federation's."""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.align import align
from atoll.cli.compare import compare
from atoll.cli.data import data_app
from atoll.cli.export import answers, export
from atoll.cli.join import enrol, join
from atoll.cli.ledger import ledger_app
from atoll.cli.operator import certs, clients_app, runs_app, status, stop
from atoll.cli.personal import personal
from atoll.cli.plan import plan_app
from atoll.cli.plans import (
    PlanArgument,
    QuietOption,
    RayOption,
    SetOption,
    WorkersOption,
    continued_in,
    read_plan,
    read_settings,
    slug,
    whole_numbers,
    words,
)
from atoll.cli.privacy import privacy_app
from atoll.cli.redteam import redteam
from atoll.cli.serve import serve
from atoll.cli.sweep import sweep
from atoll.cli.ui import access_app, page_beside, ui
from atoll.core.errors import AtollError, PlanError, RunError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.core.events import Reader
    from atoll.core.plan import Plan

EXAMPLE = """
Federated learning: the data stay, the model moves.

\b
Try it, with nothing to download:
    atoll run --set algorithm=fedprox --rounds 30

\b
Or write a plan (plan.toml), run it, and look at the report:
    atoll run plan.toml --set local.lr=0.05 --out runs/mine
    atoll report runs/mine
"""


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"atoll {version('atoll')}")
        raise typer.Exit


app = typer.Typer(
    help=EXAMPLE, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.add_typer(privacy_app, name="privacy")
app.add_typer(ledger_app, name="ledger")
app.add_typer(clients_app, name="clients")
app.add_typer(runs_app, name="runs")
app.add_typer(access_app, name="access")


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    plan: PlanArgument = None,
    settings: SetOption = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, inline, vectorised, processes or ray.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes; by default one for each core.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Maximum number of bytes sent in all, up and down, e.g. 50MB.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the run; by default runs/NAME-1 and so on.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in this directory.")] = None,
    track: Annotated[
        list[str] | None, typer.Option(metavar="TOOL", help="tensorboard, mlflow or wandb. May be repeated.")
    ] = None,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve a live page on this machine until Ctrl-C, and print its link.")
    ] = False,
    ui_port: Annotated[int, typer.Option(help="Port of the live page; 0 for any.")] = 0,
    quiet: QuietOption = False,
) -> None:
    """Run a plan; without one, FedAvg on digits. Ctrl-C stops and keeps everything."""
    changes: dict[str, object] = read_settings(settings)
    changes |= {key: value for key, value in {"rounds": rounds, "seed": seed}.items() if value is not None}
    if engine is not None and (resume is not None or read_plan(plan, changes).engine.name != engine):
        changes["engine"] = engine  # an engine that the plan has keeps its options
    if workers is not None:
        changes["engine.workers"] = workers
    if budget is not None:
        changes["stop.bytes"] = _num_bytes(budget)
    if resume is not None:
        if out is not None:
            raise RunError("--resume names the directory: leave out --out")
        if any(key == "engine" or (key.startswith("engine.") and key != "engine.workers") for key in changes):
            raise RunError("a run keeps the engine that it began with: leave it out (--workers may change)")
        chosen = _resumed(resume, plan, changes)
    else:
        chosen = read_plan(plan, changes)
    from atoll.core.parts import find
    from atoll.report.record import next_free  # needs torch: refuse a plan that cannot be read before that import

    directory = resume or out or next_free(Path("runs"), slug(chosen))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as after Ctrl-C
    watch: list[Reader] = [find("trackers", name)(directory) for name in track or []]
    with page_beside(directory, ui_port, among_others=out is None and resume is None) if ui else nullcontext() as page:
        watch += [page] if page is not None else []
        _run_and_print(chosen, directory, resume=resume is not None, quiet=quiet, watch=watch)


def _run_and_print(plan: Plan, directory: Path, *, resume: bool, quiet: bool, watch: Sequence[Reader]) -> None:
    """Run a plan, then print the result and what to do next."""
    from atoll.api import run as run_plan
    from atoll.core.coordinator import FAILURES, Reason
    from atoll.report.html import write_report
    from atoll.report.main_figure import figures_text, main_of, shown
    from atoll.report.new_clients import new_clients_text
    from atoll.report.reading import human_bytes, human_seconds, privacy_text

    resume_command = f"atoll run --resume {shlex.quote(str(directory))}"
    try:
        result = run_plan(plan, out=directory, resume=resume, progress=not quiet, watch=watch, report=False)
    except KeyboardInterrupt:  # before the first round, or while the result was written
        kept = (directory / "plan.toml").exists()
        print(f"stopped; {f'go on with: {resume_command}' if kept else 'no round was done: start again'}")
        raise typer.Exit(130) from None
    last = result.history[-1] if result.history else None
    if result.reason == Reason.INTERRUPTED:
        done = last["round"] if last else 0
        print(f"stopped after round {done} of {plan.rounds}; everything is kept. Go on with:")
        print(f"\n    {resume_command}\n")
        raise typer.Exit(130)
    page = write_report([directory])
    if last is not None:
        print(f"{result.reason} after {last['round']} rounds in {human_seconds(last['seconds'])}")
        models = "" if result.shared is not None else f" (mean of {len(result.models)} clients' own models)"
        main = main_of(result.test)
        if main:
            print(figures_text(result.test, models))
        if result.new_clients:
            print(new_clients_text(main, result.new_clients))
        if "privacy" in last:
            print(privacy_text(last["privacy"]))
        if "bytes_up" in last:
            print(f"sent up {human_bytes(last['bytes_up'])}, down {human_bytes(last['bytes_down'])}")
        if plan.stop.bytes is not None and main:
            spent = f"{human_bytes(last['bytes_up'] + last['bytes_down'])} of {human_bytes(plan.stop.bytes)}"
            print(f"{spent} bought {shown(main, result.test[main])}")
    print(f"report {page}")
    if result.reason in FAILURES:
        raise TrainingError(f"{result.reason}; see the report, and {FAILURES[Reason(result.reason)]}")


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories; several are compared.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the figures as PNG files here.")] = None,
) -> None:
    """Write one self-contained HTML page about one run, or comparing several."""
    from atoll.report.html import export_png, write_report

    print(write_report(directories, out))
    if png is not None:
        for path in export_png(directories, png):
            print(path)


@app.command()
def matrix(
    attacks: Annotated[str, typer.Option(help="Attacks, e.g. sign_flip,ipm:factor=optimised,backdoor:target=3.")],
    defences: Annotated[str, typer.Option(help="Rules, e.g. mean,trimmed_mean,nnm+trimmed_mean.")],
    f: Annotated[str, typer.Option("--f", help="Numbers of bad clients, e.g. 1,2,4.")],
    plan: PlanArgument = None,
    settings: SetOption = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1; by default the plan's.")] = None,
    workers: WorkersOption = None,
    ray: RayOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default runs/NAME-matrix.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Run every attack against every defence. Ctrl-C keeps everything; the same command continues."""
    chosen = read_plan(plan, read_settings(settings))
    numbers = whole_numbers("--f", f)
    from atoll.matrix import run_matrix
    from atoll.report.matrix import problems_text, worst_text

    directory = out or Path("runs") / f"{slug(chosen)}-matrix"
    with continued_in(directory):
        results = run_matrix(
            chosen,
            attacks=words(attacks),
            defences=words(defences),
            f=numbers,
            out=directory,
            seeds=whole_numbers("--seeds", seeds) if seeds is not None else None,
            workers=workers,
            ray=ray,
            progress=not quiet,
        )
    print(worst_text(results))
    if results.problems:
        print(problems_text(results))
    print(f"table {directory / 'matrix.csv'}\npage {directory / 'matrix.html'}")
    if any(outcome.status == "failed" for outcome in results.outcomes):
        raise typer.Exit(TrainingError.exit_code)


def _num_bytes(text: str) -> int:
    """Read an amount of bytes such as 50MB, 1.5 GB, 200 KiB or 4096; M is a million, Mi is 2^20."""
    import re

    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([kmgt])(i?))?b?\s*", text, re.IGNORECASE)
    if not match:
        raise PlanError(f"--budget must be an amount of bytes such as 50MB or 1.5GiB, got '{text}'")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _resumed(directory: Path, source: str | None, settings: dict[str, object]) -> Plan:
    """Return the plan of a run that is resumed, with changed settings; rounds, stops and workers may change."""
    from atoll.report.record import written_plan

    if source is not None:
        return read_plan(source, settings)
    plan = written_plan(directory)
    return plan.replace(settings) if settings else plan


for _command in (
    export,
    answers,
    align,
    compare,
    personal,
    sweep,
    redteam,
    ui,
    serve,
    enrol,
    join,
    status,
    stop,
    certs,
):
    app.command()(_command)


def main() -> None:
    """Run the command line; an error is one clear line and a non-zero exit code."""
    try:
        app()
    except AtollError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"error: {error}; free disk space or fix it, and try again", file=sys.stderr)
        raise SystemExit(RunError.exit_code) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
