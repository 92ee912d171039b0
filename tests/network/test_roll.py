"""The roll: who is there."""

from __future__ import annotations

from atoll.network.server.presence import ONLINE_SECONDS, Roll


def test_who_fetches_something_large_is_there_without_a_poll() -> None:
    time = 1000.0
    roll = Roll([], lambda: time)
    roll.hear(3, {"idle": True})
    for _ in range(4):
        time += 0.8 * ONLINE_SECONDS
        roll.still_here(3)
        assert roll.online() == {3}
    assert roll.present[3].attributes == {"idle": True}
    time += 1.1 * ONLINE_SECONDS
    assert roll.online() == set()
    for number in (4, None):  # who never polled is unknown
        roll.still_here(number)
    assert roll.online() == set() and list(roll.present) == [3]
