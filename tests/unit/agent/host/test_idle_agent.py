"""An agent without work sleeps: each of its wake-ups costs all hosts (docs/adr/0114)."""

from __future__ import annotations

import asyncio
import selectors
from pathlib import Path
from typing import Any

import pytest
from builders import FakeHost, a_spec, running

from agent.api import Limits
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import InterruptiblePause, next_round

TASKS = 20
POLL_S = 30.0


class Selector(selectors.SelectSelector):
    """Sleeps only as long as sockets need to answer; the clock advances by the requested time.

    It does not advance while a thread makes a call: on a loaded machine the call would seem to
    take longer than the pause between two rounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s, self.sleeps, self.calls = 0.0, 0, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.calls or timeout is None or timeout <= 0.02:
            return super().select(timeout)
        ready = super().select(0.02)
        if not ready:
            self.skipped_s += timeout - 0.02
            self.sleeps += 1
        return ready


class Loop(asyncio.SelectorEventLoop):
    """Counts the sleeps in which no thread had work."""

    def __init__(self) -> None:
        self.virtual = Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return super().time() + self.virtual.skipped_s


def test_an_idle_agent_sleeps_most_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has running tasks, and a control plane that waits for its events."""
    hops: list[str] = []
    run = Lanes.run

    async def counted(self: Lanes, lane: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        hops.append(lane)
        loop.virtual.calls += 1
        try:
            return await run(self, lane, call, *args, **kwargs)
        finally:
            loop.virtual.calls -= 1

    monkeypatch.setattr(Lanes, "run", counted)
    host = FakeHost(tmp_path)
    host.give_image()
    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        sleeps, lanes = runner.run(_a_quiet_minute(host, loop, hops))

    # A dozen rounds of five seconds, two checks of all units, and two polls with their sweeps. The
    # figure includes the wake-ups of the client and of this test.
    assert sleeps <= 30
    # Reads that may wait for a disk have threads: two of them every ten seconds.
    assert lanes.count("systemd") == 2
    assert set(lanes) == {"systemd", "disk", "profile"}
    assert len(lanes) <= 2 + 7 + 7


async def _a_quiet_minute(host: FakeHost, loop: Loop, hops: list[str]) -> tuple[int, list[str]]:
    async with host.agent() as client:
        for n in range(TASKS):
            await client.put_task(f"web-{n}", a_spec(limits=Limits(memory_max_bytes=8 << 20)))
        for n in range(TASKS):
            await running(client, f"web-{n}")

        async def poll() -> None:
            after = (await client.get_events(0)).latest
            while True:
                after = (await client.get_events(after, wait_s=POLL_S)).latest

        polling = asyncio.ensure_future(poll())
        # The work that the starts left is done, and the minute neither begins nor ends at a round.
        await asyncio.sleep(next_round(loop.time() + 45, POLL_S) + 12.5 - loop.time())
        before = loop.virtual.sleeps
        hops.clear()
        await asyncio.sleep(60)
        found = loop.virtual.sleeps - before, list(hops)
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return found


def test_pauses_of_one_length_end_together_and_none_is_nothing() -> None:
    assert next_round(0.0, 10.0) == 10.0
    assert next_round(13.7, 10.0) == next_round(19.9, 10.0) == next_round(15.0, 5.0) == 20.0
    assert next_round(19.9999, 10.0) == 30.0
    assert all(next_round(n * 0.37, 0.01) > n * 0.37 for n in range(1000))


async def test_a_rest_can_be_ended_early() -> None:
    rest = InterruptiblePause()
    rest.end()
    resting = asyncio.ensure_future(rest.until_round(3600.0))
    await asyncio.sleep(0)
    rest.end()
    rest.end()
    await asyncio.wait_for(resting, 60)
    await rest.until_round(0.01)
