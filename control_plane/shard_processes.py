"""The shards of a region in several processes: how an entitlement moves from one to another.

All processes communicate through the store, which each follows (docs/adr/0153). The core announces
a move. The process of the old shard waits until its operations have ended, and writes a release.
The core writes the new owner, which is the commit point. The process of the new shard reads the
records and continues. From the announcement on, no shard owns the entitlement. A process that
crashes at any step starts from the written state: the move is withdrawn, or completed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from agent.api import TaskSpec
from control_plane.agents.core.commands import Stop
from control_plane.allocator import handover
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.machine_pools import Machine
from control_plane.api.jobs import JobRecord
from control_plane.api.ownership import EntitlementOwner, ShardLoad
from control_plane.running_shards import IDLE_S, RunningShards
from control_plane.runtime.loops import Loops
from control_plane.shard_lookup import RunningShard, ShardParts
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import RoleLeaders
from control_plane.store.records import JOBS
from wire.errors import Busy, Conflict, TwineError

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_POLL_S = 0.05
_RELEASE_S = IDLE_S + 2.0
"""Seconds that the core waits for a shard's process, which waits `IDLE_S` for allocations."""
_RETRY_S = 1.0
_BEHIND_S = 5.0
"""Seconds that held machines wait until this process has followed earlier holds of others."""
_UNKNOWN_KEPT = 1_000
"""Tasks of unknown jobs that are cached; for older ones the store is read again."""


