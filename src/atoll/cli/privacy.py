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
    from atoll.commit.privacy_plan import calibrated_plan
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
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Clients, or samples, that try to be seen; as many as find out half the noise unless given.", min=1
        ),
    ] = None,
) -> None:
    """Let canaries try to be seen in what a plan's own mechanism releases, and say what would have been found out."""
    from atoll.core.errors import RunError
    from atoll.privacy.auditing import CHANCE
    from atoll.simulation.audit import audit_plan

    found = audit_plan(read_plan(plan, read_settings(settings)), canaries)
    counts, claim = found.counts, found.claim
    print(
        f"{counts.inside:,} canaries, of which {counts.missed:,} were missed; "
        f"{counts.mistaken:,} of {counts.outside:,} entries without one were mistaken for one"
    )
    print(
        f"the noise is at most {_size(found.mu)} clips, claimed are {_size(claim.mu)} "
        f"(at {100 * found.confidence:g} % confidence)"
    )
    if claim.rate < 1:
        print(f"the chance to be drawn is at least {found.rate:.4g}, claimed is {claim.rate:.4g}")
    print(
        f"{found.rounds} rounds then spend epsilon {found.epsilon:.3f} at least, claimed are {found.claimed:.3f} at "
        f"most (delta {found.delta:g})"
    )
    if found.detects:
        print(
            f"noise below {100 * found.detects:.0f} % of the claimed would be found out {100 * CHANCE:g} times in 100"
        )
    if found.detects < 0.5:
        print("noise of half the claimed size would NOT be found out for sure: ask for more with --canaries")
    if not found.passed:
        raise RunError(
            "the mechanism gives away more than it claims: it is broken, or runs otherwise than it is accounted for"
        )


def _size(mu: float) -> str:
    """The deviation of the noise for this mu, in clips."""
    return f"{1 / mu:.4g}" if mu > 0 else "any number of"


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
    from atoll.commit.privacy_plan import outlook
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
