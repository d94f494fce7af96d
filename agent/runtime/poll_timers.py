"""Pauses between the looks of an agent at its host: those that can end together, do.

A wake-up of an idle agent costs more than what most looks do (docs/adr/0114). So a pause of ten
seconds ends when the clock of the event loop shows a multiple of ten, for all callers.
"""

from __future__ import annotations

import asyncio

_BEGUN = 0.999
"""From this share of a round on the next one counts as begun: a timer is exact to a few
nanoseconds only, and no caller is to be woken twice for the same round."""


def next_round(now_s: float, every_s: float) -> float:
    """Return when the next round of `every_s` begins; after `now_s`, within one round."""
    rounds = now_s / every_s
    return every_s * (int(rounds) + 1 + (rounds % 1 > _BEGUN))


async def pause(every_s: float) -> None:
    """Wait until the next round of `every_s` seconds begins."""
    await Rest().until_round(every_s)


class Rest:
    """A pause that others may end before its time."""

    def __init__(self) -> None:
        self._over: asyncio.Future[None] | None = None

    def end(self) -> None:
        """End the pause, where there is one."""
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def until_round(self, every_s: float) -> None:
        """Wait until the next round of `every_s` seconds begins, or `end` is called."""
        # Not asyncio.sleep: that reads the clock once more, and what is due a microsecond later
        # is a wake-up of its own. Nor asyncio.timeout: its exception costs more than a look.
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        timer = loop.call_at(next_round(loop.time(), every_s), self.end)
        try:
            await self._over
        finally:
            timer.cancel()
            self._over = None
