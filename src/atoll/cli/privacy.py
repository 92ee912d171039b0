"""`atoll privacy`: find the noise for an epsilon, forecast a plan's epsilon, and audit its mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings

privacy_app = typer.Typer(
    help="Differential privacy: find the noise for an epsilon, forecast what a plan spends, audit its mechanism.",
    no_args_is_help=True,
)


@privacy_app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Privacy budget of all rounds together.")],
    plan: PlanArgument = None,
    settings: SetOption = None,
) -> None:
    """Find the least privacy.sigma with which all rounds of a plan spend at most epsilon."""
    from atoll.commit.privacy_plan import calibrated_plan
    from atoll.privacy.accounting import spent

    calibrated = calibrated_plan(read_plan(plan, read_settings(settings)), epsilon)
    sigma, mechanism, exposure = calibrated.sigma, calibrated.mechanism, calibrated.exposure
    by_accountant = {kind: spent(mechanism, exposure, kind).epsilon for kind in calibrated.accountants}
    epsilons = ", ".join(f"{value:.4g} ({kind})" for kind, value in by_accountant.items())
    print(f"sigma {sigma:g}")
    print(f"{exposure.attempts} rounds then spend epsilon {epsilons} at delta {mechanism.delta:g}")
    print(f"set it with --set privacy.sigma={sigma:g}")


@privacy_app.command()
def audit(
    plan: PlanArgument = None,
    settings: SetOption = None,
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Number of canary clients or samples; by default enough to detect half the claimed noise.", min=1
        ),
    ] = None,
) -> None:
    """Look for canaries in what a plan's own mechanism releases, and compare with the privacy that it claims."""
    from atoll.core.errors import RunError
    from atoll.privacy.auditing import CHANCE
    from atoll.simulation.audit import audit_plan

    result = audit_plan(read_plan(plan, read_settings(settings)), canaries)
    counts, claim = result.counts, result.claim
    print(
        f"{counts.inside:,} canaries, of which {counts.missed:,} were missed; "
        f"{counts.mistaken:,} of {counts.outside:,} entries without one were mistaken for one"
    )
    print(
        f"the noise is at most {_size(result.mu)} clips, claimed are {_size(claim.mu)} "
        f"(at {100 * result.confidence:g} % confidence)"
    )
    if claim.rate < 1:
        print(f"the chance to be drawn is at least {result.rate:.4g}, claimed is {claim.rate:.4g}")
    print(
        f"{result.rounds} rounds then spend epsilon {result.epsilon:.3f} at least, claimed are {result.claimed:.3f} at "
        f"most (delta {result.delta:g})"
    )
    if result.detects:
        print(
            f"noise below {100 * result.detects:.0f} % of the claimed would be detected {100 * CHANCE:g} times in 100"
        )
    if result.detects < 0.5:
        print("noise of half the claimed size would NOT be detected for sure: ask for more with --canaries")
    if not result.passed:
        raise RunError(
            "the mechanism gives away more than it claims: correct its noise or sampling, or the event that it is "
            "accounted by"
        )


def _size(mu: float) -> str:
    """Return the standard deviation of the noise for this mu, in clips."""
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
    """Show the epsilon of a plan by rounds, and the accuracy of past runs by epsilon."""
    from atoll.commit.privacy_plan import outlook
    from atoll.report.figures import save_png
    from atoll.report.privacy_picture import outlook_picture
    from atoll.report.reading import read_run, statement_text

    chosen = read_plan(plan, read_settings(settings))
    forecast = outlook(chosen)
    print(statement_text(forecast.statement))
    print(f"{'rounds':>8}" + "".join(f"{f'epsilon ({kind})':>16}" for kind in forecast.epsilons))
    for row, rounds in enumerate(forecast.rounds):
        print(f"{rounds:>8,}" + "".join(f"{column[row]:>16.4g}" for column in forecast.epsilons.values()))
    if forecast.largest is not None:
        largest = forecast.largest
        print(
            f"the largest is that of client {largest.client}, whose samples are drawn with probability "
            f"{largest.rate:.4g} in each of {largest.steps:,} steps a round"
        )
    budget = forecast.statement["budget"]
    if forecast.last_round is not None and forecast.last_round < chosen.rounds:
        print(f"the budget of {budget:g} ends the run after round {forecast.last_round}")
    records = [read_run(path) for path in runs or []]
    save_png(outlook_picture(forecast.rounds, forecast.epsilons, budget, records), png)
    print(f"picture {png}")
