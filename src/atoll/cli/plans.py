"""Arguments of commands that name a plan: a file or a function, and settings that change it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.errors import AtollError, PlanError

if TYPE_CHECKING:
    from atoll.core.plan import Plan

PlanArgument = Annotated[
    str | None, typer.Argument(metavar="PLAN", help="plan.toml, or package.module:function that returns a Plan.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, e.g. algorithm.mu=0.1; an empty value removes it. May be repeated.",
    ),
]
SeedsOption = Annotated[
    str, typer.Option(help="Number of seeds, from the plan's on; or the seeds themselves, e.g. 0,7.")
]
WorkersOption = Annotated[int | None, typer.Option(help="Number of runs at once; by default one for each core.")]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run them on a Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or local for one of this command alone.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; the result only.")]


@contextmanager
def continued_in(directory: Path) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a command whose finished runs are kept, saying how to go on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; everything is kept in {directory}: go on with the same command")
        raise typer.Exit(130) from None


def read_seeds(text: str) -> int | list[int]:
    """Read `--seeds`: one number is a count, several are the seeds."""
    numbers = whole_numbers("--seeds", text)
    return numbers if "," in text or not numbers else numbers[0]


def read_settings(texts: list[str] | None) -> dict[str, object]:
    """Parse the values of `--set`."""
    return dict(_setting(text) for text in texts or [])


def read_plan(source: str | None, settings: dict[str, object]) -> Plan:
    """Read a plan from a TOML file or a function, and apply the settings of the command line."""
    from atoll.core.parts import imported
    from atoll.core.plan import Plan

    if source is None:
        plan: Any = Plan()
    elif ":" in source and not Path(source).exists():
        function = imported(source)
        try:
            plan = function()
        except AtollError:
            raise
        except Exception as error:
            raise PlanError(
                f"{source} raised {type(error).__name__}: {error}; it must return an atoll.Plan and need no arguments"
            ) from error
        if not isinstance(plan, Plan):
            raise PlanError(f"{source} returned {type(plan).__name__}: it must return an atoll.Plan")
    else:
        path = Path(source)
        if not path.is_file():
            raise PlanError(f"there is no plan {source}: name a TOML file, or a function as package.module:function")
        try:
            plan = Plan.from_toml(path.read_text())
        except UnicodeDecodeError as error:
            raise PlanError(f"{source} is not a text file: a plan is written in TOML") from error
    checked: Plan = plan
    return checked.replace(settings) if settings else checked


def _setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is TOML, and a bare word is a string."""
    from atoll.core.toml_text import read_toml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise PlanError(f"--set must be KEY=VALUE, e.g. --set local.lr=0.05, got '{text}'")
    return key.strip(), read_toml(value)


def words(text: str) -> list[str]:
    """Split a list that commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    """Read whole numbers that commas separate."""
    try:
        return [int(word) for word in words(text)]
    except ValueError as error:
        raise PlanError(f"{option} must be whole numbers separated by commas, e.g. 1,2,4, got '{text}'") from error


def slug(plan: Plan) -> str:
    """Return a name for the directory of a plan's runs."""
    text = plan.name or f"{plan.data.name}-{plan.algorithm.name}"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text).strip("-") or "run"