class ShardProcesses(RunningShards):
    """The shards that this process runs, where other processes run others."""

    def __init__(
        self,
        parts: ShardParts,
        ownership: OwnershipMap,
        allocators: Mapping[int, Allocator],
        processes: RoleLeaders,
        follow_machine: Callable[[str], None],
    ) -> None:
        """`follow_machine(name)` makes the health check follow a machine, or stop doing so."""
        super().__init__(parts, ownership, allocators)
        self._processes, self._role = processes, processes.own
        self._follow_machine, self._has_started = follow_machine, False
        self._runtime = parts.region.runtime
        self._unknown_tasks: dict[Stop, bool] = {}
        """Stop of a task of an unknown job → whether the store confirmed that the job is gone."""
        self.ask_ready: Callable[[int], Awaitable[bool]] = self._is_led
        """Returns whether the process of a shard accepts requests."""
        ownership.table.listen(self._owner_changed)
        parts.jobs.listen(self._job_changed)
        for allocator in allocators.values():
            allocator.allocations.confirm = partial(self._confirm_holds, allocator)

    @property
    def count(self) -> int:
        """Return the number of shards of the region: those that are configured or have led."""
        return max(super().count, *(n + 1 for n in (0, *self._processes.shards())))

    def check_map(self) -> None:
        """Raise `ConfigError` if the map contradicts the settings; the core's scopes count."""
        self._ownership.check(self.count, self._parts.portal.table, are_processes=True)
        if self._role.is_core:
            self.scopes.check_owners()

    async def is_ready(self, shard: int) -> bool:
        """Return whether a shard accepts requests; asks its process."""
        return await super().is_ready(shard) or await self.ask_ready(shard)

    async def _is_led(self, shard: int) -> bool:
        """Return whether a shard has a leader, as far as this process has followed the store."""
        return self._processes.leader_of(shard) is not None

    def start(self, loops: Loops, number: Callable[[], int]) -> None:
        """Start the loops of all shards, and continue moves that an earlier process began."""
        super().start(loops, number)
        self._has_started = True
        for record in self._ownership.table.records():
            if record.moving_to is None:
                continue
            if self._role.is_core:
                self._runtime.spawn("shard move", self._withdraw(record.entitlement))
            elif self._role.runs(record.shard):
                self._runtime.spawn("shard move", self._release(record.entitlement))

    def loads(self) -> list[ShardLoad]:
        """Return the load of each shard, and which process leads it."""
        loads = []
        for load in super().loads():
            by = self._processes.leader_of(load.shard)
            loads.append(load if by is None else replace(load, host=by.host, since=by.since))
        return loads

    async def assign_unused(self, entitlement: str) -> None:
        """Give an unused entitlement to the least loaded shard; only the core does this."""
        if self._role.is_core:
            await super().assign_unused(entitlement)

    async def _move(self, pool: str, to: int) -> None:
        source = self._ownership.shard_of(pool)
        try:
            await self._ownership.announce(pool, to)
            if await self._may_own(source):
                await self._wait_released(pool, source)
            await self._write_owner(pool, to)
        except TwineError:  # also where it is unknown whether it was announced
            await self._withdraw(pool)
            raise

    async def _may_own(self, shard: int) -> bool:
        """Return whether a process of the shard may have to release an announced entitlement.

        A process that begins to lead afterwards reads the announcement and does not own it.
        """
        return await super().is_ready(shard) or await self._processes.has_led(shard)

    async def _wait_released(self, pool: str, source: int) -> None:
        ends = self._runtime.now() + _RELEASE_S
        while not await self._ownership.is_released(pool):
            if self._runtime.now() >= ends:
                raise Busy(
                    f"cannot move entitlement {pool!r}: shard {source} did not release it within "
                    f"{_RELEASE_S:g} s; nothing was changed",
                    hint="`twinectl shard list` shows the shards that answer; try again",
                )
            await self._runtime.sleep(_POLL_S)

    async def _withdraw(self, pool: str) -> None:
        """Withdraw the announced move of an entitlement; retries until the store has it."""
        fields = {"entitlement": pool}
        await self._retry(
            "move not withdrawn", fields, lambda: self._ownership.announce(pool, None)
        )

    async def _retry(
        self, failed: str, fields: Mapping[str, str], work: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Return the result of work on the store; logs each failure, and retries after a pause."""
        while True:
            try:
                return await work()
            except TwineError as e:
                log.warning(failed, extra={**fields, "reason": str(e)})
                await self._runtime.sleep(_RETRY_S)

    async def _confirm_holds(self, allocator: Allocator, taken: list[Machine], pool: str) -> bool:
        """Return whether machines that are held for a pool are not promised to other pools.

        Other processes may hold machines at the same time. Each follows the store up to its own
        holds, so the later of two processes sees both.
        """
        following = self._processes.following
        at = self._parts.jobs.store.revision()
        if following is not None and not await following.wait_reached(at, _BEHIND_S):
            raise Busy(
                f"cannot take {len(taken)} machines for {pool!r}: this process is more than "
                f"{_BEHIND_S:g} s behind the store",
                hint="it is retried",
            )
        return await allocator.allocations.in_steps(allocator.quotas.kept_without(pool, taken))

    # -- tasks of unknown jobs

    def _command_for(self, machine: str, task: str) -> TaskSpec | Stop | None:
        """Return the command about a task for a machine.

        A shard writes a new job before its tasks start. But this process may not have followed the
        write of the job, or of the machine's assignment. So it reads the job from the store before
        it stops a task of an unknown job (docs/adr/0215).
        """
        found, job = super()._command_for(machine, task), task.rpartition("-")[0]
        if not isinstance(found, Stop) or self._parts.jobs.find(job) is not None:
            return found
        if found not in self._unknown_tasks:
            while len(self._unknown_tasks) >= _UNKNOWN_KEPT:
                del self._unknown_tasks[next(iter(self._unknown_tasks))]
            self._unknown_tasks[found] = False
            self._runtime.spawn("unknown task", self._read_job(found, job))
        return found if self._unknown_tasks[found] else None

    async def _read_job(self, stop: Stop, job: str) -> None:
        """Stop a task if the store has no record of its job; retries a failed read."""
        store = self._parts.jobs.store
        found = await self._retry("job not read", {"job": job}, lambda: store.get(JOBS + job))
        self._unknown_tasks.pop(stop, None)
        if found is None:
            self._unknown_tasks[stop] = True
            for shard in self.all:
                shard.scheduler.stop_unknown_tasks(stop.machine)

    # -- changes of the ownership map

    def _owner_changed(
        self, pool: str, before: EntitlementOwner | None, after: EntitlementOwner | None
    ) -> None:
        if not self._has_started or after is None:
            return
        was = before.shard if before is not None else 0
        if after.moving_to is not None:
            if self._role.runs(after.shard):
                self._runtime.spawn("shard move", self._release(pool))
        elif was != after.shard:
            self._change_owner(pool, self._by_number.get(was), self._by_number.get(after.shard))
        else:
            self._wake(pool)

    def _job_changed(self, _: str, before: JobRecord | None, after: JobRecord | None) -> None:
        """Follow machines from which tasks have to be removed, in any entitlement."""
        if (before.leaving if before else {}) != (after.leaving if after else {}):
            self._follow_leaving(before)
            self._follow_leaving(after)

    def _follow_leaving(self, record: JobRecord | None) -> None:
        if self._has_started and record is not None:
            for machine in record.leaving:
                self._follow_machine(machine)

    async def _release(self, pool: str) -> None:
        """Wait for the work under way in an entitlement to end, and write its release."""
        source, jobs = self.of_pool(pool), list[str]()
        try:
            await self._wait_written(pool)
            async with self._parts.jobs.lock(*self.jobs_in(pool)):
                jobs = self.jobs_in(pool)
                self._check_no_transfer(pool, jobs)  # a transfer may be newer than the core's check
                await self._wait_idle(pool, source, jobs)
                await self._ownership.release(pool)
        except Conflict as e:  # a job is in transfer, or the move was withdrawn
            log.info("entitlement stays", extra={"entitlement": pool, "reason": str(e)})
        except TwineError as e:  # the core gives up after a while
            log.warning("entitlement not released", extra={"entitlement": pool, "reason": str(e)})
        for job in jobs:
            source.scheduler.forget(job)

    def _change_owner(self, pool: str, old: RunningShard | None, new: RunningShard | None) -> None:
        """Drop the state of an entitlement that this process lost, or take over one that it got."""
        for record in self._parts.region.broker.held(pool):
            self._follow_machine(record.machine)
        for job in self.jobs_in(pool):
            self._follow_leaving(self._parts.jobs.find(job))
        if old is not None:
            jobs = self.jobs_in(pool)
            handover.drop(old.allocator, jobs)
            for job in jobs:
                old.scheduler.forget(job)
        if new is not None:
            self._ownership.moving[pool] = new.number  # until its records are read
            self._runtime.spawn("shard move", self._adopt(pool, new))

    async def _adopt(self, pool: str, shard: RunningShard) -> None:
        jobs = self.jobs_in(pool)
        async with self._parts.jobs.lock(*jobs):
            stored = await self._retry(
                "records not read",
                {"entitlement": pool},
                lambda: handover.read(shard.allocator, jobs),
            )
            self._ownership.moving.pop(pool, None)
            handover.adopt(shard.allocator, pool, stored)
        for job in jobs:
            self._parts.event_log.forget(job)
        self._wake(pool)
        fields = {"entitlement": pool, "shard": shard.number, "jobs": len(jobs)}
        log.info("entitlement taken over", extra=fields)
