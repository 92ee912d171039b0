"""The errors of Atoll. Each message says what was given, what is allowed and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtollError(Exception):
    """Base of all errors that are meant for the user; the command line prints it and exits with `exit_code`."""

    exit_code = 1


class PlanError(AtollError):
    """A plan is invalid: a typo, a value out of range, or parts that do not fit together."""

    exit_code = 2
    rule = ""
    """Name of the rule of `checks` that refused the plan; empty if none did."""


class DataError(AtollError):
    """Data cannot be loaded, or have an unexpected form."""

    exit_code = 3


class TrainingError(AtollError):
    """Training cannot continue, for instance because the model gives NaN at every client."""

    exit_code = 4


class RunError(AtollError):
    """A run directory cannot be used or written."""

    exit_code = 5


class DiskFull(RunError):
    """The disk is full: nothing was written, and the operation can be repeated when there is space."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known name that was probably meant, and all known names.

    >>> nearest("fedpox", ["fedavg", "fedprox"])
    "did you mean 'fedprox'? Known: fedavg, fedprox"
    """
    names = sorted(known)
    if not names:
        return "there are none"
    return " ".join(filter(None, [close_to(name, names), f"Known: {', '.join(names)}"]))


def close_to(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the known name closest to this one, or "" if none is close.

    >>> close_to("FedAvg", ["fedavg", "fedprox"]), close_to("x", ["fedavg"])
    ("did you mean 'fedavg'?", '')
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean '{close[0]}'?" if close else ""
