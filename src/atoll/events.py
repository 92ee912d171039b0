"""The events of a run, for callables that `atoll.run(plan, watch=[...])` is given.

>>> from atoll.events import RoundCommitted
>>> def print_accuracy(event):
...     if isinstance(event, RoundCommitted) and "test" in event.row:
...         print(event.row["round"], event.row["test"]["accuracy"])
"""

from atoll.core.events import (
    AttemptAbandoned,
    BudgetCharged,
    ClientReported,
    Evaluated,
    Event,
    NewClientsEvaluated,
    Reader,
    RoundCommitted,
    RunEnded,
    RunStarted,
    SetupStep,
    TasksSent,
)

__all__ = [
    "AttemptAbandoned",
    "BudgetCharged",
    "ClientReported",
    "Evaluated",
    "Event",
    "NewClientsEvaluated",
    "Reader",
    "RoundCommitted",
    "RunEnded",
    "RunStarted",
    "SetupStep",
    "TasksSent",
]
