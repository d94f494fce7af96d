"""Ends all tasks in order when the host goes down, before systemd ends everything at once.

`twine-leave.service` delays the shutdown and calls `begin` until all have ended (docs/adr/0096).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.runtime.core.records import TASK_UNITS, task_of
from agent.runtime.events import HostEvents
from agent.runtime.units import Units

EXPIRES_S = 900.0
"""A host that still runs this long after the last call of `begin` starts its tasks again. logind
waits for at most 600 s (units/logind.conf)."""
_CHECK_S = 5.0


class HostShutdown:
    """Whether this host is about to go down, and which tasks still run."""

    def __init__(self, units: Units, events: HostEvents, boottime_s: Callable[[], float]) -> None:
        """Start with no shutdown announced."""
        self._units, self._events, self._boottime_s = units, events, boottime_s
        self._until_s = 0.0
        self._announced = False

    def now(self) -> bool:
        """Return whether the host is about to go down."""
        return self._boottime_s() < self._until_s

    async def begin(self) -> list[str]:
        """End all tasks and start none from now on; return the ids of tasks that still run."""
        self._until_s = self._boottime_s() + EXPIRES_S
        if not self._announced:
            self._announced = True
            self._events.add("leaving", "host", "the host is going down: its tasks end")
            self._units.wake_all()
            self._check_later()
        states = await self._units.all(TASK_UNITS)
        return sorted(
            task_of(state.unit)
            for state in states
            if state.active in ("active", "activating", "deactivating", "reloading")
        )

    def _check_later(self) -> None:
        asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        """Report a host that did not go down; its tasks start again."""
        if self.now():
            self._check_later()
            return
        self._announced = False
        self._events.add("leaving", "host", "the host did not go down: its tasks start again")
        self._units.wake_all()
