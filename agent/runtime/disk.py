"""Watches the disk of the state folder. A failing disk is a reported state, not a crash."""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path

from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import pause
from agent.runtime.reserve import Reserve
from wire.units import about_size

log = logging.getLogger(__name__)

FREE_RESERVE_BYTES = 128 << 20
"""Space that an arriving image must leave free. On a full disk tasks cannot write, and the agent
cannot record a stop."""
CHECK_S = 10.0
"""Seconds between two checks of the disk; a write that fails in between raises its own error."""
_CHECKS_TO_FILL = 60
"""The reserve is filled again after this many checks, even if it counts as held: another program
may have removed it."""


class StateDisk:
    """The file system of the agent's state folder."""

    def __init__(self, state: Path, events: HostEvents, reserve: Reserve, lanes: Lanes) -> None:
        """Report problems to `events`; keep `reserve` filled while there is space."""
        self._state = state
        self._reserve = reserve
        self._lanes = lanes
        self._events = events
        self.problem = ""
        """Text that describes the problem of the disk; empty if there is none."""

    def check(self) -> None:
        """Check the disk, and report a problem that appeared, changed or ended.

        A smaller number alone is no other problem: it changes with each check.
        """
        before, self.problem = self.problem, _problem(self._state)
        if _kind(self.problem) == _kind(before):
            return
        if self.problem:
            log.error("the agent's disk has a problem", extra={"why": self.problem})
        else:
            log.info("the agent's disk is healthy again")
        self._events.add("agent", "disk", self.problem or "the disk is healthy again")

    async def watch(self) -> None:
        """Check the disk periodically, and keep the reserve filled."""
        for checks in itertools.count():
            self.check()
            due = not self._reserve.is_held or checks % _CHECKS_TO_FILL == 0
            if due and not self.problem:
                try:
                    await self._lanes.run("journal", self._reserve.fill)
                except OSError as e:
                    log.warning("cannot reserve space for records", extra={"why": str(e)})
            await pause(CHECK_S)


def _kind(problem: str) -> str:
    return re.sub(r"[0-9.]+[A-Za-z]+ left", "left", problem)


def _problem(state: Path) -> str:
    try:
        found = os.statvfs(state)
    except OSError as e:
        return f"the file system of {state} cannot be read: {e.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"the file system of {state} is read-only: tasks continue to run, but changes fail"
    free = found.f_bavail * found.f_frsize
    if free < FREE_RESERVE_BYTES:
        return (
            f"the file system of {state} has {about_size(free)} left: images are "
            "refused, and soon tasks will be"
        )
    return ""
