"""`atoll privacy`: how much noise an epsilon takes, what a plan will spend, and whether it keeps its word."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings

privacy_app = typer.Typer(
    help="Differential privacy: find the noise for an epsilon, see what a plan spends, put it to the test.",
    no_args_is_help=True,
)


@privacy_app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="What all rounds together may spend.")],
    plan: PlanArgument = None,
    settings: SetOption = None,
) -> None:
    """Find the least privacy.sigma with which all rounds of a plan spend at most epsilon."""
    from atoll.engine.planning import calibrated_plan
    from atoll.privacy.accounting import spent

    found = calibrated_plan(read_plan(plan, read_settings(settings)), epsilon)
    exposure = found.exposure
    by = {kind: spent(found.mechanism, exposure, kind).epsilon for kind in found.accountants}
    prices = ", ".join(f"{value:.4g} ({kind})" for kind, value in by.items())
    print(f"sigma {found.sigma:g}")
    print(f"{exposure.attempts} rounds then spend epsilon {prices} at delta {found.mechanism.delta:g}")
    print(f"set it with --set privacy.sigma={found.sigma:g}")


@privacy_app.command()
def audit(
    plan: PlanArgument = None,
    settings: SetOption = None,
    canaries: Annotated[int, typer.Option(help="Clients that try to be seen; more can show more.")] = 5000,
) -> None:
    """Let canary clients try to be seen in what a plan's own mechanism releases: a lower bound on epsilon."""
    from atoll.core.errors import RunError
    from atoll.engine.audit import audit_plan

    found = audit_plan(read_plan(plan, read_settings(settings)), canaries)
    shown = found.found
    print(
        f"{found.num_canaries} canaries, {found.rounds} rounds, {shown.num_right} of {shown.num_guesses} guesses right"
    )
    print(f"epsilon is at least {shown.epsilon:.3f} (at 95 % confidence and delta {found.delta:g})")
    print(f"claimed is {found.claimed:.3f} for these rounds and this delta")
    print(f"had nothing been hidden, {found.most_shown:.2f} would have been shown")
    if not found.passed:
        raise RunError(
            "the mechanism gives away more than it claims: it is broken, or runs otherwise than it is accounted for"
        )


@privacy_app.command("plan")
def plan_ahead(
    plan: PlanArgument = None,
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Past private runs, for accuracy against epsilon.")
    ] = None,
    settings: SetOption = None,
    png: Annotated[Path, typer.Option(help="Where to draw epsilon against rounds.")] = Path("privacy.png"),
) -> None:
    """Show what a plan will spend, round by round, and what past runs bought with their epsilon."""
    from atoll.engine.planning import outlook
    from atoll.report.figures import save_png
    from atoll.report.privacy_picture import outlook_picture
    from atoll.report.reading import read_run, statement_text

    chosen = read_plan(plan, read_settings(settings))
    found = outlook(chosen)
    print(statement_text(found.statement))
    print(f"{'rounds':>8}" + "".join(f"{f'epsilon ({kind})':>16}" for kind in found.epsilons))
    for row, rounds in enumerate(found.rounds):
        print(f"{rounds:>8,}" + "".join(f"{column[row]:>16.4g}" for column in found.epsilons.values()))
    if found.largest is not None:
        one = found.largest
        print(
            f"the largest is that of client {one.client}, whose samples are drawn with probability {one.rate:.4g} in "
            f"each of {one.steps:,} steps a round"
        )
    if found.last_round is not None and found.last_round < chosen.rounds:
        print(f"the budget of {found.statement['budget']:g} ends the run after round {found.last_round}")
    records = [read_run(path) for path in runs or []]
    save_png(outlook_picture(found.rounds, found.epsilons, found.statement["budget"], records), png)
    print(f"picture {png}")
