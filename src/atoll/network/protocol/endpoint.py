"""What both sides must agree on of one request; the tables are `endpoints` and `operator_endpoints`."""

from __future__ import annotations

import re
from typing import Any, Generic, NamedTuple, TypeVar

MAX_CONTROL = 1 << 20
"""Bytes of the largest control message."""

Body = TypeVar("Body")
Reply = TypeVar("Reply")


class Endpoint(NamedTuple, Generic[Body, Reply]):
    """One request: of the protocol, or of the operator's address."""

    method: str
    path: str
    """With the names of its parameters in braces."""
    summary: str
    body: type[Body]
    answer: type[Reply]
    public: bool = False
    """Whether anybody may make it, without a client's signature or the operator's token."""
    max_body: int = MAX_CONTROL
    """Bytes of the largest body that a server reads."""
    max_answer: int = MAX_CONTROL
    """Bytes of the largest answer that a client reads."""
    metadata: type[Any] | None = None
    """The message in a header that describes a body of bytes."""

    @property
    def parameters(self) -> list[str]:
        """Return the names of the parameters in the path."""
        return re.findall(r"{(\w+)}", self.path)

    def url(self, **parameters: str | int) -> str:
        """Fill in the parameters of the path.

        >>> Endpoint(method="GET", path="/runs/{run}", summary="", body=bytes, answer=bytes).url(run="mnist")
        '/runs/mnist'
        """
        return self.path.format(**parameters)
