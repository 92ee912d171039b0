"""Room for bodies: no more than there is, in the order of coming, and some for everybody."""

from __future__ import annotations

import asyncio

import pytest

from atoll.network.server.auth import Refused
from atoll.network.server.limits import MAX_BODIES_PER_CLIENT, UNCOUNTED_BYTES, BodyLimits

BODY = 2 * UNCOUNTED_BYTES


class Crowd:
    """Bodies that stay until they are told to go; who is in, in the order of coming in."""

    def __init__(self, num_bytes: int, max_wait: float = 60.0) -> None:
        self.room, self.here = BodyLimits(num_bytes, max_wait), list[int]()
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
        async with self.room.reserve(who, num_bytes):
            self.here.append(number)
            try:
                await self.gone[number].wait()
            finally:
                self.here.remove(number)


def test_those_who_come_when_it_is_full_wait_for_their_turn() -> None:
    async def turns() -> None:
        approved_raw_clients = Crowd(3 * BODY)
        for number in range(2):
            await approved_raw_clients.come(number)
        await approved_raw_clients.come(2, 2 * BODY)  # one too many
        await approved_raw_clients.come(3)  # would fit, but came later
        await approved_raw_clients.come(4, UNCOUNTED_BYTES)  # is not counted
        assert approved_raw_clients.here == [0, 1, 4]
        await approved_raw_clients.go(0)
        await asyncio.sleep(0)
        assert approved_raw_clients.here == [1, 4, 2]
        await approved_raw_clients.go(2)
        await asyncio.sleep(0)
        assert approved_raw_clients.here == [1, 4, 3]
        for number in (1, 3, 4):
            await approved_raw_clients.go(number)
        await approved_raw_clients.come(5, 3 * BODY)  # all of it is free again
        assert approved_raw_clients.here == [5]
        await approved_raw_clients.go(5)

    asyncio.run(turns())


def test_who_gives_up_leaves_the_room_to_others() -> None:
    async def turns() -> None:
        approved_raw_clients = Crowd(BODY)
        for number in range(4):
            await approved_raw_clients.come(number)
        approved_raw_clients.tasks[1].cancel()
        approved_raw_clients.gone[0].set()
        await asyncio.sleep(0)
        approved_raw_clients.tasks[2].cancel()  # it was let in, and does not know it yet
        assert approved_raw_clients.here == []
        for _ in range(5):
            await asyncio.sleep(0)
        assert approved_raw_clients.here == [3]
        await approved_raw_clients.go(3)
        assert all(approved_raw_clients.tasks[number].cancelled() for number in (1, 2))

    asyncio.run(turns())


def test_who_waits_for_long_is_told_to_come_again() -> None:
    async def turns() -> None:
        approved_raw_clients = Crowd(BODY, max_wait=0.02)
        for number in range(3):
            await approved_raw_clients.come(number)
        for number in (1, 2):
            with pytest.raises(Refused, match="come again") as refused:
                await approved_raw_clients.tasks[number]
            assert (refused.value.status, refused.value.retry) == (503, 1.0)
        assert approved_raw_clients.here == [0]
        await approved_raw_clients.go(0)
        await approved_raw_clients.come(3)  # nothing was lost of the room
        assert approved_raw_clients.here == [3]
        await approved_raw_clients.go(3)

    asyncio.run(turns())


def test_nobody_takes_all_of_it() -> None:
    async def turns() -> None:
        approved_raw_clients = Crowd(100 * BODY)
        for number in range(MAX_BODIES_PER_CLIENT + 1):
            await approved_raw_clients.come(number, who="one")
        await approved_raw_clients.come(10, who="other")
        with pytest.raises(Refused, match="are being read") as refused:
            await approved_raw_clients.tasks[MAX_BODIES_PER_CLIENT]
        assert refused.value.retry == 1.0
        assert approved_raw_clients.here == [*range(MAX_BODIES_PER_CLIENT), 10]
        await approved_raw_clients.go(0)
        await approved_raw_clients.come(11, who="one")
        assert approved_raw_clients.here == [*range(1, MAX_BODIES_PER_CLIENT), 10, 11]
        for number in approved_raw_clients.here.copy():
            await approved_raw_clients.go(number)

    asyncio.run(turns())
