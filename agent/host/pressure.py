"""Watches the host's pressure: limits starts, and evicts a task when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agent.host.core.pressure import (
    LOW_PRESSURE,
    PAUSE_S,
    SHORT,
    HostPressure,
    ShortageWatch,
    TaskMemory,
    at_own_limits,
    is_low,
    recently_full,
    starts_at_once,
    victim,
    watched,
    why_evicted,
)
from agent.host.usage import UsageReader
from agent.machine import Cgroups
from agent.resources.core.limits import protected_bytes, reclaim_above_bytes
from agent.runtime.poll_timers import InterruptiblePause
from agent.tasks.oomd import Oomd
from agent.tasks.starts import Starts
from agent.tasks.tasks import HostTasks
from wire.errors import TwineError

log = logging.getLogger(__name__)

CHECK_S = 2.0
"""Pause between checks: the kernel renews its averages every two seconds (psi.rst)."""
IDLE_CHECK_S = 5.0
"""Pause between checks on a calm host while no task starts. It is short enough that no shortage of
memory is missed (`host.core.pressure.LOW_PRESSURE`)."""
AGENT_SLICE = "/hostcritical.slice"
TASKS_SLICE = "/workload.slice"


class Pressure:
    """Checks the host's pressure periodically and acts on it; see `check`."""

    def __init__(
        self,
        cgroups: Cgroups,
        tasks: HostTasks,
        usage: UsageReader,
        starts: Starts,
        oomd: Oomd,
        host: tuple[int, Callable[[], float]],
    ) -> None:
        """`host` is the number of its CPUs and its clock (seconds since boot)."""
        self._cgroups, self._tasks, self._usage = cgroups, tasks, usage
        self._starts, self._oomd = starts, oomd
        self._cpus, self._boottime_s = host
        self._watch = ShortageWatch()
        self._waits = HostPressure()
        self._full: dict[str, float] = {}
        """Tasks that were recently at their own limits, and when."""
        self._own: list[str] = []
        """Tasks that alone caused the last shortage, at their own limits."""
        self._idle_pause = InterruptiblePause()
        starts.on_request = self._idle_pause.end

    async def watch(self) -> None:
        """Check every two seconds until cancelled; less often while there is no pressure."""
        while True:
            await self._pause()
            try:
                await self.check()
            except (TwineError, OSError) as e:
                log.warning("cannot read the host's pressure", extra={"why": str(e)})

    async def _pause(self) -> None:
        """Wait until the next check; on a calm host a starting task ends the longer pause."""
        if self._starts.starting or not is_low(self._waits):
            await asyncio.sleep(CHECK_S)
        else:
            await self._idle_pause.until_round(IDLE_CHECK_S)

    async def check(self) -> None:
        """Limit how many tasks may start by the pressure; evict a task if memory stays short."""
        # Read in the event loop: files of the kernel do not wait for a disk, and switching to a
        # thread costs more than reading them.
        waits = self._waits = self._read()
        self._starts.allow(starts_at_once(self._cpus, waits))
        now_s = self._boottime_s()
        loads = await self._loads() if waits.tasks >= LOW_PRESSURE else []
        self._full = recently_full(self._full, loads, now_s)
        own = at_own_limits(loads, self._full) if waits.tasks >= SHORT else []
        if own and own != self._own:
            why = f"only tasks at their own limits are stalled by it: {', '.join(own)}"
            log.info("memory is short for tasks", extra={"why": why})
        self._own = own
        if own:
            self._watch = ShortageWatch(0, self._watch.evicted_s)
            return
        self._watch, goes = watched(self._watch, waits, now_s)
        if not goes:
            return
        if ended := await self._oomd.recently_killed(PAUSE_S):
            why = "systemd-oomd has just freed memory; no other task is evicted yet"
            log.info("memory is short", extra={"killed": ", ".join(ended), "why": why})
            return
        chosen = victim(loads)
        if chosen is None:
            log.warning("memory is short, and no task exceeds its memory promise")
            return
        await self._tasks.evict(chosen.task_id, why_evicted(chosen, waits))

    def _read(self) -> HostPressure:
        return HostPressure(
            agent=self._cgroups.pressure(AGENT_SLICE, "cpu", full=False),
            tasks=self._cgroups.pressure(TASKS_SLICE, "memory", full=True),
        )

    async def _loads(self) -> list[TaskMemory]:
        used = {u.task_id: u for u in (await self._usage.read()).tasks}
        specs = self._tasks.specs()
        return [
            TaskMemory(
                task_id=status.task_id,
                entitlement=status.entitlement,
                memory_bytes=used[status.task_id].memory_bytes,
                protected_bytes=protected_bytes(specs[status.task_id].resources),
                started_at=status.started_at or 0.0,
                limit_bytes=reclaim_above_bytes(specs[status.task_id]),
                waits=used[status.task_id].memory_pressure,
            )
            for status in self._tasks.all()
            if status.task_id in used and status.task_id in specs
        ]
