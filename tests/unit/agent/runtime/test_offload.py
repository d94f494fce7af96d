"""Lanes run calls outside of the event loop, in order, each to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from agent.runtime.offload import Lanes


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    """Yield lanes that end with the test."""
    made = Lanes()
    yield made
    made.close()


async def test_calls_of_a_lane_run_in_their_order_in_one_thread_of_its_name(lanes: Lanes) -> None:
    done: list[int] = []

    def call(number: int) -> tuple[str, int]:
        done.append(number)
        return threading.current_thread().name, threading.get_ident()

    found = await asyncio.gather(*(lanes.run("disk", call, n) for n in range(50)))

    assert done == list(range(50))
    assert {name for name, _ in found} == {"disk"}
    assert len({ident for _, ident in found} | {threading.get_ident()}) == 2


async def test_a_lane_that_waits_holds_up_no_other(lanes: Lanes) -> None:
    released = threading.Event()
    slow = asyncio.ensure_future(lanes.run("slow", released.wait))

    assert await lanes.run("quick", lambda word, end="": word + end, "a", end="b") == "ab"
    assert not slow.done()
    released.set()
    assert await slow


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
async def test_an_exception_of_a_call_is_raised_in_its_caller(
    lanes: Lanes, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await lanes.run("disk", fail)

    assert raised.value is error
    assert await lanes.run("disk", lambda: 1) == 1


async def test_a_started_call_runs_to_its_end_without_a_waiting_caller(lanes: Lanes) -> None:
    begun, released, done = threading.Event(), threading.Event(), list[str]()

    def call() -> None:
        begun.set()
        released.wait()
        done.append("begun")

    first = asyncio.ensure_future(lanes.run("disk", call))
    second = asyncio.ensure_future(lanes.run("disk", done.append, "not begun"))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    released.set()
    await lanes.run("disk", done.append, "later")

    assert done == ["begun", "later"]


async def test_closing_waits_for_all_requests() -> None:
    lanes, done = Lanes(), list[int]()
    calls = [asyncio.ensure_future(lanes.run("disk", done.append, n)) for n in range(20)]
    await asyncio.sleep(0)

    lanes.close()

    assert done == list(range(20))
    await asyncio.gather(*calls)


def test_a_call_that_ends_after_its_event_loop_raises_nothing() -> None:
    lanes, begun, released, done = Lanes(), threading.Event(), threading.Event(), list[int]()

    def call() -> None:
        begun.set()
        released.wait()
        done.append(1)

    async def ask() -> None:
        calling = asyncio.ensure_future(lanes.run("disk", call))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        calling.cancel()

    asyncio.run(ask())
    released.set()
    lanes.close()  # a thread that failed would fail this test (filterwarnings)

    assert done == [1]
