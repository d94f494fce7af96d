"""The host is about to go down: its tasks end in order before systemd ends everything at once.

`twine-leave.service` holds up the shutdown and asks here until all have ended (docs/adr/0096).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.runtime.core.records import TASK_UNITS, task_of
from agent.runtime.events import HostEvents
from agent.runtime.units import Units

EXPIRES_S = 900.0
"""Since it was asked for last; a host that is still there then starts its tasks again. logind
waits for 600 s at most (units/logind.conf)."""
_LOOK_S = 5.0


class HostShutdown:
    """Whether this host is about to go down, and what still runs."""

    def __init__(self, units: Units, events: HostEvents, boottime_s: Callable[[], float]) -> None:
        """Start with no shutdown announced."""
        self._units, self._events, self._boottime_s = units, events, boottime_s
        self._until_s = 0.0
        self._told = False

    def now(self) -> bool:
        """Return whether it is about to go down."""
        return self._boottime_s() < self._until_s

    async def begin(self) -> list[str]:
        """End all tasks and start none from now on; return the ids of those that still run."""
        self._until_s = self._boottime_s() + EXPIRES_S
        if not self._told:
            self._told = True
            self._events.add("leaving", "host", "the host is going down: its tasks end")
            self._units.wake_all()
            self._look_later()
        found = await self._units.all(TASK_UNITS)
        return sorted(
            task_of(state.unit)
            for state in found
            if state.active in ("active", "activating", "deactivating", "reloading")
        )

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Tell where the host did not go down after all; tasks start again."""
        if self.now():
            self._look_later()
            return
        self._told = False
        self._events.add("leaving", "host", "the host did not go down: its tasks start again")
        self._units.wake_all()
