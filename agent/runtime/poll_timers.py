"""Pauses between the agent's periodic checks, aligned so that they end together.

A wake-up of an idle agent costs more than most checks do (docs/adr/0114). So a pause of ten seconds
ends for all callers when the clock of the event loop shows a multiple of ten.
"""

from __future__ import annotations

import asyncio

_ROUND_BEGUN = 0.999
"""Share of a round after which the next one counts as begun. A timer may fire a few nanoseconds
early; without this, a caller would be woken twice for the same round."""


def next_round(now_s: float, every_s: float) -> float:
    """Return when the next round of `every_s` seconds begins, at most one round after `now_s`."""
    rounds = now_s / every_s
    return every_s * (int(rounds) + 1 + (rounds % 1 > _ROUND_BEGUN))


async def pause(every_s: float) -> None:
    """Wait until the next round of `every_s` seconds begins."""
    await InterruptiblePause().until_round(every_s)


class InterruptiblePause:
    """A pause that another coroutine may end early."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def end(self) -> None:
        """End the pause, if there is one."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def until_round(self, every_s: float) -> None:
        """Wait until the next round of `every_s` seconds begins, or `end` is called."""
        # Not asyncio.sleep: it reads the clock again, and a timer that is due a microsecond later
        # is another wake-up. Not asyncio.timeout: its exception costs more than a check.
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_at(next_round(loop.time(), every_s), self.end)
        try:
            await self._future
        finally:
            timer.cancel()
            self._future = None
