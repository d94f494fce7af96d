"""Gives machines that an entitlement does not need back to the free pool (AL10, CP3)."""

from __future__ import annotations

import asyncio
import logging

from agent.errors import TwineError
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.core.feasibility import judge
from control_plane.core.machine_pools import FREE, Machine
from control_plane.services.allocator import Allocator
from control_plane.services.region import Region
from control_plane.services.table import ignore

log = logging.getLogger(__name__)
_LOOK_S = 5.0
_CLOCK_S = 1.0
_PAUSE_S = 0.02
"""After each look, so that a flood of news costs few of them."""


class PoolKeeper:
    """Watches for machines without tasks; the allocator takes machines, this gives them back."""

    def __init__(self, region: Region, allocator: Allocator) -> None:
        """Watch nothing yet."""
        self._broker, self._portal = region.broker, region.portal
        self._settings = region.settings
        self._allocator = allocator
        self._index = allocator.index
        self._empty: dict[str, float] = {}
        """Machine of an entitlement without tasks → since when (time of the loop)."""
        self._wake = asyncio.Event()
        self._looked_at = -_CLOCK_S
        allocator.allocations.listen(self._emptied)
        region.broker.listen(lambda name, *_: self._look_soon(name), loaded=ignore)
        region.portal.table.listen(lambda *_: self._wake.set())

    async def run(self) -> None:
        """Give machines back until cancelled."""
        for name in self._index.machines:
            self._look_soon(name)
        while True:
            try:
                async with asyncio.timeout(min(self._settings.resync_s, _LOOK_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._look()
            except Exception:
                log.exception("giving machines back failed")
            await asyncio.sleep(_PAUSE_S)

    async def release_idle(self, entitlement: str) -> None:
        """Give back all machines of an entitlement on which nothing is placed."""
        for record in self._broker.held(entitlement):
            machine = self._index.machines.get(record.machine)
            if machine is not None and not machine.jobs:
                await self._release(machine)

    def _emptied(self, machines: list[Machine]) -> None:
        now = asyncio.get_running_loop().time()
        for machine in machines:
            self._empty[machine.name] = now
        self._wake.set()

    def _look_soon(self, name: str) -> None:
        machine = self._index.machines.get(name)
        if machine is not None and machine.pool != FREE and not machine.jobs:
            self._empty.setdefault(name, asyncio.get_running_loop().time())
            self._wake.set()

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= _CLOCK_S:
            self._looked_at = now
            await self._allocator.look_at_clock()
        for name, since in list(self._empty.items()):
            machine = self._index.machines.get(name)
            if machine is None or machine.pool == FREE or machine.jobs:
                del self._empty[name]
            elif self._is_superfluous(machine, now - since):
                await self._release(machine)
        await self._let_broken_go()

    def _is_superfluous(self, machine: Machine, idle_s: float) -> bool:
        """Return whether a machine without tasks goes back now, and not later."""
        record = self._broker.table.find(machine.name)
        entitlement = self._portal.table.find(machine.pool)
        if record is None or record.hold is not None or record.loan is not None:
            return False
        if entitlement is None or record.profile_wanted != entitlement.spec.host_profile:
            return True
        if self._allocator.over_quota(machine.pool):
            return True
        if machine in self._allocator.going(machine.pool):
            return True
        return idle_s >= self._settings.give_back_after_s

    async def _let_broken_go(self) -> None:
        """Exchange machines that are down where their entitlement may hold no others.

        Their tasks are lost already and wait for room; the free pool has a machine for them.
        """
        pools = {request.pool for request in self._allocator.waiting.requests()}
        for pool in pools:
            quota = self._allocator.quota(pool)
            if quota.machines is None or self._index.pool(pool).size < quota.machines:
                continue
            for record in self._broker.held(pool):
                machine = self._index.machines.get(record.machine)
                if machine is None or not self._is_lost(record) or not self._has_spare(pool):
                    continue
                await self._release(machine)

    def _is_lost(self, record: MachineRecord) -> bool:
        placed = self._allocator.directory.tasks(record.machine).values()
        return (
            record.state is not MachineState.UP
            and record.loan is None
            and all(task.lost or task.leaving for task in placed)
        )

    def _has_spare(self, pool: str) -> bool:
        """Return whether the free pool has a machine for a task that waits in this one."""
        requests = [r for r in self._allocator.waiting.requests() if r.pool == pool]
        return any(
            not judge(group.demand, machine, machine) and self._allocator.may_hold(pool, machine)
            for request in requests
            for group in request.groups
            for machine in self._index.fitting(group.demand, (FREE,))
        )

    async def _release(self, machine: Machine) -> None:
        """Give one machine back; nothing is placed there from this moment on."""
        name = machine.name
        self._index.block(name, "is being given back")
        try:
            await self._broker.release(name, revision=self._broker.table.revision(name))
        except TwineError as e:
            log.info("machine not released", extra={"machine": name, "reason": str(e)})
        else:
            self._empty.pop(name, None)
        finally:
            self._allocator.refresh([name])
