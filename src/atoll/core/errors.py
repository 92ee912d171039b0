"""One family of errors. Each message says what was given, what is allowed and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtollError(Exception):
    """Anything that Atoll refuses or cannot do; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class PlanError(AtollError):
    """A plan that cannot be right: a typo, a value out of range, or parts that do not fit together."""

    exit_code = 2
    rule = ""
    """The name of the rule that refuses the plan, where one does."""


class DataError(AtollError):
    """Data that cannot be had, or that are not what they should be."""

    exit_code = 3


class TrainingError(AtollError):
    """Training that cannot go on, such as a model that gives NaN to every client."""

    exit_code = 4


class RunError(AtollError):
    """A run directory that cannot be used or written."""

    exit_code = 5


class DiskFull(RunError):
    """There is no room: nothing was written, and it can be tried again when there is."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, as the end of an error message.

    >>> nearest("fedpox", ["fedavg", "fedprox"])
    "did you mean 'fedprox'? Known: fedavg, fedprox"
    """
    names = sorted(known)
    if not names:
        return "there are none"
    return " ".join(filter(None, [close_to(name, names), f"Known: {', '.join(names)}"]))


def close_to(name: str, known: Iterable[str]) -> str:
    """Ask whether the known name that is closest to this one was meant; nothing if none is close.

    >>> close_to("FedAvg", ["fedavg", "fedprox"]), close_to("x", ["fedavg"])
    ("did you mean 'fedavg'?", '')
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean '{close[0]}'?" if close else ""
