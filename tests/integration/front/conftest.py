"""A front end on real sockets of the loopback, with a control plane that answers from a dict.

The front end runs in a separate thread, so that tests and the command line are ordinary clients.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from inventory import some_facts

from agent.api import Health, Liveness, TaskState
from agent.api.joining import JoinRequest
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentApi
from control_plane.agents.region import Region as SharedRegion
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.transactions import Allocations
from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.intent_changes import IntentView, JobIntents, SizeChange, TaskCount
from control_plane.api.intents import StoredIntent
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import (
    JobBrief,
    JobBriefs,
    JobPhase,
    JobRecord,
    Jobs,
    JobSpec,
    JobStatus,
    Placement,
    TaskPhase,
    TaskRecord,
    task_id,
)
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.operations import (
    Cause,
    JobEvent,
    JobEvents,
    OperationKind,
    OperationState,
    TaskStory,
)
from control_plane.api.ownership import ShardLoad, ShardLoads, ShardMoved
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.api.watch import EndpointChanges
from control_plane.broker.brokers import Brokers
from control_plane.broker.marks import Marks
from control_plane.broker.service import MachineQuery, MachineService
from control_plane.elastic.notice_sender import NoticeSender
from control_plane.elastic.service import ElasticService
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.health.checker import HealthChecker
from control_plane.health.service import HealthService
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    OwnIdentity,
    open_authority,
)
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.images.store import ImageStore
from control_plane.ops_planner.planner import OpsPlanner
from control_plane.portal.core.report import Used
from control_plane.portal.portal import Portal
from control_plane.portal.service import CapacityService, Sources
from control_plane.profiles.rollouts import ProfileRollouts
from control_plane.rebalancer.ports import ShardedPlaces
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.rebalancer.solver import solver_process
from control_plane.roles import ControlPlane
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.limits import LimitRegistry
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.rebalance_operations import RebalanceOperations
from control_plane.scheduler.restored import RestoredStore
from control_plane.scheduler.task_service import TaskService
from control_plane.store import Operation, Store
from control_plane.store.memory import MemoryStore
from wire import tls
from wire.client import WireClient
from wire.errors import Conflict, HostError, InvalidInput, NotFound
from wire.listen import serving, tcp_socket, unix_socket

T = TypeVar("T")

FACTS = some_facts("vm1", cpus=1)


async def _nothing_to_release(entitlement: str) -> None:
    return None


def _no_agent(record: MachineRecord) -> AgentApi:
    raise AssertionError(f"no call to {record.machine} is expected")


EVENT = JobEvent(
    seq=1,
    task=0,
    operation="web-0.1",
    kind=OperationKind.START,
    cause=Cause.RELEASE,
    outcome=OperationState.DONE,
    to_machine="m1",
    start=1.0,
    end=4.0,
)


class CannedShards:
    """Two shards; records moves between them."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, int, bool]] = []

    async def list_shards(self) -> ShardLoads:
        loads = [
            ShardLoad(shard=0, machines=7, load=9, entitlements=["ads", "front"], jobs=3, tasks=9),
            ShardLoad(shard=1, moving=["ads"]),
        ]
        return ShardLoads(shards=loads, term=4)

    def of_number(self, text: str) -> None:
        if text != "0":
            raise NotFound(f"there is no shard {text!r}")

    async def move(self, pool: str, to: int, *, dry_run: bool = False) -> ShardMoved:
        self.moves.append((pool, to, dry_run))
        return ShardMoved(
            entitlement=pool, from_shard=0, to_shard=to, jobs=["web"], machines=3, done=not dry_run
        )


