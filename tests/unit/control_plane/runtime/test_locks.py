"""Locks by name: one holder, in the order of requests, with nothing left behind after
cancellations."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.runtime.locks import Locks


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_get_a_name_in_order() -> None:
    locks, order = Locks(), list[int]()

    async def hold(number: int) -> None:
        await locks.acquire("a")
        order.append(number)
        await asyncio.sleep(0)
        locks.release("a")

    await asyncio.gather(*map(hold, range(20)))
    assert order == list(range(20))
    assert len(locks) == 0


async def test_a_waiter_cancelled_while_it_gets_a_name_passes_it_on() -> None:
    locks = Locks()
    await locks.acquire("a")
    first, second = (asyncio.create_task(locks.acquire("a")) for _ in range(2))
    await _settle()
    locks.release("a")  # the first waiter holds it now, but has not run since
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    locks.release("a")
    assert len(locks) == 0


async def test_cancelled_waiters_leave_one_holder_and_nothing_else() -> None:
    chance = random.Random(5)
    for _ in range(200):
        locks, inside = Locks(), dict[str, int]()

        async def hold(name: str, locks: Locks, inside: dict[str, int], turns: int) -> None:
            await locks.acquire(name)
            try:
                assert name not in inside
                inside[name] = 1
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                inside.pop(name, None)
                locks.release(name)

        tasks = [
            asyncio.create_task(hold(chance.choice("ab"), locks, inside, chance.randrange(3)))
            for _ in range(8)
        ]
        for _ in range(6):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(e is None or isinstance(e, asyncio.CancelledError) for e in ended)
        assert len(locks) == 0
