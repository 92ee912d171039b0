"""A client's end of a session."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from atoll.core.errors import RunError
from atoll.network.client.connection import Connection
from atoll.network.client.lanes import Lanes

SECONDS = 10


class Refusing:
    """A connection whose server has ended the session."""

    def ask(self, *args: Any, **named: Any) -> bytes:
        raise RunError("the session is over")


def test_a_request_that_fails_before_its_answer_is_awaited_ends_the_wait() -> None:
    heard: list[BaseException] = []
    with Lanes(cast(Connection, Refusing()), "run", 0, "session", 1 << 20) as lanes:
        lanes.send(b"activations", 0)
        for thread in lanes._threads:
            thread.join(SECONDS)

        def wait() -> None:
            with pytest.raises(RunError, match="the session is over") as caught:
                lanes.receive()
            heard.append(caught.value)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(SECONDS)
        assert heard and not waiting.is_alive()
