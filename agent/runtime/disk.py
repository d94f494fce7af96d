"""Watches the disk of the state folder. A failing disk is a reported state, not a crash."""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path

from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes, PatientCall
from agent.runtime.poll_timers import pause
from agent.runtime.reserve import Reserve
from wire.units import about_size

log = logging.getLogger(__name__)

FREE_RESERVE_BYTES = 128 << 20
"""Space that an arriving image must leave free. On a full disk tasks cannot write, and the agent
cannot record a stop."""
ANSWER_S = 5.0
"""Seconds until a file system that does not answer counts as a problem. A busy disk answers within
this time: only its counters in memory are read."""
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
        self._reading = PatientCall(lanes, "disk", lambda: _problem(state))
        self._filling = PatientCall(lanes, "journal", reserve.fill)
        self._events = events
        self.is_hung = False
        """Whether the file system did not answer the last check."""
        self.problem = ""
        """Text that describes the problem of the disk; empty if there is none."""

    async def check(self) -> None:
        """Check the disk, and report a problem that appeared, changed or ended.

        A smaller number alone is no other problem: it changes with each check. The file system is
        read in a thread. If it does not answer within `ANSWER_S`, that is the problem until it
        does. No other reading begins before that.
        """
        try:
            problem, self.is_hung = await self._reading.within(ANSWER_S), False
        except TimeoutError:
            problem = f"the file system of {self._state} does not answer: changes wait for it"
            self.is_hung = True
        before, self.problem = self.problem, problem
        if _without_sizes(self.problem) == _without_sizes(before):
            return
        if self.problem:
            log.error("the agent's disk has a problem", extra={"why": self.problem})
        else:
            log.info("the agent's disk is healthy again")
        self._events.add("agent", "disk", self.problem or "the disk is healthy again")

    async def watch(self) -> None:
        """Check the disk periodically, and keep the reserve filled."""
        try:
            for checks in itertools.count():
                await self.check()
                if not self._reserve.is_held or checks % _CHECKS_TO_FILL == 0:
                    await self._fill()
                await pause(CHECK_S)
        finally:
            self._reading.cancel()
            self._filling.cancel()

    async def _fill(self) -> None:
        """Fill the reserve, unless the disk has a problem. A disk that hangs delays no check."""
        if self.problem:
            return
        try:
            await self._filling.within(ANSWER_S)
        except TimeoutError:
            return
        except OSError as e:
            log.warning("cannot reserve space for records", extra={"why": str(e)})


def _without_sizes(problem: str) -> str:
    return re.sub(r"[0-9.]+[A-Za-z]+ left", "left", problem)


def _problem(state: Path) -> str:
    try:
        stats = os.statvfs(state)
    except OSError as e:
        return f"the file system of {state} cannot be read: {e.strerror}"
    if stats.f_flag & os.ST_RDONLY:
        return f"the file system of {state} is read-only: tasks continue to run, but changes fail"
    free = stats.f_bavail * stats.f_frsize
    if free < FREE_RESERVE_BYTES:
        return (
            f"the file system of {state} has {about_size(free)} left: images are "
            "refused, and soon tasks will be"
        )
    return ""
