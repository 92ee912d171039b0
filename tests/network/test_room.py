"""Room for bodies: no more than there is, in the order of coming, and some for everybody."""

from __future__ import annotations

import asyncio

import pytest

from atoll.network.server.auth import Refused
from atoll.network.server.body_limits import EACH, SMALL, Room

BODY = 2 * SMALL


class Crowd:
    """Bodies that stay until they are told to go; who is in, in the order of coming in."""

    def __init__(self, num_bytes: int, patience: float = 60.0) -> None:
        self.room, self.here = Room(num_bytes, patience), list[int]()
        self.gone: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, number: int, num_bytes: int = BODY, who: str | None = None) -> None:
        self.gone[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._stay(number, num_bytes, who or str(number)))
        await asyncio.sleep(0)

    async def go(self, number: int) -> None:
        self.gone[number].set()
        await self.tasks[number]

    async def _stay(self, number: int, num_bytes: int, who: str) -> None:
        async with self.room.taken(who, num_bytes):
            self.here.append(number)
            try:
                await self.gone[number].wait()
            finally:
                self.here.remove(number)


def test_those_who_come_when_it_is_full_wait_for_their_turn() -> None:
    async def turns() -> None:
        crowd = Crowd(3 * BODY)
        for number in range(2):
            await crowd.come(number)
        await crowd.come(2, 2 * BODY)  # one too many
        await crowd.come(3)  # would fit, but came later
        await crowd.come(4, SMALL)  # is not counted
        assert crowd.here == [0, 1, 4]
        await crowd.go(0)
        await asyncio.sleep(0)
        assert crowd.here == [1, 4, 2]
        await crowd.go(2)
        await asyncio.sleep(0)
        assert crowd.here == [1, 4, 3]
        for number in (1, 3, 4):
            await crowd.go(number)
        await crowd.come(5, 3 * BODY)  # all of it is free again
        assert crowd.here == [5]
        await crowd.go(5)

    asyncio.run(turns())


def test_who_gives_up_leaves_the_room_to_others() -> None:
    async def turns() -> None:
        crowd = Crowd(BODY)
        for number in range(4):
            await crowd.come(number)
        crowd.tasks[1].cancel()
        crowd.gone[0].set()
        await asyncio.sleep(0)
        crowd.tasks[2].cancel()  # it was let in, and does not know it yet
        assert crowd.here == []
        for _ in range(5):
            await asyncio.sleep(0)
        assert crowd.here == [3]
        await crowd.go(3)
        assert all(crowd.tasks[number].cancelled() for number in (1, 2))

    asyncio.run(turns())


def test_who_waits_for_long_is_told_to_come_again() -> None:
    async def turns() -> None:
        crowd = Crowd(BODY, patience=0.02)
        for number in range(3):
            await crowd.come(number)
        for number in (1, 2):
            with pytest.raises(Refused, match="come again") as refused:
                await crowd.tasks[number]
            assert (refused.value.status, refused.value.retry) == (503, 1.0)
        assert crowd.here == [0]
        await crowd.go(0)
        await crowd.come(3)  # nothing was lost of the room
        assert crowd.here == [3]
        await crowd.go(3)

    asyncio.run(turns())


def test_nobody_takes_all_of_it() -> None:
    async def turns() -> None:
        crowd = Crowd(100 * BODY)
        for number in range(EACH + 1):
            await crowd.come(number, who="one")
        await crowd.come(10, who="other")
        with pytest.raises(Refused, match="are being read") as refused:
            await crowd.tasks[EACH]
        assert refused.value.retry == 1.0
        assert crowd.here == [*range(EACH), 10]
        await crowd.go(0)
        await crowd.come(11, who="one")
        assert crowd.here == [*range(1, EACH), 10, 11]
        for number in crowd.here.copy():
            await crowd.go(number)

    asyncio.run(turns())
