"""Watches the host's pressure: starts are let in by it, and a task goes when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agent.core.pressure import (
    Load,
    Waits,
    Watch,
    kept_bytes,
    starts_at_once,
    victim,
    watched,
    why_evicted,
)
from agent.errors import TwineError
from agent.machine import Cgroups
from agent.services.offload import Lanes
from agent.services.starts import Starts
from agent.services.tasks import Tasks
from agent.services.usage import UsageReader

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""The kernel renews its averages every two seconds (psi.rst)."""
AGENT_SLICE = "/hostcritical.slice"
TASKS_SLICE = "/workload.slice"


class Pressure:
    """Looks again and again; see `look`."""

    def __init__(
        self,
        cgroups: Cgroups,
        tasks: Tasks,
        usage: UsageReader,
        starts: Starts,
        lanes: Lanes,
        host: tuple[int, Callable[[], float]],
    ) -> None:
        """Take what is read and told; `host` is its CPUs and its clock (seconds since boot)."""
        self._cgroups, self._tasks, self._usage = cgroups, tasks, usage
        self._starts, self._lanes = starts, lanes
        self._cpus, self._boottime_s = host
        self._watch = Watch()

    async def watch(self) -> None:
        """Look every two seconds, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (TwineError, OSError) as e:
                log.warning("cannot look at the host's pressure", extra={"why": str(e)})

    async def look(self) -> None:
        """Let as many start as the pressure allows; have a task go where memory stays short."""
        waits = await self._lanes.run("usage", self._read)
        self._starts.allow(starts_at_once(self._cpus, waits))
        self._watch, goes = watched(self._watch, waits, self._boottime_s())
        if not goes:
            return
        chosen = victim(await self._loads())
        if chosen is None:
            log.warning("memory is short, and no task has more than it was promised")
            return
        await self._tasks.evict(chosen.task_id, why_evicted(chosen, waits))

    def _read(self) -> Waits:
        return Waits(
            agent=self._cgroups.pressure(AGENT_SLICE, "cpu", whole=False),
            tasks=self._cgroups.pressure(TASKS_SLICE, "memory", whole=True),
        )

    async def _loads(self) -> list[Load]:
        used = {u.task_id: u.memory_bytes for u in (await self._usage.read()).tasks}
        specs = self._tasks.specs()
        return [
            Load(
                task_id=status.task_id,
                entitlement=status.entitlement,
                memory_bytes=used[status.task_id],
                kept_bytes=kept_bytes(specs[status.task_id].resources),
                started_at=status.started_at or 0.0,
            )
            for status in self._tasks.all()
            if status.task_id in used and status.task_id in specs
        ]