class CannedIntents:
    """Records the writer of each intent, and gives the same answers as the control plane."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.written: list[tuple[str, str, object, str]] = []
        self.jobs: dict[str, JobSpec] = {}
        self.stale: set[str] = set()
        """Jobs whose writes are refused."""
        self.pushed: StoredIntent | None = None
        """The pushed values; None: the push is not shown."""

    async def show(self, name: str) -> JobIntents:
        size = StoredIntent(writer="user:ann", version=3, value={"tasks": 4}, reason="evening")
        view = IntentView(
            dimension="size", intent=size, effect="4 tasks", waits_for="the job is held"
        )
        runs = TaskCount(version=2, wanted=4, running=3, why="it is part of the push")
        views = [view]
        if self.pushed is not None:
            views.append(IntentView(dimension="push", intent=self.pushed, effect="a push"))
        return JobIntents(job=name, intents=views, size=4, versions=[runs])

    async def briefs(self) -> JobBriefs:
        briefs = [
            JobBrief(
                name=name,
                entitlement=spec.entitlement,
                tasks=spec.tasks,
                healthy=spec.tasks,
                autoscale=None if spec.autoscale is None else spec.autoscale.mode,
                revision=spec.tasks,
            )
            for name, spec in self.jobs.items()
        ]
        return JobBriefs(jobs=briefs)

    def __getattr__(self, dimension: str) -> Callable[..., Awaitable[JobIntents]]:
        async def write(name: str, *arguments: object) -> JobIntents:
            if name in self.stale:
                raise Conflict(f"the {dimension} of job {name} has another version")
            self.written.append((dimension, name, *arguments))  # type: ignore[arg-type]
            return await self.show(name)

        return write

    async def size(
        self, name: str, change: SizeChange, writer: str, also: Sequence[Operation] = ()
    ) -> JobIntents:
        """Store the records of the change, as the transaction of the job's record does."""
        if name in self.stale:
            raise Conflict(f"the size of job {name} has another version")
        self.written.append(("size", name, change, writer))
        await self._store.txn({}, also)
        return await self.show(name)

    async def resize(self, *arguments: Any) -> JobIntents:
        return await self.size(*arguments)


class CannedPlanner:
    """Returns the answers that a test has set."""

    def __init__(self) -> None:
        self.specs: list[JobSpec] = []
        self.writers: list[str] = []
        self.planned = JobPlan(job="web", wanted=0)
        self.explained: dict[str, JobExplanation] = {}

    async def plan(self, spec: JobSpec, writer: str = "") -> JobPlan:
        self.specs.append(spec)
        self.writers.append(writer)
        return self.planned

    async def explain(self, name: str) -> JobExplanation:
        if name not in self.explained:
            raise NotFound(f"there is no job {name}")
        return self.explained[name]


class _NoAgents:
    async def agent(self, machine: str) -> AgentApi:
        raise NotFound(f"there is no machine {machine}")


