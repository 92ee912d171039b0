"""The roll: who is there."""

from __future__ import annotations

from atoll.network.server.presence import ONLINE_SECONDS, Presence


def test_who_fetches_something_large_is_there_without_a_poll() -> None:
    time = 1000.0
    presence = Presence([], lambda: time)
    presence.note_poll(3, {"idle": True})
    for _ in range(4):
        time += 0.8 * ONLINE_SECONDS
        presence.note_request(3)
        assert presence.online() == {3}
    assert presence.last_polls[3].attributes == {"idle": True}
    time += 1.1 * ONLINE_SECONDS
    assert presence.online() == set()
    for number in (4, None):  # who never polled is unknown
        presence.note_request(number)
    assert presence.online() == set() and list(presence.last_polls) == [3]
