"""Gives machines that an entitlement does not need back to the free pool (AL10, CP3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.machine_pools import Machine
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import ignore
from wire.errors import TwineError

log = logging.getLogger(__name__)
_ROUND_S = 5.0
"""The longest time between two rounds."""
_CLOCK_S = 1.0
"""The shortest time between two calls of `Allocator.update_with_time`."""
_PAUSE_S = 0.02
"""Pause after each round, which bounds the number of rounds during many changes."""


class PoolKeeper:
    """Watches for machines without tasks, and gives them back."""

    def __init__(self, region: Region, allocator: Allocator) -> None:
        self._broker, self._portal = region.broker, allocator.portal
        self._owns = region.owns
        self._settings, self._runtime = region.settings, region.runtime
        self._allocator = allocator
        self._index = allocator.index
        self._limit = region.limits.of(
            LimitName.TAKE_AWAY, self._settings.take_away_per_s, self._settings.take_away_burst
        )
        self._empty: dict[str, float] = {}
        """Machine of an entitlement without tasks → since when (time of the loop)."""
        self._wake = asyncio.Event()
        self._updated_at = -_CLOCK_S
        self.keeps: Callable[[MachineRecord], bool] = lambda _: False
        """Returns whether a machine stays for another reason; other components set this."""
        allocator.allocations.listen(self._emptied)
        region.broker.listen(lambda name, *_: self._watch_if_empty(name), loaded=ignore)
        allocator.portal.table.listen(lambda *_: self._wake.set())

    async def run(self) -> None:
        """Give unneeded machines back until cancelled."""
        for name in self._broker.table:  # the index has another order in each process
            self._watch_if_empty(name)
            await self._runtime.checkpoint()
        while True:
            try:
                async with asyncio.timeout(min(self._settings.resync_s, _ROUND_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._release_superfluous()
            except Exception:
                log.exception("the release of machines failed")
            await asyncio.sleep(_PAUSE_S)

    async def release_idle(self, entitlement: str) -> None:
        """Give back all machines of an entitlement on which nothing is placed."""
        for record in self._broker.held(entitlement):
            machine = self._index.machines.get(record.machine)
            if machine is not None and not machine.jobs:
                await self._give_back(machine)

    def _emptied(self, machines: list[Machine]) -> None:
        now = self._runtime.now()
        for machine in machines:
            self._empty[machine.name] = now
        self._wake.set()

    def watch_pool(self, pool: str) -> None:
        """Check all machines of a pool that came to this shard."""
        for record in self._broker.held(pool):
            self._watch_if_empty(record.machine)

    def _watch_if_empty(self, name: str) -> None:
        machine = self._index.machines.get(name)
        if machine is None or machine.pool == FREE or not self._owns(machine.pool):
            return
        if not machine.jobs:
            self._empty.setdefault(name, self._runtime.now())
            self._wake.set()

    async def _release_superfluous(self) -> None:
        now = self._runtime.now()
        if now - self._updated_at >= _CLOCK_S:
            self._updated_at = now
            await self._allocator.update_with_time()
        over: dict[str, bool] = {}
        """Pool → whether it holds more than its quota."""
        for name, since in list(self._empty.items()):
            machine = self._index.machines.get(name)
            is_ours = machine is not None and self._owns(machine.pool)
            if machine is None or not is_ours or machine.pool == FREE or machine.jobs:
                del self._empty[name]
                continue
            pool = machine.pool
            if pool not in over:
                over[pool] = self._allocator.quotas.is_over(pool)
            if self._is_superfluous(machine, now - since, is_over=over[pool]):
                await self._release_within_limit(machine)
                over.pop(pool)
            await self._runtime.checkpoint()
        await self._release_broken()

    def _is_superfluous(self, machine: Machine, idle_s: float, *, is_over: bool) -> bool:
        """Return whether a machine without tasks is given back now."""
        record = self._broker.table.find(machine.name)
        entitlement = self._portal.table.find(machine.pool)
        if record is None or record.hold is not None or record.loan is not None:
            return False
        if self._still_runs(record) or self.keeps(record):
            return False
        if entitlement is None or record.profile_wanted != entitlement.spec.host_profile:
            return True
        if is_over or self._allocator.must_be_left(machine.name):
            return True
        return idle_s >= self._settings.give_back_after_s

    def _still_runs(self, record: MachineRecord) -> bool:
        """Return whether tasks that moved away still run on a machine; then it must stay.

        Their claims may be on other machines while their records still have them here. A machine
        that is down is not kept: its state is unknown.
        """
        directory = self._allocator.directory
        return record.state is MachineState.UP and bool(
            directory.tasks(record.machine)
            or directory.leaving(record.machine)
            or self._allocator.usability.unexpected_tasks(record.machine)
            or self._allocator.usability.unclaimed(record.machine)
        )

    async def _release_broken(self) -> None:
        """Release machines that are down if their entitlement needs the quota for others.

        The tasks of these machines are lost and wait for room, and the free pool has a machine.
        """
        pools = dict.fromkeys(request.pool for request in self._allocator.waiting.requests())
        for pool in pools:
            quota = self._allocator.quotas.of(pool)
            if quota.machines is None or self._index.pool(pool).size < quota.machines:
                continue
            for name in [record.machine for record in self._broker.held(pool)]:
                record = self._broker.table.find(name)  # again: it may have changed meanwhile
                machine = self._index.machines.get(name)
                if record is None or machine is None or not self._is_lost(record):
                    continue
                if self._has_spare(pool):
                    await self._release_within_limit(machine)

    def _is_lost(self, record: MachineRecord) -> bool:
        placed = self._allocator.directory.tasks(record.machine).values()
        return (
            record.state is not MachineState.UP
            and record.loan is None
            and all(task.lost or task.leaving for task in placed)
        )

    def _has_spare(self, pool: str) -> bool:
        """Return whether the free pool has a machine for a task that waits in this pool."""
        requests = [r for r in self._allocator.waiting.requests() if r.pool == pool]
        return any(
            not judge(group.demand, machine, machine)
            and self._allocator.quotas.allows(pool, machine)
            for request in requests
            for group in request.groups
            for machine in self._index.fitting(group.demand, (FREE,))
        )

    async def _release_within_limit(self, machine: Machine) -> None:
        """Give one machine back, unless the rate limit is reached: then a later round does it."""
        if self._limit.take(self._runtime.now()) == 0:
            await self._give_back(machine)

    async def _give_back(self, machine: Machine) -> None:
        """Give one machine back, or log why that failed."""
        name = machine.name
        try:
            await self._allocator.give_back(machine)
        except TwineError as e:
            log.info("machine not released", extra={"machine": name, "reason": str(e)})
        else:
            self._empty.pop(name, None)