class CannedControlPlane(ControlPlane):
    """Answers at once, as if every task started everywhere; a test can override `phase`.

    Broker and capacity portal are real, with bob as an approver.
    """

    def __init__(self, store: Store) -> None:
        self.brokers = Brokers(store, Runtime())
        self.limits, self.clock = LimitRegistry(), time.monotonic
        self.inventory = MachineService(self.brokers, Runtime(), self._view, lambda _: "base")
        observations = Observations(self.brokers, Runtime())
        shared = SharedRegion(self.brokers, observations, SchedulerSettings(), Runtime())
        self.checker = HealthChecker(shared, AgentPool(_no_agent), Marks(self.brokers, Runtime()))
        self.health = HealthService(self.checker, self.inventory.outages)
        self.portal = Portal(store, Runtime(), PortalSettings(approvers=["bob"]))
        self.brokers.listen(self.portal.supply.on_machine_change)
        self.counters = Counters()
        self.brokers.listen(self.counters.machine_changed)
        sources = Sources(
            machines=self.brokers.table,
            held=self.brokers.held,
            names_held=self.brokers.names_held,
            jobs_of=lambda name: [j for j, spec in self.jobs.items() if spec.entitlement == name],
            release_idle=_nothing_to_release,
            used=lambda _: Used(),
        )
        self.capacity = CapacityService(self.portal, sources, Runtime())
        self.allocations = [Allocations(store, RegionIndex(), self.brokers)]
        table = JobTable(store, Runtime().checkpoint)
        allocator = Allocator(shared, self.portal, table, store)
        self.maintenance = OpsPlanner(
            shared,
            allocator,
            lambda _pool: allocator,
            table,
            self.inventory.outages,
            self.counters,
            store,
        )
        self.rebalancer = ReBalancer(
            *(
                shared,
                table,
                ShardedPlaces([allocator]),
                RebalanceOperations(table, Runtime()),
                store,
            ),
            solver_process(memory_mib=2048),
            lambda: "",
            AgentPool(_no_agent),
            self.inventory.outages,
        )
        self.elastic = ElasticService(
            *(shared, table, [allocator], lambda _pool: allocator, self.inventory.loans, store),
            lambda: "",
            NoticeSender(shared, table, AgentPool(_no_agent), lambda: 1),
        )
        self.observations, self.store = observations, store
        self.restored = RestoredStore(store, shared, table, allocator.directory)
        keys = self.portal.settings.profile_keys
        self.profiles = ProfileRollouts(shared, self.portal.table, store, keys)
        self.task_service = TaskService(table, _NoAgents())
        self.shards = CannedShards()  # type: ignore[assignment]
        self.job_planner = CannedPlanner()  # type: ignore[assignment]
        self.intents = CannedIntents(store)  # type: ignore[assignment]
        self.jobs: dict[str, JobSpec] = self.intents.jobs
        self.paused: set[str] = set()
        self.quarantined = []
        self.phase: JobPhase = JobPhase.STABLE
        self.reason = ""
        self.logs: list[bytes] = [b"one\n", b"two\n"]
        self.logs_break = False
        self.is_ready = True
        self.before: dict[str, str] = {}
        """Job → the entitlement to which a rollback would move it."""
        self.served: dict[str, Endpoints] = {}
        """Endpoints set by `serve`."""
        self._served = asyncio.Event()

    async def apply_job(
        self, spec: JobSpec, *, dry_run: bool = False, writer: str = "", is_new: bool = False
    ) -> JobStatus:
        assert not is_new or spec.name not in self.jobs
        if spec.entitlement not in self.portal.specs():
            raise InvalidInput(f"job {spec.name}: there is no entitlement {spec.entitlement}")
        if not dry_run:
            self.jobs[spec.name] = spec
        return self._status(spec)

    async def get_job(self, name: str) -> JobStatus:
        if name not in self.jobs:
            raise NotFound(f"there is no job {name}", hint="twinectl job list")
        return self._status(self.jobs[name])

    def process_counts(self, loads: Sequence[ShardLoad] = ()) -> ProcessStatus:
        return ProcessStatus(role="all", ok=self.is_ready, host="h1", writes=9, write_p99_s=0.25)

    def region_status(self, others: Sequence[ProcessStatus] = ()) -> RegionStatus:
        found = [] if self.is_ready else ["all: the store is full"]
        return RegionStatus(
            ok=not found,
            troubles=found,
            machines={"up": 3, "down": 0},
            processes=[self.process_counts()],
            shards=[ShardLoad(shard=0, load=9, machines=7)],
        )

    async def list_jobs(self) -> Jobs:
        return Jobs(jobs=[self._status(spec) for spec in self.jobs.values()])

    def users_of_image(self, digest: str) -> list[str]:
        return sorted(job.name for job in self.jobs.values() if job.image == digest)

    async def stop_job(self, name: str) -> JobStatus:
        status = await self.get_job(name)
        del self.jobs[name]
        return msgspec.structs.replace(status, phase=JobPhase.STOPPING)

    async def pause_job(self, name: str, *, paused: bool, expect: int | None = None) -> JobStatus:
        await self.get_job(name)
        self.paused = self.paused | {name} if paused else self.paused - {name}
        return await self.get_job(name)

    async def restart_job(
        self, name: str, writer: str = "", expect: int | None = None
    ) -> JobStatus:
        return await self.get_job(name)

    async def rollback_job(
        self, name: str, writer: str = "", expect: int | None = None
    ) -> JobStatus:
        return await self.get_job(name)

    async def move_job(self, name: str, entitlement: str, writer: str = "") -> JobStatus:
        if entitlement not in self.portal.specs():
            raise InvalidInput(f"job {name}: there is no entitlement {entitlement}")
        status = await self.get_job(name)
        self.jobs[name] = msgspec.structs.replace(self.jobs[name], entitlement=entitlement)
        return status

    async def job_events(self, name: str, after: int = 0, limit: int = 100) -> JobEvents:
        await self.get_job(name)
        return JobEvents(job=name, events=[EVENT] if after < EVENT.seq else [])

    async def task_story(self, name: str, index: int) -> TaskStory:
        await self.get_job(name)
        return TaskStory(job=name, task=index, phase="running", machine="m1", events=[EVENT])

    async def job_logs(
        self,
        name: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        await self.get_job(name)
        for line in self.logs[-tail:] if tail else self.logs:
            yield line
        if self.logs_break:
            raise HostError("the agent went away")

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        spec = (await self.get_job(job)).record.spec
        found = [
            Endpoint(task=task_id(job, i), machine="vm1", host="h", ports={"http": 80}, version=1)
            for i in range(spec.tasks)
        ]
        return Endpoints(job=job, revision=1, endpoints=found)

    async def serve(self, *endpoints: Endpoint, job: str = "web") -> None:
        """Set the endpoints that discovery lists from now on."""
        before = self.served.get(job)
        revision = before.revision + 1 if before else 1
        self.served[job] = Endpoints(job=job, revision=revision, endpoints=list(endpoints))
        served, self._served = self._served, asyncio.Event()
        served.set()

    async def watch_endpoints(
        self, known: Mapping[str, int | None], wait_s: float = 0.0
    ) -> EndpointChanges:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (news := self._news(known)):
                    await self._served.wait()
        changed = [self.served[job] for job in news if job in self.served]
        return EndpointChanges(changed=changed, missing=[j for j in news if j not in self.served])

    def _news(self, known: Mapping[str, int | None]) -> list[str]:
        at = {job: self.served[job].revision if job in self.served else 0 for job in known}
        return [job for job in known if at[job] != known[job]]

    async def list_machines(self) -> Machines:
        return await self.inventory.page(MachineQuery(MachineScope()), "", 1000)

    async def joined(self, request: JoinRequest) -> MachineRecord:
        return await self.brokers.join(request)

    def _view(self, record: MachineRecord) -> MachineView:
        tasks = ["web-0"] if record.machine == "vm1" else []
        return MachineView(record=record, tasks=tasks, ready=True)

    def rollback_target(self, job: str) -> str | None:
        return self.before.get(job)

    def is_raw(self, job: str) -> bool:
        return job in self.jobs and "raw" in self.jobs[job].relaxations

    def entitlement_of(self, job: str) -> str | None:
        return self.jobs[job].entitlement if job in self.jobs else None

    def owners_of(self, entitlement: str) -> Sequence[str] | None:
        record = self.portal.table.find(entitlement)
        return None if record is None else record.spec.owners

    def entitlement_names(self) -> Iterable[str]:
        return self.portal.table.names()

    def revision_of(self, kind: str, name: str) -> int | None:
        return self.portal.table.revision(name) if kind == "entitlement" else None

    async def ready(self) -> Liveness:
        return Liveness(ok=self.is_ready, detail="" if self.is_ready else "loading")

    def _status(self, spec: JobSpec) -> JobStatus:
        stable = self.phase is JobPhase.STABLE
        tasks = [
            TaskRecord(
                index=i,
                version=1,
                generation=1,
                phase=TaskPhase.RUNNING if stable else TaskPhase.PENDING,
                placement=Placement(machine="vm1", ports={"http": 20000 + i}) if stable else None,
                listed=stable,
                reason=self.reason,
                health=Health.HEALTHY if stable else Health.UNKNOWN,
                state=TaskState.RUNNING if stable else None,
            )
            for i in range(spec.tasks)
        ]
        running = spec.tasks if stable else 0
        return JobStatus(
            record=JobRecord(
                name=spec.name, spec=spec, version=1, tasks=tasks, paused=spec.name in self.paused
            ),
            phase=self.phase,
            wanted=spec.tasks,
            running=running,
            healthy=running,
            updated=running,
            detail=self.reason,
        )


@dataclass
class Region:
    """A running front end, and everything that a test needs to call it with any identity."""

    folder: Path
    control_plane: CannedControlPlane
    authority: CertificateAuthority
    registrar: Registrar
    identity: OwnIdentity
    socket: Path
    url: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def client(self, role: str = "local", name: str = "ann") -> WireClient:
        """Return a client with this role."""
        if role == "local":
            return WireClient(f"unix:{self.socket}")
        if role == "anyone":
            return WireClient(
                self.url, tls.pinned_context(self.authority.ca_pem, tls.CONTROL_PLANE)
            )
        return WireClient(self.url, self.context(role, name))

    def context(self, role: str, name: str) -> ssl.SSLContext:
        held = self.authority.credential(CertificateSubject(role, name), self.url)
        return tls.client_context(held, tls.CONTROL_PLANE)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the front end's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)


def start_region(folder: Path) -> Iterator[Region]:
    authority = open_authority(folder / "authority.pem", "twine")
    store = MemoryStore()
    canned = CannedControlPlane(store)
    tcp, local = tcp_socket("127.0.0.1", 0), unix_socket(folder / "cp.sock")
    url = f"https://127.0.0.1:{tcp.getsockname()[1]}"
    images = ImageStore(folder / "images", time.time, max_bytes=8 << 20)
    registrar = Registrar(store, authority, canned, url, Runtime())
    identity = OwnIdentity(authority, ["127.0.0.1", "localhost"])
    region = Region(folder, canned, authority, registrar, identity, folder / "cp.sock", url)
    people = People(store, Runtime(), ["user:root", "group:sre"], ["bob"])
    trail = Trail(store, Runtime())
    front_end = FrontEnd(canned, registrar, images, people, trail)
    app = front_end.app(Access(os.getuid()), "0.1.0")
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with store, serving(app, tcp, identity.server_context(), local):
            await canned.brokers.load()
            await people.load()
            await trail.load()
            ready.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: region.loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield region
    region.loop.call_soon_threadsafe(stop.set)
    thread.join(15)


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    yield from start_region(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    """A region for tests whose changes do not affect each other."""
    yield from start_region(tmp_path_factory.mktemp("region"))
