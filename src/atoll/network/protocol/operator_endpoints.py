"""Every endpoint of the operator's address, defined once: the server and the operator's commands use this table.

Bodies and answers are JSON, but for those of `health` and `metrics`, which are text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from atoll.network.protocol.endpoints import Endpoint

MAX_TOKEN_SECONDS = 30 * 86400


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that says all in its path; one that says more may be meant for another endpoint."""


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients, by name or id."""

    names: Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class Approval(Names, frozen=True, forbid_unknown_fields=True):
    """Clients to approve, and how many samples each of them has, where the operator knows that."""

    samples: Annotated[int, Meta(ge=1)] | None = None


class TokenLifetime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a token can be used."""

    seconds: Annotated[float, Meta(gt=0, le=MAX_TOKEN_SECONDS)]


class NewRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run and its plan."""

    run: str
    plan: dict[str, Any]


class RunName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An existing run."""

    run: str


class NewAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link to the live page: whose it is, what it allows and for how long."""

    name: str
    role: Literal["viewer", "operator"]
    hours: float


class AccessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An existing link."""

    id: str


class AccessGiven(TypedDict):
    """A link that was made: the token is shown once."""

    id: str
    token: str


class ServerStatus(TypedDict):
    """State of the server itself."""

    seconds_up: float
    read_only: bool
    why: str
    key: str


class RunStatus(TypedDict):
    """State of a run."""

    run: str
    status: str
    round: int
    rounds: int
    attempt: int
    phase: str
    asked: int
    arrived: int
    accuracy: float | None
    test: dict[str, float | None]
    epsilon: float | None
    seconds_waiting: float
    working: list[int] | None
    """Numbers of the clients that are asked and have not answered; null where privacy hides who is asked."""
    sites: dict[str, Any] | None
    """What clients measured of the newest version that they have measured, as in `sites.json`."""


class Overview(TypedDict):
    """State of the server, its runs, and the number of clients by their status."""

    server: ServerStatus
    runs: list[RunStatus]
    clients: dict[str, int]


class ClientStatus(TypedDict):
    """State of a client."""

    id: str
    name: str
    number: int | None
    status: str
    samples: int | None
    agreed: int | None
    offences: int
    refused: bool
    ready: dict[str, dict[str, Any]]
    """Results of the client's preflights by run: whether it is `ready`, the `reason`, the `seconds` of a task."""
    online: bool
    seconds_since: float | None


class Clients(TypedDict):
    """Every client that enrolled."""

    clients: list[ClientStatus]


class Numbers(TypedDict):
    """The numbers of approved clients, in the order in which they were named."""

    numbers: list[int]


class Token(TypedDict):
    """A token with which one client can enrol."""

    token: str


class RunAdded(TypedDict):
    """The run that was added."""

    run: str


class LedgerLines(TypedDict):
    """The ledger of a run."""

    lines: list[str]


class Nothing(TypedDict):
    """No answer beyond that it is done."""


HEALTH = Endpoint(
    method="GET",
    path="/health",
    summary="Whether the server can write; 503 and why if not",
    body=NoBody,
    answer=bytes,
    public=True,
)
METRICS = Endpoint(
    method="GET", path="/metrics", summary="Counters for Prometheus", body=NoBody, answer=bytes, public=True
)
STATUS = Endpoint(method="GET", path="/status", summary="Show the state of the server", body=NoBody, answer=Overview)
CLIENTS = Endpoint(method="GET", path="/clients", summary="List clients", body=NoBody, answer=Clients)
APPROVE = Endpoint(method="POST", path="/clients/approve", summary="Approve clients", body=Approval, answer=Numbers)
REVOKE = Endpoint(method="POST", path="/clients/revoke", summary="Revoke clients", body=Names, answer=Nothing)
TOKEN = Endpoint(method="POST", path="/clients/token", summary="Make a token", body=TokenLifetime, answer=Token)
ADD_RUN = Endpoint(method="POST", path="/runs", summary="Add a run", body=NewRun, answer=RunAdded)
STOP_RUN = Endpoint(method="POST", path="/runs/stop", summary="End a run", body=RunName, answer=Nothing)
LEDGER = Endpoint(
    method="GET", path="/runs/{run}/ledger", summary="Show a run's ledger", body=NoBody, answer=LedgerLines
)
GIVE_ACCESS = Endpoint(
    method="POST", path="/access", summary="Make a link to the live page", body=NewAccess, answer=AccessGiven
)
REVOKE_ACCESS = Endpoint(
    method="POST", path="/access/revoke", summary="Revoke a link to the live page", body=AccessId, answer=Nothing
)
STOP = Endpoint(method="POST", path="/stop", summary="Stop the server", body=NoBody, answer=Nothing)

ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    HEALTH,
    METRICS,
    STATUS,
    CLIENTS,
    APPROVE,
    REVOKE,
    TOKEN,
    ADD_RUN,
    STOP_RUN,
    LEDGER,
    GIVE_ACCESS,
    REVOKE_ACCESS,
    STOP,
)
