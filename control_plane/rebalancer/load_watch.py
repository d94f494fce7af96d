"""Reads the use of tasks and the power draw of machines from agents, in rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from control_plane.agents.pool import AgentPool
from control_plane.agents.region import Region
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import STEP
from control_plane.rebalancer.core.loads import REST_SHARE, Loads, modelled_w
from control_plane.rebalancer.core.machine_use import Load
from control_plane.rebalancer.ports import ShardedPlaces
from wire.errors import TwineError

log = logging.getLogger(__name__)
_READS_AT_ONCE = 10
_PAUSE_S = 0.1
"""Pause after `_READS_AT_ONCE` readings: at most 100 agents per second leave time for other work. A
round of 50,000 machines then takes 500 s."""
_VALID_ROUNDS = 3.0
"""Rounds for which a load is valid after it was read: two answers may be lost."""


class LoadWatch:
    """Reads agents in rounds. Loads are unknown until two rounds are over."""

    def __init__(self, region: Region, places: ShardedPlaces, agents: AgentPool) -> None:
        settings = region.settings.rebalance
        self._region, self._places, self._agents = region, places, agents
        self._every_s, self._within_s = settings.measure_s, _VALID_ROUNDS * settings.measure_s
        self.loads = Loads(settings.smooth_s)

    async def run(self) -> None:
        """Read all machines with tasks in each round, until cancelled."""
        runtime = self._region.runtime
        while True:
            began = runtime.now()
            names = await self._machines_with_tasks()
            for start in range(0, len(names), _READS_AT_ONCE):
                await asyncio.gather(*map(self._read, names[start : start + _READS_AT_ONCE]))
                await runtime.sleep(_PAUSE_S)
            took_s = runtime.now() - began
            self._within_s = _VALID_ROUNDS * max(self._every_s, took_s)
            for _ in self.loads.forget(names, runtime.now(), self._within_s):
                await runtime.checkpoint()
            await runtime.sleep(max(1.0, self._every_s - took_s))

    async def _machines_with_tasks(self) -> list[str]:
        """Return the machines that have tasks."""
        found = []
        for number, machine in enumerate(self._places.machines()):
            if machine.jobs:
                found.append(machine.name)
            if number % STEP == STEP - 1:
                await self._region.runtime.checkpoint()
        return found

    async def _read(self, name: str) -> None:
        record, machine = self._region.broker.table.find(name), self._places.find(name)
        if record is None or machine is None or not self._region.observations.peek(name).answering:
            return
        try:
            usages = await (await self._agents.get(record)).get_usage()
        except TwineError as e:
            log.debug("load not read", extra={"machine": name, "reason": str(e)})
            return
        self.loads.read(name, machine.capacity, usages, self._region.runtime.now())

    # -- for plans

    def measured(self, job: str, tasks: Sequence[int]) -> list[Load | None]:
        """Return the load of each task; None: it was not read recently.

        A moved task keeps its load until it is read on its new machine, because RRU do not depend
        on the machine. Network use is 0 where traffic cannot be attributed to tasks.
        """
        since = self._region.runtime.now() - self._within_s
        return [
            (load.rru, load.memory_bytes, load.network_mbps or 0.0) if load is not None else None
            for load in self.loads.of_tasks(job, tasks, since)
        ]

    def age_s(self) -> float | None:
        """Return the age in seconds of the oldest valid load; None: there is none."""
        return self.loads.oldest_s(self._region.runtime.now(), self._within_s)

    def watts(self, machine: Machine, rru: float) -> tuple[float, bool]:
        """Return a machine's power draw at a CPU use in RRU, and whether it was measured."""
        nominal, size = machine.capacity.power_w, machine.capacity.rru
        read = self.loads.watts_of(machine.name, self._region.runtime.now(), self._within_s)
        if read is not None and nominal:
            return read + REST_SHARE * nominal, True
        return modelled_w(nominal, rru / size if size else 0.0), False
