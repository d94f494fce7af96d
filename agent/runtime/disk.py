"""Whether the state folder can be written: a disk that fails is a state, not a crash."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import pause
from agent.runtime.reserve import Reserve
from wire.units import about_size

log = logging.getLogger(__name__)

FREE_RESERVE_BYTES = 128 << 20
"""PlannedRoom that an arriving image must leave: with none left, tasks cannot write either, and no
record of a stop could be kept."""
LOOK_S = 10.0
"""How often the disk is checked, in s; a write that is refused meanwhile has its own error."""
_LOOKS_TO_FILL = 60
"""After so many checks the reserve is filled although it counts as held: it may have been removed.
"""


class StateDisk:
    """The file system of the agent's state folder."""

    def __init__(self, state: Path, events: HostEvents, reserve: Reserve, lanes: Lanes) -> None:
        """Tell `events` what becomes of it; hold the reserve while there is room for it."""
        self._state = state
        self._reserve = reserve
        self._lanes = lanes
        self._events = events
        self.problem = ""
        """In words what is wrong with it; empty while all is well."""

    def look(self) -> None:
        """Read how it is; tell where that is not as it was."""
        before, self.problem = self.problem, _problem(self._state)
        if self.problem == before:
            return
        if self.problem:
            log.error("the agent's disk has a problem", extra={"why": self.problem})
        else:
            log.info("the agent's disk is well again")
        self._events.add("agent", "disk", self.problem or "the disk is well again")

    async def watch(self) -> None:
        """Check the disk periodically, and keep the reserve filled."""
        for looks in itertools.count():
            self.look()
            due = not self._reserve.is_held or looks % _LOOKS_TO_FILL == 0
            if due and not self.problem:
                try:
                    await self._lanes.run("journal", self._reserve.fill)
                except OSError as e:
                    log.warning("no room can be kept for records", extra={"why": str(e)})
            await pause(LOOK_S)


def _problem(state: Path) -> str:
    try:
        found = os.statvfs(state)
    except OSError as e:
        return f"the file system of {state} cannot be read: {e.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"the file system of {state} is read-only: tasks run on, nothing can be changed"
    free = found.f_bavail * found.f_frsize
    if free < FREE_RESERVE_BYTES:
        return (
            f"the file system of {state} has {about_size(free)} left: no image is taken in, "
            "and soon no task"
        )
    return ""
