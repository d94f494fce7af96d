"""The whole control plane in one process: what the front end calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from agent.api import JoinRequest, Liveness, Relaxation
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentFactory
from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.claims import Claim
from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.api.duplicates import Duplicate
from control_plane.api.jobs import Endpoints, Jobs, JobSpec, JobStatus
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.operations import JobEvents, RestartWish, TaskStory
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.api.watch import EndpointsNews
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.marks import Marks
from control_plane.broker.service import MachineService
from control_plane.discovery.discovery import Discovery
from control_plane.discovery.shard_maps import ShardMaps
from control_plane.health.checker import HealthChecker
from control_plane.health.service import HealthService
from control_plane.identity.core.duplicates import is_second, words
from control_plane.images.store import FindImage
from control_plane.ops_planner.planner import OpsPlanner
from control_plane.portal.core.report import Used
from control_plane.portal.portal import Portal
from control_plane.portal.service import CapacityService, Sources
from control_plane.profiles.rollouts import ProfileRollouts
from control_plane.profiles.switcher import Switcher
from control_plane.rebalancer.ports import Solve
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.rebalancer.solver import solver_process
from control_plane.running_shards import RunningShards, ShardParts, allocators_of
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.limits import FrontEndLimits
from control_plane.runtime.loops import Failing, Loops
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.core.rollout import earlier, summarize
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.intent_service import IntentService
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.preparation import PreparedMachines
from control_plane.scheduler.rebalance_desk import RebalanceDesk
from control_plane.scheduler.restored import RestoredStore
from control_plane.scheduler.task_service import TaskService
from control_plane.shards.ownership import OwnershipMap
from control_plane.store import Store
from control_plane.store.quarantine import quarantined
from control_plane.task_control.controllers import CallController, Controllers, nobody
from wire.errors import InvalidInput


class ControlPlane:
    """Broker, portal, allocator, scheduler and the services around them.

    `async with` loads everything from an open store and runs the loops until it is left;
    leaving it touches no task. Methods raise `wire.errors` and `control_plane.errors`.
    """

    def __init__(
        self,
        store: Store,
        agents: AgentFactory,
        runtime: Runtime,
        settings: SchedulerSettings,
        find_image: FindImage,
        portal: PortalSettings | None = None,
        broker_stores: Mapping[str, Store] | None = None,
        call_controller: CallController = nobody,
        boot_id: str = "",
        solve: Solve | None = None,
        ownership: OwnershipMap | None = None,
    ) -> None:
        """Wire the services together; nothing is read or started yet.

        `broker_stores` are the open stores of data centers that have one of their own (RB9),
        `call_controller` makes the calls of jobs' TaskControllers, `boot_id` names this boot of
        the host: on it the date goes on over restarts of the process. `solve` answers the
        ReBalancer instead of a process of its own. From `ownership` clients of agents take the
        term that they say; None: they say none.
        """
        self.clock = runtime.now
        self._store = store
        self._stores = [store, *(broker_stores or {}).values()]
        self._runtime = runtime
        self._anchor = Anchor(store, runtime, boot_id)
        self._broker = Brokers(store, runtime, broker_stores)
        self.ownership = ownership or OwnershipMap(store)
        self.ownership.find_machine = self._broker.table.find
        self._pool = AgentPool(agents)
        self._portal = Portal(store, runtime, portal)
        self._broker.listen(self._portal.supply.heard)
        self.census = Counters()
        self._broker.listen(self.census.machine_heard)
        self.limits = FrontEndLimits()
        take_away = self.limits.of(
            LimitName.TAKE_AWAY, settings.take_away_per_s, settings.take_away_burst
        )
        self.inventory = MachineService(
            self._broker, runtime, self._view, self._profile_of, take_away
        )
        self._jobs = JobTable(store, runtime.checkpoint)
        self._jobs.listen(self.census.job_heard)
        self._observations = Observations(self._broker, runtime)
        region = Region(
            *(self._broker, self._observations, settings, runtime, self.limits),
            lambda machine, boot_id: is_second(self.duplicates.get(machine), boot_id),
        )
        allocators = allocators_of(region, self._portal, self._jobs, store, self.ownership)
        self._allocator = allocators[0]
        losses = Losses(region, self._jobs)
        self.allocations = [allocator.allocations for allocator in allocators]
        self._shards = ShardMaps(store, self._jobs, runtime.checkpoint)
        self.discovery = Discovery(
            self._jobs, self._broker, self._allocator.directory.jobs, self._shards
        )
        self._control = JobControl(
            runtime,
            self._jobs,
            self._portal,
            find_image,
            self._allocator.index,
            settings.default_cpu_cores,
        )
        self.intents = IntentService(runtime, self._jobs, self._control, self._claims_of)
        self._dispatcher = Dispatcher(region, self._pool, find_image)
        self._checker = HealthChecker(region, self._pool, Marks(self._broker, runtime))
        self.task_desk = TaskService(self._jobs, self._dispatcher)
        self.health = HealthService(self._checker, self.inventory.outages)
        self.maintenance = OpsPlanner(
            region,
            self._allocator,
            self._owner_of,
            self._jobs,
            self.inventory.outages,
            self.census,
            store,
        )
        self._switcher = Switcher(region, self._dispatcher)
        self.profiles = ProfileRollouts(
            region, self._portal, store, self._portal.settings.profile_keys
        )
        self._dispatcher.profile_text = self.profiles.text_of
        self._events = EventLog(store)
        self._controllers = Controllers(runtime, call_controller)
        parts = ShardParts(
            *(region, self._portal, self._jobs, self._control),
            *(self._dispatcher, self._events, self._controllers, losses),
        )
        self.shards = RunningShards(parts, self.ownership, allocators)
        for shard in self.shards.all:
            shard.keeper.keeps = partial(self._keeps, shard.scheduler.ahead)
        self.job_planner = self.shards
        sources = Sources(
            machines=self._broker.table,
            held=self._broker.held,
            jobs_of=self._allocator.jobs_of,
            release_idle=self._release_idle,
            used=self._used,
            power=self._allocator.index.power_budgets,
        )
        self.rebalancer = ReBalancer(
            *(region, self._jobs, self._allocator, RebalanceDesk(self._jobs, runtime), store),
            solve or solver_process(settings.rebalance.memory_mib),
            self._unwell,
        )
        self.capacity = CapacityService(self._portal, sources, runtime)
        self.restored = RestoredStore(store, region, self._jobs, self._allocator.directory)
        self.identity_ends: Mapping[str, float] = {}
        """Machine → when the certificate of its agent ends, in seconds since 1970."""
        self.duplicates: Mapping[str, Duplicate] = {}
        """Machine → a second host that has its identity."""
        self.quarantined: list[str] = []
        """Stored records that cannot be used: an alarm while there are any."""
        self._loops: Loops | None = None

    async def __aenter__(self) -> Self:
        """Load from the store, then start the loops.

        Records are complete before the first agent is asked: a task is never taken for a
        stray because its job was not read yet.
        """
        for one in self._stores:
            self.quarantined += await quarantined(one)
        await self._anchor.load()
        await self.restored.load()
        self._control.skipped_generations = self.restored.skipped_generations
        await self.ownership.load()
        await self._broker.load()
        await self._portal.load()
        await self._jobs.load()
        await self._shards.load()
        self.ownership.check(len(self.shards.all), self._portal.table)
        for shard in self.shards.all:
            await shard.allocator.load()
        await self.maintenance.load()
        await self.profiles.load()
        await self.rebalancer.load()
        self._loops = Loops(self._runtime)
        self._start(self._loops)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the loops; tasks on the machines run on."""
        assert self._loops is not None
        await self._loops.close()
        self._loops = None
        for allocations in self.allocations:
            await allocations.close()
        await self._pool.close()

    async def wait_failed(self) -> None:
        """Return never, or raise what broke a loop (then the process must end)."""
        assert self._loops is not None
        await self._loops.wait_failed()

    def _start(self, loops: Loops) -> None:
        """Start every loop; those that command wait until a restored store was looked at."""
        loops.start("clocks", self._runtime.watch_clocks)
        loops.start("date", self._anchor.run, Failing.BEGINS_ANEW)
        self.restored.begin = lambda: self._start_commanding(loops)
        if not self.restored.waits:
            self._start_commanding(loops)
        loops.start("health", self._checker.run)
        loops.start("age of the store", self._checker.restored.wait)
        for number, store in enumerate(self._stores):
            loops.start(f"store {number}" if number else "store", store.wait_failed)

    def _start_commanding(self, loops: Loops) -> None:
        """Start what tells agents to do something, or takes and gives machines.

        Loops that only derive what to do may begin anew beside others.
        """
        loops.start("dispatcher", lambda: self._dispatcher.run(self.ownership.number))
        self.shards.start(loops, self.ownership.number)
        loops.start("profiles", self._switcher.run, Failing.BEGINS_ANEW)
        loops.start("profile rollouts", self.profiles.run, Failing.BEGINS_ANEW)
        loops.start("controllers", self._controllers.run)
        loops.start("ops planner", self.maintenance.run, Failing.BEGINS_ANEW)
        loops.start("rebalancer", self.rebalancer.run, Failing.BEGINS_ANEW)
        loops.start("shard maps", self._shards.run, Failing.BEGINS_ANEW)
        loops.start("machines", self.inventory.run, Failing.BEGINS_ANEW)

    # -- jobs

    async def apply_job(
        self, spec: JobSpec, *, dry_run: bool = False, writer: str = ""
    ) -> JobStatus:
        """Create a job or change what is wanted of it; all errors at once, or none applied."""
        if not dry_run:
            await self.shards.give(spec.entitlement)
        record = await self._control.apply(spec, dry_run=dry_run, writer=writer)
        return summarize(record)

    async def get_job(self, name: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return self.shards.of_job(name).scheduler.status(name)

    async def list_jobs(self) -> Jobs:
        """Return all jobs, by name."""
        return Jobs(jobs=[self.shards.of_job(name).scheduler.status(name) for name in self._jobs])

    async def stop_job(self, name: str) -> JobStatus:
        """Stop all tasks of a job; it disappears once they are gone."""
        return summarize(await self._control.stop(name))

    async def pause_job(self, name: str, *, paused: bool) -> JobStatus:
        """Hold back the update of a job, or let it go on."""
        return summarize(await self._control.pause(name, held_back=paused))

    async def restart_job(self, name: str, writer: str = "") -> JobStatus:
        """Have every task of a job started anew, like an update."""
        return summarize(await self._control.restart(name, writer))

    async def rollback_job(self, name: str, writer: str = "") -> JobStatus:
        """Go back to what the version before wanted of the tasks."""
        if before := self.goes_back_to(name):
            self.shards.check_move(name, before)
        return summarize(await self._control.rollback(name, writer))

    async def move_job(self, name: str, entitlement: str, writer: str = "") -> JobStatus:
        """Have a job run in another entitlement."""
        await self.shards.give(entitlement)
        self.shards.check_move(name, entitlement)
        return summarize(await self._control.move(name, entitlement, writer))

    async def move_task(self, name: str, index: int, to: str, reason: str) -> TaskStory:
        """Have a task run elsewhere."""
        await self._control.move_task(name, index, to, reason)
        return await self.task_story(name, index)

    async def restart_task(self, name: str, index: int, wish: RestartWish) -> TaskStory:
        """Have a task start anew where it is: in its turn, or at once."""
        if not wish.now:
            await self._control.restart_task(name, index, wish.reason)
        elif not wish.reason:
            raise InvalidInput(
                f"task {name}-{index} is restarted past its job's budget and controller only for"
                " a reason, which the audit log keeps",
                hint="twinectl task restart --now --reason …",
            )
        else:
            await self.task_desk.restart(name, index)
        return await self.task_story(name, index)

    async def job_events(self, name: str, after: int = 0, limit: int = 100) -> JobEvents:
        """Return a page of a job's log, oldest first; also of one that is gone."""
        return await self._events.page(self._jobs, name, after, limit)

    async def task_story(self, name: str, index: int) -> TaskStory:
        """Return what is being done to a task and what was."""
        return await self._events.story(self._jobs, name, index)

    def users_of_image(self, digest: str) -> list[str]:
        """Return the jobs that run an image, or are about to."""
        return self._control.users_of_image(digest)

    def job_logs(
        self,
        name: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now.

        `NotFound` is raised by the first `__anext__`, not by the call.
        """
        return self.task_desk.logs(
            name, index, follow=follow, since=since, tail=tail, previous=previous
        )

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the listed tasks of a job; waits up to `wait_s` for a revision > `after`."""
        return await self.discovery.endpoints(job, after, wait_s)

    async def watch_endpoints(
        self, known: Mapping[str, int | None], wait_s: float = 0.0
    ) -> EndpointsNews:
        """Return where those of many jobs answer of which something else is known."""
        return await self.discovery.watch(known, wait_s)

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

    async def disconnect(self, machine: str) -> None:
        """Close the connections to a machine's agent, those in use, too; they are made anew.

        For when the identity that its agent showed counts no more: who is there shows another one.
        """
        await self._pool.drop(machine)

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

    # -- whose is what

    def entitlement_of(self, job: str) -> str | None:
        """Return the entitlement of a job, if there is such a job."""
        record = self._jobs.find(job)
        return None if record is None else record.spec.entitlement

    def goes_back_to(self, job: str) -> str | None:
        """Return the entitlement that a rollback of a job would bring it to, if there is one."""
        record = self._jobs.find(job)
        version = earlier(record) if record is not None else None
        return record.specs[version].entitlement if record is not None and version else None

    def is_raw(self, job: str) -> bool:
        """Return whether some version of a job that is kept has tasks without a sandbox."""
        record = self._jobs.find(job)
        specs = () if record is None else (record.spec, *record.specs.values())
        return any(Relaxation.RAW in spec.relaxations for spec in specs)

    def owners_of(self, entitlement: str) -> Sequence[str] | None:
        """Return the owners of an entitlement, if there is such an entitlement."""
        record = self._portal.table.find(entitlement)
        return None if record is None else record.spec.owners

    def entitlement_names(self) -> Iterable[str]:
        """Return the names of all entitlements."""
        return self._portal.table.names()

    def revision_of(self, kind: str, name: str) -> int | None:
        """Return the revision of the record of a job or an entitlement; 0: there is none."""
        if kind == "job":
            return self._jobs.revision(name)
        return self._portal.table.revision(name) if kind == "entitlement" else None

    async def ready(self) -> Liveness:
        """Return whether everything is loaded and every loop runs."""
        if self._loops is None:
            return Liveness(ok=False, detail="the stores are not loaded yet")
        for store in self._stores:
            if failure := store.failure():
                return Liveness(ok=False, detail=failure)
        if trouble := self._loops.trouble():
            return Liveness(ok=False, detail=trouble)
        alarm = f"{len(self.quarantined)} damaged records are set aside" * bool(self.quarantined)
        told = [self.restored.words(), self._checker.restored.words(), self._checker.brake, alarm]
        return Liveness(ok=True, detail="; ".join(filter(None, told)))

    def _unwell(self) -> str:
        """Return why no task is to be moved that could stay; empty: the region is well."""
        if len(self.shards.all) > 1:
            return "the ReBalancer plans for one shard, and there are several"
        held = (LimitName.STOPS, LimitName.CAPPED_MOVES, LimitName.CAPACITY, LimitName.MARK_DOWN)
        limits = self.limits.views(self._runtime.now()).limits
        reasons = (f"limit {v.name}: {v.reason}" for v in limits if v.name in held and v.reason)
        told = (self.restored.words(), self._checker.restored.words(), self._checker.brake)
        return next(filter(None, (*told, *reasons)), "")

    def _keeps(self, ahead: PreparedMachines, record: MachineRecord) -> bool:
        """Return whether an empty machine stays with its pool."""
        return self.profiles.keeps(record) or ahead.keeps(record.machine)

    def _claims_of(self, job: str) -> Iterable[Claim]:
        return self.shards.of_job(job).allocator.index.claims.get(job) or ()

    def _owner_of(self, pool: str) -> Allocator:
        return self.shards.of_pool(pool).allocator

    async def _release_idle(self, entitlement: str) -> None:
        await self.shards.of_pool(entitlement).keeper.release_idle(entitlement)

    def _used(self, name: str) -> Used:
        record = self._broker.table.find(name)
        owner = self.shards.of_pool(record.entitlement if record is not None else FREE)
        machine = owner.allocator.index.machines.get(name)
        if machine is None:
            return Used()
        capacity = machine.capacity
        rru = capacity.rru_of(capacity.cpu_room - machine.free_cpu)
        memory = capacity.memory_bytes - machine.free_memory
        return Used(max(0.0, rru), max(0, memory))

    def _profile_of(self, entitlement: str) -> str:
        """Return the profile of an entitlement that has machines of its own."""
        record = self._portal.table.find(entitlement)
        return "" if record is None or record.spec.materialization else record.spec.host_profile

    def _view(self, record: MachineRecord) -> MachineView:
        observation = self._observations.observation(record.machine)
        now, second = self._runtime.now(), self.duplicates.get(record.machine)
        return MachineView(
            record=record,
            tasks=sorted(self._allocator.directory.tasks(record.machine)),
            ready=observation.answering,
            last_seen_s=None if observation.heard_at is None else now - observation.heard_at,
            health=self._checker.note(record.machine),
            identity_not_after=self.identity_ends.get(record.machine),
            duplicate=words(second) if second is not None else "",
        )
