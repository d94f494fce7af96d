"""The control plane of one process, which has all roles or some: what the front end calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from agent.api import Liveness, Relaxation
from agent.api.joining import JoinRequest
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentFactory
from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.claims import Claims
from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.api.duplicates import Duplicate
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.ownership import ShardLoad
from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.many import FollowedMachines
from control_plane.broker.marks import Marks
from control_plane.broker.service import MachineService
from control_plane.discovery.discovery import Discovery
from control_plane.discovery.shard_maps import ShardMaps
from control_plane.elastic.notice_sender import NoticeSender
from control_plane.elastic.service import ElasticService
from control_plane.health.checker import HealthChecker
from control_plane.health.service import HealthService
from control_plane.identity.core.duplicates import is_second, words
from control_plane.images.store import FindImage
from control_plane.job_calls import JobCalls
from control_plane.ops_planner.planner import OpsPlanner
from control_plane.portal.core.report import Used
from control_plane.portal.portal import Portal
from control_plane.portal.service import CapacityService, Sources
from control_plane.profiles.rollouts import ProfileRollouts
from control_plane.profiles.switcher import Switcher
from control_plane.rebalancer.core.loads import modelled_w
from control_plane.rebalancer.ports import ShardedPlaces, Solve
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.rebalancer.solver import solver_process
from control_plane.running_shards import RunningShards, ShardParts, allocators_of
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.following import Followed, Following
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.limits import FrontEndLimits
from control_plane.runtime.loops import Failing, Loops
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.intent_service import IntentService
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.preparation import PreparedMachines
from control_plane.scheduler.rebalance_operations import RebalanceOperations
from control_plane.scheduler.restored import RestoredStore
from control_plane.scheduler.task_service import TaskService
from control_plane.shard_processes import ShardProcesses
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import OwnRole, RoleLeaders, away
from control_plane.shards.status import said, troubles, with_lag
from control_plane.store import Store
from control_plane.store.quarantine import quarantined
from control_plane.task_control.controllers import CallController, Controllers, no_controller


class ControlPlane(JobCalls):
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
        call_controller: CallController = no_controller,
        boot_id: str = "",
        solve: Solve | None = None,
        ownership: OwnershipMap | None = None,
        processes: RoleLeaders | None = None,
    ) -> None:
        """Wire the services together; nothing is read or started yet.

        `broker_stores` are the open stores of data centers that have one of their own (RB9),
        `call_controller` makes the calls of jobs' TaskControllers, `boot_id` names this boot of
        the host: on it the date goes on over restarts of the process. `solve` answers the
        ReBalancer instead of a process of its own. From `ownership` clients of agents take the
        term that they send; None: they send none. `processes` knows the leaders of the roles in
        separate processes, this one included; None: this process has all roles.
        """
        self.clock, self._store = runtime.now, store
        self._stores = [store, *(broker_stores or {}).values()]
        self._runtime = runtime
        self._anchor = Anchor(store, runtime, boot_id)
        self.processes, role = processes, processes.own if processes is not None else OwnRole()
        self.role = role
        self._broker = Brokers(store, runtime, broker_stores, role.writer)
        self.ownership = ownership or OwnershipMap(store)
        self.ownership.is_ours = role.runs
        self.ownership.find_machine = self._broker.table.find
        self._pool = AgentPool(agents)
        self._portal = Portal(store, runtime, portal)
        self._broker.listen(self._portal.supply.on_machine_change)
        self.census = Counters()
        self._broker.listen(self.census.machine_heard)
        self.limits = FrontEndLimits()
        take_away = self.limits.of(
            LimitName.TAKE_AWAY, settings.take_away_per_s, settings.take_away_burst
        )
        self.inventory = MachineService(
            *(self._broker, runtime, self._view, self._profile_of, take_away),
            *(self._glance, self._draw),
        )
        self._jobs = JobTable(store, runtime.checkpoint, role.writer)
        self._jobs.listen(self.census.job_heard)
        self._observations = Observations(self._broker, runtime)
        region = Region(
            *(self._broker, self._observations, settings, runtime, self.limits),
            lambda machine, boot_id: is_second(self.duplicates.get(machine), boot_id),
            follows=self._follows,
            hears=lambda record: self._follows(record.entitlement) or self.shards.has_left(record),
        )
        allocators = allocators_of(
            region, self._portal, self._jobs, store, self.ownership, role.runs
        )
        self._allocator = next(iter(allocators.values()))
        losses = Losses(region, self._jobs)
        self.allocations = [allocator.allocations for allocator in allocators.values()]
        self._shards = ShardMaps(store, self._jobs, runtime.checkpoint)
        self.discovery = Discovery(
            self._jobs, self._broker, self._allocator.directory.jobs, self._shards
        )
        self._control = JobControl(
            *(runtime, self._jobs, self._portal, find_image, self._allocator.index),
            settings.default_cpu_cores,
        )
        self.intents = IntentService(runtime, self._jobs, self._control, self._claims_of)
        self._dispatcher = Dispatcher(region, self._pool, find_image)
        self._checker = HealthChecker(region, self._pool, Marks(self._broker, runtime))
        self.task_service = TaskService(self._jobs, self._dispatcher)
        self.health = HealthService(self._checker, self.inventory.outages)
        self.maintenance = OpsPlanner(
            *(region, self._allocator, self._owner_of, self._jobs),
            *(self.inventory.outages, self.census, store),
        )
        self._switcher = Switcher(region, self._dispatcher)
        self.profiles = ProfileRollouts(
            *(region, self._portal, store, self._portal.settings.profile_keys, role.writer)
        )
        self._dispatcher.profile_text = self.profiles.text_of
        self._events = EventLog(store, runtime.checkpoint)
        self._controllers = Controllers(runtime, call_controller)
        parts = ShardParts(
            *(region, self._portal, self._jobs, self._control, self._dispatcher),
            *(self._events, self._controllers, losses, self.census),
        )
        if processes is None:
            self.shards = RunningShards(parts, self.ownership, allocators)
        else:
            self.shards = ShardProcesses(
                parts, self.ownership, allocators, processes, self._checker.look_at
            )
        for shard in self.shards.all:
            shard.keeper.keeps = partial(self._keeps, shard.scheduler.ahead)
        self.job_planner = self.shards
        sources = Sources(
            machines=self._broker.table,
            held=self._broker.held,
            names_held=self._broker.names_held,
            jobs_of=self._allocator.jobs_of,
            release_idle=self.release_idle,
            used=self._used,
            power=self._allocator.index.power_budgets,
        )
        places = ShardedPlaces(
            [*allocators.values()], self.ownership.shard_of, self._portal.table.find
        )
        self.rebalancer = ReBalancer(
            *(region, self._jobs, places, RebalanceOperations(self._jobs, runtime), store),
            solve or solver_process(settings.rebalance.memory_mib),
            *(self._unwell, self._pool, self.inventory.outages),
        )
        self.elastic = ElasticService(
            *(region, self._jobs, [*allocators.values()]),
            lambda pool: self._owner_of(pool) or self._allocator,
            *(self.inventory.loans, store, self._unwell),
            NoticeSender(region, self._jobs, self._pool, self.ownership.number),
        )
        self.capacity = CapacityService(self._portal, sources, runtime)
        self.restored = RestoredStore(store, region, self._jobs, self._allocator.directory)
        self.identity_ends: Mapping[str, float] = {}
        """Machine → when the certificate of its agent ends, in seconds since 1970."""
        self.duplicates: Mapping[str, Duplicate] = {}
        """Machine → its clone: another host with its identity."""
        self.quarantined: list[str] = []
        """Stored records that cannot be used: an alarm while there are any."""
        self.ask_shard: Callable[[int, str], Awaitable[None]] = _nobody_asked
        """Have the process of a shard give back idle machines of an entitlement."""
        self._loops: Loops | None = None
        if processes is not None:
            self._follow(processes)

    async def __aenter__(self) -> Self:
        """Load from the store, then start the loops.

        Records are complete before the first agent is asked: a task is never taken for a
        stray because its job was not read yet.
        """
        if self.processes is not None:
            await self.processes.load()
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
        self.shards.check_map()
        for shard in self.shards.all:
            await shard.allocator.load()
        await self.maintenance.load()
        await self.profiles.load()
        await self.rebalancer.load()
        await self.elastic.load()
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
        if self.processes is not None and self.processes.following is not None:
            loops.start("following", self.processes.following.run)
            loops.start("leadership", self.processes.wait_replaced)
        loops.start("date", self._anchor.run, Failing.RESTARTS)
        self.restored.begin = lambda: self._start_commanding(loops)
        if not self.restored.waits:
            self._start_commanding(loops)
        loops.start("health", self._checker.run)
        loops.start("age of the store", self._checker.restored.wait)
        for number, store in enumerate(self._stores):
            loops.start(f"store {number}" if number else "store", store.wait_failed)

    def _start_commanding(self, loops: Loops) -> None:
        """Start what tells agents to do something, or takes and gives machines.

        Loops that only derive what to do may restart while others run.
        """
        loops.start("dispatcher", lambda: self._dispatcher.run(self.ownership.number))
        self.shards.start(loops, self.ownership.number)
        loops.start("profiles", self._switcher.run, Failing.RESTARTS)
        loops.start("profile rollouts", self.profiles.run, Failing.RESTARTS)
        loops.start("controllers", self._controllers.run)
        if not self.role.is_core:
            return
        loops.start("ops planner", self.maintenance.run, Failing.RESTARTS)
        loops.start("rebalancer", self.rebalancer.run, Failing.RESTARTS)
        loops.start("elastic", self.elastic.run, Failing.RESTARTS)
        loops.start("shard maps", self._shards.run, Failing.RESTARTS)
        loops.start("machines", self.inventory.run, Failing.RESTARTS)

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
        """Close the connections to a machine's agent, whose identity is no longer valid."""
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
        return self._state()

    def _state(self) -> Liveness:
        if self._loops is None:
            return Liveness(ok=False, detail="the stores are not loaded yet")
        for store in self._stores:
            if failure := store.failure():
                return Liveness(ok=False, detail=failure)
        if trouble := self._loops.trouble():
            return Liveness(ok=False, detail=trouble)
        alarm = f"{len(self.quarantined)} damaged records are set aside" * bool(self.quarantined)
        told = [self.restored.words(), self._checker.restored.words(), self._checker.brake]
        told += [alarm, self.rebalancer.alarm()]
        return Liveness(ok=True, detail="; ".join(filter(None, told)))

    def process_counts(self, loads: Sequence[ShardLoad] = ()) -> ProcessStatus:
        """Return what this process says of itself; of jobs and tasks what `loads` says."""
        followed, state = self.health.followed(), self._state()
        return said(self.role, state, self._store, self.processes, loads, followed)

    def region_status(self, others: Sequence[ProcessStatus] = ()) -> RegionStatus:
        """Return what is well and what is not; `others` is what other processes said."""
        loads = self.shards.loads()
        own = self.process_counts(loads)
        statuses = with_lag([own, *others], self._store.revision())
        machines = {state.value: n for state, n in self.census.machines.items()}
        limits = self.limits.views(self._runtime.now()).limits
        found = troubles(statuses, loads, machines, limits, self.health.count())
        return RegionStatus(
            ok=not found,
            troubles=found,
            machines=machines,
            tasks={phase.value: n for phase, n in self.census.tasks.items()},
            entitlements=len(self._portal.table),
            processes=statuses,
            shards=loads,
        )

    def _unwell(self) -> str:
        """Return why no task is to be moved that could stay; empty: the region is well."""
        if self.shards.count > len(self.shards.all):
            return BESIDE_SHARDS
        held = (LimitName.STOPS, LimitName.CAPPED_MOVES, LimitName.CAPACITY, LimitName.MARK_DOWN)
        limits = self.limits.views(self._runtime.now()).limits
        reasons = (f"limit {v.name}: {v.reason}" for v in limits if v.name in held and v.reason)
        told = (self.restored.words(), self._checker.restored.words(), self._checker.brake)
        return next(filter(None, (*told, *reasons)), "")

    def _keeps(self, ahead: PreparedMachines, record: MachineRecord) -> bool:
        """Return whether an empty machine stays with its pool."""
        kept = ahead.keeps(record.machine) or self.rebalancer.swaps.keeps(record.machine)
        return kept or self.profiles.keeps(record)

    def _claims_of(self, job: str) -> Claims | None:
        return self.shards.of_job(job).allocator.index.claims.get(job)

    def _owner_of(self, pool: str) -> Allocator | None:
        shard = self.shards.find_pool(pool)
        return None if shard is None else shard.allocator

    async def release_idle(self, entitlement: str) -> None:
        """Give back the machines of an entitlement on which nothing is placed."""
        shard = self.shards.find_pool(entitlement)
        if shard is not None:
            await shard.keeper.release_idle(entitlement)
        else:
            await self.ask_shard(self.ownership.shard_of(entitlement), entitlement)

    def _follows(self, pool: str) -> bool:
        """Return whether this process follows the machines of a pool: free ones the core does."""
        return self.role.is_core if pool == FREE else self.role.runs(self.ownership.shard_of(pool))

    def _follow(self, processes: RoleLeaders) -> None:
        """Have all that other processes write told to the tables, from before they are loaded."""
        self.ownership.epoch = processes.epoch
        tables: list[Followed] = [
            *(processes.table, self._portal.table, FollowedMachines(self._broker, self._store)),
            *(self._jobs, *self.profiles.tables, self.ownership.table),
        ]
        processes.following = Following(self._store, tables)

    async def followed(self, revision: int, patience_s: float) -> bool:
        """Return whether all that was written up to a revision is known within a time."""
        following = self.processes.following if self.processes is not None else None
        return following is None or await following.reached(revision, patience_s)

    def also_follow(self, table: Followed) -> None:
        """Have what other processes write told to something more; before anything is loaded."""
        assert self.processes is not None
        assert self.processes.following is not None
        self.processes.following.add(table)

    def _used(self, record: MachineRecord) -> Used:
        owner = self._owner_of(record.entitlement)
        machine = (owner or self._allocator).index.machines.get(record.machine)
        if machine is None:
            return Used()
        capacity = machine.capacity
        rru = capacity.rru_of(capacity.cpu_room - machine.free_cpu)
        memory = capacity.memory_bytes - machine.free_memory
        return Used(max(0.0, rru), max(0, memory))

    def _glance(self, machine: str) -> tuple[int, bool]:
        """Return how many tasks a machine has, and whether its agent answered lately."""
        tasks = self._allocator.directory.tasks(machine)
        return len(tasks), self._observations.look(machine).answering

    def _draw(self, record: MachineRecord) -> tuple[float, float]:
        """Return the promised share of a machine's CPU, and its draw in watts by the model."""
        hardware, facts = record.hardware, record.facts
        size = (hardware.rru if hardware else 0.0) or float(facts.cpus if facts else 0)
        share = self._used(record).rru / size if size else 0.0
        return share, modelled_w(hardware.power_w if hardware else 0, share)

    def _profile_of(self, entitlement: str) -> str:
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


BESIDE_SHARDS = (
    "shards run in other processes, and ReBalancer and loans need all tasks in one process"
)


async def _nobody_asked(shard: int, _: str) -> None:
    raise away(shard, "this process does not call other shards")
