"""The whole control plane in one process: what the front end calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from agent.api import JoinRequest, Liveness
from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.api.jobs import Endpoints, JobRecord, Jobs, JobSpec, JobStatus
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.core.capacity_report import Used
from control_plane.core.rollout import summarize
from control_plane.services.agents import AgentFactory, AgentPool, Clock, FindImage
from control_plane.services.allocator import Allocator
from control_plane.services.brokers import Brokers
from control_plane.services.capacity_desk import CapacityDesk, Sources
from control_plane.services.census import Census
from control_plane.services.discovery import Discovery
from control_plane.services.dispatcher import Dispatcher
from control_plane.services.fleet import Fleet
from control_plane.services.health_checker import HealthChecker
from control_plane.services.job_control import JobControl
from control_plane.services.job_planner import JobPlanner
from control_plane.services.machine_desk import MachineDesk
from control_plane.services.pool_keeper import PoolKeeper
from control_plane.services.portal import Portal
from control_plane.services.region import Region
from control_plane.services.scheduler import Scheduler
from control_plane.services.switcher import Switcher
from control_plane.services.table import Table
from control_plane.store import Store
from control_plane.store.records import JOBS


class ControlPlane:
    """Broker, portal, allocator, scheduler and the services around them.

    `async with` loads everything from an open store and runs the loops until it is left;
    leaving it touches no task. Methods raise `agent.errors` and `control_plane.errors`.
    """

    def __init__(
        self,
        store: Store,
        agents: AgentFactory,
        clock: Clock,
        settings: SchedulerSettings,
        find_image: FindImage,
        portal: PortalSettings | None = None,
        broker_stores: Mapping[str, Store] | None = None,
    ) -> None:
        """Wire the services together; nothing is read or started yet.

        `broker_stores` are the open stores of data centers that have one of their own (RB9).
        """
        self._store = store
        self._pool = AgentPool(agents)
        self._broker = Brokers(store, clock, broker_stores)
        self._portal = Portal(store, clock, portal)
        self._broker.listen(self._portal.supply.heard)
        self.census = Census()
        self._broker.listen(self.census.machine_heard)
        self.inventory = MachineDesk(self._broker, clock, self._view, self._profile_of)
        self._jobs: Table[JobRecord] = Table(store, JOBS, JobRecord, "job")
        self._jobs.listen(self.census.job_heard)
        self._fleet = Fleet(self._broker)
        region = Region(self._broker, self._portal, self._jobs, self._fleet, settings, clock)
        self._allocator = Allocator(region, store)
        self.allocations = self._allocator.allocations
        self._keeper = PoolKeeper(region, self._allocator)
        self._discovery = Discovery(self._jobs, self._broker)
        self._control = JobControl(region, store, find_image, self._allocator.index)
        self.job_planner = JobPlanner(region, self._allocator, self._control)
        self._dispatcher = Dispatcher(region, self._pool, find_image)
        self._health = HealthChecker(region, self._pool)
        self._switcher = Switcher(region, self._dispatcher)
        self._scheduler = Scheduler(region, self._allocator, self._dispatcher)
        sources = Sources(
            machines=self._broker.table,
            held=self._broker.held,
            jobs_of=self._allocator.jobs_of,
            release_idle=self._keeper.release_idle,
            used=self._used,
        )
        self.capacity = CapacityDesk(self._portal, sources, clock)
        self._loops: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Load from the store, then start the loops.

        Records are complete before the first agent is asked: a task is never taken for a
        stray because its job was not read yet.
        """
        await self._broker.load()
        await self._portal.load()
        await self._jobs.load()
        await self._allocator.load()
        self._loops = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the loops; tasks on the machines run on."""
        assert self._loops is not None
        self._loops.cancel()
        await asyncio.wait([self._loops])
        if not self._loops.cancelled():
            self._loops.exception()  # whoever cares asked with wait_failed
        self._loops = None
        await self.allocations.close()
        await self._pool.close()

    async def wait_failed(self) -> None:
        """Return never, or raise what broke a loop (then the process must end)."""
        assert self._loops is not None
        await asyncio.shield(self._loops)

    async def _run(self) -> None:
        epoch = self._store.epoch()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatcher.run(epoch))
            group.create_task(self._scheduler.run(epoch))
            group.create_task(self._switcher.run())
            group.create_task(self._allocator.run())
            group.create_task(self._keeper.run())
            group.create_task(self._health.run())
            group.create_task(self.inventory.run())

    # -- jobs

    async def apply_job(self, spec: JobSpec, *, dry_run: bool = False) -> JobStatus:
        """Create a job or change what is wanted of it; all errors at once, or none applied."""
        record = await self._control.apply(spec, dry_run=dry_run)
        return summarize(record)

    async def get_job(self, name: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return self._scheduler.status(name)

    async def list_jobs(self) -> Jobs:
        """Return all jobs, by name."""
        return Jobs(jobs=[self._scheduler.status(name) for name in self._jobs])

    async def stop_job(self, name: str) -> JobStatus:
        """Stop all tasks of a job; it disappears once they are gone."""
        return summarize(await self._control.stop(name))

    def job_logs(
        self,
        name: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now.

        `NotFound` is raised by the first `__anext__`, not by the call.
        """
        return self._scheduler.logs(name, index, follow=follow, since=since, tail=tail)

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the listed tasks of a job; waits up to `wait_s` for a revision > `after`."""
        return await self._discovery.endpoints(job, after, wait_s)

    # -- machines

    async def list_machines(self) -> Machines:
        """Return all machines, by name."""
        return Machines(machines=[self._view(record) for record in self._broker.table.records()])

    async def get_machine(self, name: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        return self.inventory.get(name)

    async def joined(self, request: JoinRequest) -> MachineRecord:
        """Record a host whose identity was proved; again for one that is known."""
        return await self._broker.join(request)

    # -- entitlements

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements, by name."""
        return await self.capacity.list_entitlements()

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it."""
        return await self.capacity.put_entitlement(name, spec)

    async def delete_entitlement(self, name: str) -> None:
        """Remove an entitlement; `Conflict` while it has jobs."""
        await self.capacity.delete_entitlement(name)

    async def ready(self) -> Liveness:
        """Return whether everything is loaded and every loop runs."""
        if self._loops is None:
            return Liveness(ok=False, detail="the stores are not loaded yet")
        if self._loops.done():
            return Liveness(ok=False, detail="a loop has failed; see the log")
        return Liveness(ok=True, detail=self._health.brake)

    def _used(self, name: str) -> Used:
        machine = self._allocator.index.machines.get(name)
        if machine is None:
            return Used()
        capacity = machine.capacity
        rru, memory = capacity.rru - machine.free_rru, capacity.memory_bytes - machine.free_memory
        return Used(max(0.0, rru), max(0, memory))

    def _profile_of(self, entitlement: str) -> str:
        """Return the profile of an entitlement that has machines of its own."""
        record = self._portal.table.find(entitlement)
        return "" if record is None or record.spec.materialization else record.spec.host_profile

    def _view(self, record: MachineRecord) -> MachineView:
        sight = self._fleet.sight(record.machine)
        now = asyncio.get_running_loop().time()
        return MachineView(
            record=record,
            tasks=sorted(self._allocator.directory.tasks(record.machine)),
            ready=sight.answering,
            last_seen_s=None if sight.heard_at is None else now - sight.heard_at,
        )
