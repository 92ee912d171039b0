"""Private set intersection on an elliptic curve, by openmined.psi: points of ids, with a secret exponent of each side.

Every function takes the secret key of a side and works on any part of the ids, so that parts can be done beside each
other by `Spread`. Points of one part are joined by plain concatenation: `POINT` bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from atoll.core.errors import DataError, PlanError

POINT = 33
"""Bytes of a point of P-256, compressed."""
PART, COMPARED = 2_000, 25_000
"""Ids that are worth a piece of work of their own; and where each piece is compared with all ids of the other side."""
Spread = Callable[[Callable[[Any], Any], list[Any]], list[Any]]
"""(function, parts) -> what the function makes of each part, in order."""


class AlignmentError(DataError):
    """Joining records failed: a party sent what is not due, or rows are not the same."""


def in_order(function: Callable[[Any], Any], parts: list[Any]) -> list[Any]:
    """Work on the parts one after another, in this process."""
    return [function(part) for part in parts]


def library() -> Any:
    """Import openmined.psi; PlanError says how to install it."""
    try:
        import private_set_intersection.python as psi
    except ImportError as error:
        raise PlanError(
            "private set intersection needs openmined.psi: pip install 'atoll[psi]', or join the rows before and leave "
            "split.missing out"
        ) from error
    return psi


def new_key() -> bytes:
    """Return a fresh secret key, for one session."""
    key: bytes = library().client.CreateWithNewKey(True).GetPrivateKeyBytes()
    return key


def request(key: bytes, reveal: bool, items: Sequence[str], spread: Spread = in_order) -> bytes:
    """Return the points of the asking side's ids, in their order."""
    return b"".join(spread(partial(_request, key, reveal), _parts(items)))


def setup(key: bytes, reveal: bool, items: Sequence[str], spread: Spread = in_order) -> bytes:
    """Return the points of the answering side's ids, sorted, so that their order says nothing."""
    points = b"".join(spread(partial(_setup, key, reveal), _parts(items)))
    return b"".join(sorted(split_points(points)))


def response(key: bytes, reveal: bool, points: bytes, spread: Spread = in_order) -> bytes:
    """Return the asking side's points with the answering side's exponent; sorted unless ids may be told apart."""
    found = b"".join(spread(partial(_response, key, reveal), _parts(split_points(points))))
    return found if reveal else b"".join(sorted(split_points(found)))


def intersection(key: bytes, setup_points: bytes, answered: bytes, spread: Spread = in_order) -> list[int]:
    """Return which of the asking side's ids both sides have, by their places, in rising order."""
    parts = _parts(split_points(answered), COMPARED)
    found = spread(partial(_intersection, key, setup_points), parts)
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return sorted(start + place for start, places in zip(starts, found, strict=True) for place in places)


def intersection_size(key: bytes, setup_points: bytes, answered: bytes, spread: Spread = in_order) -> int:
    """Return how many ids both sides have."""
    return sum(spread(partial(_size, key, setup_points), _parts(split_points(answered), COMPARED)))


def split_points(points: bytes) -> list[bytes]:
    """Return points one by one."""
    return [points[start : start + POINT] for start in range(0, len(points), POINT)]


def _parts(items: Sequence[Any], size: int | None = None) -> list[Any]:
    size = size or PART
    return [items[start : start + size] for start in range(0, len(items), size)]


def _request(key: bytes, reveal: bool, items: list[str]) -> bytes:
    made = library().client.CreateFromKey(key, reveal).CreateRequest(items)
    return b"".join(made.encrypted_elements)


def _setup(key: bytes, reveal: bool, items: list[str]) -> bytes:
    psi = library()
    server = psi.server.CreateFromKey(key, reveal)
    made = server.CreateSetupMessage(1e-9, len(items), items, psi.DataStructure.RAW)  # RAW has no false positives
    return b"".join(made.raw.encrypted_elements)


def _response(key: bytes, reveal: bool, points: list[bytes]) -> bytes:
    psi = library()
    asked = psi.Request(reveal_intersection=reveal, encrypted_elements=points)
    try:
        made = psi.server.CreateFromKey(key, reveal).ProcessRequest(asked)
    except RuntimeError as error:
        raise AlignmentError("the ids of the other party are no points of the curve: let it run atoll align") from error
    return b"".join(made.encrypted_elements)


def _asked(psi: Any, setup_points: bytes, answered: list[bytes]) -> tuple[Any, Any]:
    held = psi.ServerSetup()
    held.raw.encrypted_elements.extend(split_points(setup_points))
    return held, psi.Response(encrypted_elements=answered)


def _intersection(key: bytes, setup_points: bytes, answered: list[bytes]) -> list[int]:
    psi = library()
    try:
        found = psi.client.CreateFromKey(key, True).GetIntersection(*_asked(psi, setup_points, answered))
    except RuntimeError as error:
        raise AlignmentError(
            "the answer of the other party is no points of the curve: let it run atoll align"
        ) from error
    return [int(place) for place in found]


def _size(key: bytes, setup_points: bytes, answered: list[bytes]) -> int:
    psi = library()
    try:
        return int(psi.client.CreateFromKey(key, False).GetIntersectionSize(*_asked(psi, setup_points, answered)))
    except RuntimeError as error:
        raise AlignmentError(
            "the answer of the other party is no points of the curve: let it run atoll align"
        ) from error
