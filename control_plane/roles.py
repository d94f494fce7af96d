"""Makes and connects the services of the control plane of one process, for the roles it has.

The front end calls the methods of `ControlPlane`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Self

from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentFactory
from control_plane.agents.region import Region
from control_plane.api.duplicates import Duplicate
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.followed_machines import FollowedMachines
from control_plane.broker.marks import Marks
from control_plane.broker.service import MachineService
from control_plane.discovery.discovery import Discovery
from control_plane.discovery.shard_maps import ShardMaps
from control_plane.elastic.notice_sender import NoticeSender
from control_plane.elastic.service import ElasticService
from control_plane.health.checker import HealthChecker
from control_plane.health.service import HealthService
from control_plane.identity.core.duplicates import is_clone
from control_plane.images.store import FindImage
from control_plane.job_calls import JobCalls
from control_plane.machine_calls import MachineCalls
from control_plane.ops_planner.planner import OpsPlanner
from control_plane.portal.portal import Portal
from control_plane.portal.service import CapacityService, Sources
from control_plane.profiles.rollouts import ProfileRollouts
from control_plane.profiles.switcher import Switcher
from control_plane.rebalancer.ports import ShardedPlaces, Solve
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.rebalancer.solver import solver_process
from control_plane.running_shards import RunningShards, allocators_of
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.following import Followed, Following
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.limits import LimitRegistry
from control_plane.runtime.loops import AfterFailure, Loops
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
from control_plane.shard_lookup import ShardParts
from control_plane.shard_processes import ShardProcesses
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import OwnRole, RoleLeaders, shard_unavailable
from control_plane.status_calls import StatusCalls
from control_plane.store import Store
from control_plane.store.quarantine import quarantined
from control_plane.task_control.controllers import CallController, Controllers, no_controller


class ControlPlane(JobCalls, MachineCalls, StatusCalls):
    """Broker, portal, allocator, scheduler and the services around them.

    `async with` loads all records from an open store and runs the loops. Its exit ends the loops;
    tasks on machines continue to run. Methods raise `wire.errors`.
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
        """Connect the services; `__aenter__` loads and starts them.

        - `broker_stores`: the open stores of data centers with a store of their own (RB9).
        - `call_controller`: makes the calls to the TaskControllers of jobs.
        - `boot_id`: identifies this boot of the host; during one boot, the date continues over
          restarts of the process.
        - `solve`: solver of the ReBalancer; None: a child process.
        - `ownership`: has the term that clients of agents send; None: they send none.
        - `processes`: the leaders of the roles; None: this process has all roles.
        """
        self.clock, self._store, self._runtime = runtime.now, store, runtime
        self._stores = [store, *(broker_stores or {}).values()]
        self._anchor = Anchor(store, runtime, boot_id)
        self.processes, role = processes, processes.own if processes is not None else OwnRole()
        self.role = role
        self._broker = Brokers(store, runtime, broker_stores, role.writer)
        self.ownership = ownership or OwnershipMap(store)
        self.ownership.is_ours, self.ownership.find_machine = role.runs, self._broker.table.find
        self._pool = AgentPool(agents)
        self._add_machine_services(settings, portal)
        self._jobs = JobTable(store, runtime.checkpoint, role.writer)
        self._jobs.listen(self.counters.job_changed)
        region = self._region(settings)
        self._allocators = allocators_of(
            region, self._portal, self._jobs, store, self.ownership, role.runs
        )
        self._allocator = next(iter(self._allocators.values()))
        self._add_job_services(region, find_image)
        self._add_host_services(region, find_image, call_controller)
        self._add_shards(region, processes)
        self._add_planners(region, solve)
        self._add_links()
        self.restored = RestoredStore(store, region, self._jobs, self._allocator.directory)
        if processes is not None:
            self._follow_other_processes(processes)

    def _add_machine_services(
        self, settings: SchedulerSettings, portal: PortalSettings | None
    ) -> None:
        """Make the services of quotas and machines."""
        self._portal = Portal(self._store, self._runtime, portal)
        self._broker.listen(self._portal.supply.on_machine_change)
        self.counters = Counters()
        self._broker.listen(self.counters.machine_changed)
        self.limits = LimitRegistry()
        self.inventory = MachineService(
            self._broker,
            self._runtime,
            view=self._machine_view,
            profile_of=self._profile_of,
            take_away=self.limits.of(
                LimitName.TAKE_AWAY, settings.take_away_per_s, settings.take_away_burst
            ),
            tasks_of=self._tasks_of,
            draw=self._power_draw,
        )
        self._observations = Observations(self._broker, self._runtime)

    def _region(self, settings: SchedulerSettings) -> Region:
        """Return the objects that all services of the region share."""
        return Region(
            self._broker,
            self._observations,
            settings,
            self._runtime,
            limits=self.limits,
            is_second=lambda machine, boot_id: is_clone(self.duplicates.get(machine), boot_id),
            follows=self._follows,
            calls=lambda record: self._follows(record.entitlement) or self.shards.has_left(record),
        )

    def _add_job_services(self, region: Region, find_image: FindImage) -> None:
        """Make the services that change jobs, and those that clients of their tasks call."""
        self._shards = ShardMaps(self._store, self._jobs, self._runtime.checkpoint)
        self.discovery = Discovery(
            self._jobs, self._broker, self._allocator.directory.jobs, self._shards
        )
        self._control = JobControl(
            self._runtime,
            self._jobs,
            self._portal,
            find_image=find_image,
            index=self._allocator.index,
            default_cpus=region.settings.default_cpu_cores,
        )
        self.intents = IntentService(self._runtime, self._jobs, self._control, self._claims_of)

    def _add_host_services(
        self, region: Region, find_image: FindImage, call_controller: CallController
    ) -> None:
        """Make the services that send commands to agents, and those that follow hosts."""
        self._dispatcher = Dispatcher(region, self._pool, find_image)
        self._checker = HealthChecker(region, self._pool, Marks(self._broker, self._runtime))
        self.task_service = TaskService(self._jobs, self._dispatcher)
        self.health = HealthService(self._checker, self.inventory.outages)
        self.maintenance = OpsPlanner(
            region,
            self._allocator,
            self._find_allocator,
            jobs=self._jobs,
            outages=self.inventory.outages,
            counters=self.counters,
            store=self._store,
        )
        self._switcher = Switcher(region, self._dispatcher)
        self.profiles = ProfileRollouts(
            region,
            self._portal.table,
            self._store,
            keys=self._portal.settings.profile_keys,
            writer=self.role.writer,
        )
        self._dispatcher.profile_text = self.profiles.text_of
        self._events = EventLog(self._store, self._runtime.checkpoint)
        self._controllers = Controllers(self._runtime, call_controller)

    def _add_shards(self, region: Region, processes: RoleLeaders | None) -> None:
        """Make the shards: each has a scheduler with its allocator, here or in its own process."""
        parts = ShardParts(
            region=region,
            portal=self._portal,
            jobs=self._jobs,
            control=self._control,
            dispatcher=self._dispatcher,
            event_log=self._events,
            controllers=self._controllers,
            losses=Losses(region, self._jobs),
            counters=self.counters,
        )
        if processes is None:
            self.shards = RunningShards(parts, self.ownership, self._allocators)
        else:
            self.shards = ShardProcesses(
                parts, self.ownership, self._allocators, processes, self._checker.update_following
            )
        self.allocations = [allocator.allocations for allocator in self._allocators.values()]
        for shard in self.shards.all:
            shard.keeper.keeps = partial(self._must_stay, shard.scheduler.prepared_machines)
        self.job_planner = self.shards

    def _add_planners(self, region: Region, solve: Solve | None) -> None:
        """Make the services that move tasks, lend machines and report capacity."""
        sources = Sources(
            machines=self._broker.table,
            held=self._broker.held,
            names_held=self._broker.names_held,
            jobs_of=self._allocator.jobs_of,
            release_idle=self.release_idle,
            used=self._claimed,
            power=self._allocator.index.power_budgets,
        )
        allocators = [*self._allocators.values()]
        places = ShardedPlaces(allocators, self.ownership.shard_of, self._portal.table.find)
        self.rebalancer = ReBalancer(
            region,
            self._jobs,
            places,
            moves=RebalanceOperations(self._jobs, self._runtime),
            store=self._store,
            solve=solve or solver_process(region.settings.rebalance.memory_mib),
            unwell=self._why_moves_wait,
            agents=self._pool,
            drains=self.inventory.outages,
        )
        self.elastic = ElasticService(
            region,
            self._jobs,
            allocators,
            owner_of=lambda pool: self._find_allocator(pool) or self._allocator,
            loans=self.inventory.loans,
            store=self._store,
            unwell=self._why_moves_wait,
            sender=NoticeSender(region, self._jobs, self._pool, self.ownership.number),
        )
        self.capacity = CapacityService(self._portal, sources, self._runtime)

    def _add_links(self) -> None:
        """Create attributes that other parts of the process set later."""
        self.identity_ends: Mapping[str, float] = {}
        """Machine → when the certificate of its agent ends, in seconds since 1970."""
        self.duplicates: Mapping[str, Duplicate] = {}
        """Machine → its clone: another host with its identity."""
        self.quarantined: list[str] = []
        """Stored records that cannot be used: an alarm while there are any."""
        self.ask_shard: Callable[[int, str], Awaitable[None]] = _no_shard_process
        """Asks the process of a shard to release idle machines of an entitlement."""
        self._loops: Loops | None = None

    async def __aenter__(self) -> Self:
        """Load from the store, then start the loops.

        All records are loaded before the first agent is queried. So no task is stopped as
        unknown because its job was not loaded yet.
        """
        if self.processes is not None:
            await self.processes.load()
        for store in self._stores:
            self.quarantined += await quarantined(store)
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

    async def __aexit__(self, *_: object) -> None:
        """Stop the loops; tasks on the machines continue to run."""
        assert self._loops is not None
        await self._loops.close()
        self._loops = None
        for allocations in self.allocations:
            await allocations.close()
        await self._pool.close()

    async def wait_failed(self) -> None:
        """Never return; raise the error that ended a loop (then the process must end)."""
        assert self._loops is not None
        await self._loops.wait_failed()

    def _start(self, loops: Loops) -> None:
        """Start the loops; those that send commands wait until a restored store is released."""
        loops.start("clocks", self._runtime.watch_clocks)
        if self.processes is not None and self.processes.following is not None:
            loops.start("following", self.processes.following.run)
            loops.start("leadership", self.processes.wait_replaced)
        loops.start("date", self._anchor.run, AfterFailure.RESTARTS)
        self.restored.begin = lambda: self._start_commanding(loops)
        if not self.restored.needs_release:
            self._start_commanding(loops)
        loops.start("health", self._checker.run)
        loops.start("age of the store", self._checker.restored.wait)
        for number, store in enumerate(self._stores):
            loops.start(f"store {number}" if number else "store", store.wait_failed)

    def _start_commanding(self, loops: Loops) -> None:
        """Start the loops that send commands to agents or assign machines.

        A loop that only derives its work from records restarts after an error; others continue.
        """
        loops.start("dispatcher", lambda: self._dispatcher.run(self.ownership.number))
        self.shards.start(loops, self.ownership.number)
        loops.start("profiles", self._switcher.run, AfterFailure.RESTARTS)
        loops.start("profile rollouts", self.profiles.run, AfterFailure.RESTARTS)
        loops.start("controllers", self._controllers.run)
        if not self.role.is_core:
            return
        loops.start("ops planner", self.maintenance.run, AfterFailure.RESTARTS)
        loops.start("rebalancer", self.rebalancer.run, AfterFailure.RESTARTS)
        loops.start("elastic", self.elastic.run, AfterFailure.RESTARTS)
        loops.start("shard maps", self._shards.run, AfterFailure.RESTARTS)
        loops.start("machines", self.inventory.run, AfterFailure.RESTARTS)

    def _must_stay(self, prepared: PreparedMachines, record: MachineRecord) -> bool:
        """Return whether an empty machine must stay in its pool."""
        name, swaps = record.machine, self.rebalancer.swaps
        return prepared.keeps(name) or swaps.keeps(name) or self.profiles.keeps(record)

    def _follows(self, pool: str) -> bool:
        """Return whether this process follows a pool's machines; the core follows free ones."""
        return self.role.is_core if pool == FREE else self.role.runs(self.ownership.shard_of(pool))

    def _follow_other_processes(self, processes: RoleLeaders) -> None:
        """Apply the writes of other processes to the tables; called before these are loaded."""
        self.ownership.epoch = processes.epoch
        tables: list[Followed] = [
            processes.table,
            self._portal.table,
            FollowedMachines(self._broker, self._store),
            self._jobs,
            *self.profiles.tables,
            self.ownership.table,
        ]
        processes.following = Following(self._store, tables)

    async def followed(self, revision: int, timeout_s: float) -> bool:
        """Return whether this process reaches a revision of the store within `timeout_s`."""
        following = self.processes.following if self.processes is not None else None
        return following is None or await following.wait_reached(revision, timeout_s)

    def also_follow(self, table: Followed) -> None:
        """Follow the writes of other processes into one more table; call it before the load."""
        assert self.processes is not None
        assert self.processes.following is not None
        self.processes.following.add(table)


async def _no_shard_process(shard: int, _: str) -> None:
    raise shard_unavailable(shard, "this process does not call other shards")
