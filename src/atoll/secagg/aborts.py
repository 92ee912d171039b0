"""The error by which a state machine refuses a message or ends a session, with a typed reason."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from atoll.core.errors import AtollError


class Reason(StrEnum):
    """Why a message was refused or a session ended."""

    MALFORMED = "not a message of this protocol"
    UNEXPECTED = "an unexpected message"
    WRONG_SESSION = "a message of another session"
    UNKNOWN_SENDER = "an unknown sender"
    DUPLICATE = "a second message of one kind"
    BAD_SIGNATURE = "an invalid signature"
    BAD_KEY = "a key that cannot be used"
    BAD_ROSTER = "an inconsistent roster"
    BAD_SHARE = "an impossible share"
    BAD_VECTOR = "a vector of another type than agreed"
    WRONG_MODEL = "another model than the client's"
    WRONG_MODE = "a weaker protection than the client requires"
    SMALL_COHORT = "too few clients"
    LOW_THRESHOLD = "too low a threshold"
    TOO_FEW = "too few clients are left"
    INCONSISTENT = "clients have different survivor sets"
    KEYS_SPENT = "the keys of this session were used before"


class Abort(AtollError):
    """A message is refused, or a session is over. `state` is the machine's next state in either case."""

    def __init__(self, reason: Reason, text: str, state: Any = None) -> None:
        super().__init__(f"secure aggregation: {text}")
        self.reason = reason
        self.state = state
