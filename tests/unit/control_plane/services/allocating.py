"""Allocations on real brokers over several stores that all share one simulated crash."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from inventory import a_machine

from agent.api import Location
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.transactions import Allocation, Allocations
from control_plane.api.allocations import AllocationRecord, Decision
from control_plane.api.machines import Hardware, MachineRecord, MachineState
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.capacity import Place, capacity_of
from control_plane.broker.core.unavailability import blocking
from control_plane.runtime.runtime import Runtime
from control_plane.store import Entry, Operation, Put, Store
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ALLOCATIONS, DECISIONS, decode
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy

GIB = 1 << 30
SITES = ("dc1", "dc2", "dc3")
OWN = "allocator"
TASK = Demand(memory_bytes=GIB, cpus=1.0)
"""Demand of a task; four such tasks fill a machine."""
WHOLE = Demand(memory_bytes=GIB, cpus=4.0)
HARDWARE = Hardware(cpus=4, rru=4.0, memory_bytes=5 * GIB)


_under_way: set[asyncio.Task[int]] = set()
"""Submitted writes. A thread carries them out, even if their callers have ended."""


class Crash:
    """Counts the writes of all stores of a process, and ends the process at one of them."""

    def __init__(self) -> None:
        self.writes = 0
        self.die_at, self.after = 0, False
        self.dead = asyncio.Event()
        self.decisions: dict[str, Decision] = {}
        """All decisions that ever became durable."""

    def note(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(DECISIONS):
                decision = decode(operation.value, Decision, operation.key)
                self.decisions[decision.transaction] = decision


class CrashingStore:
    """A store that ends with its process; writes of a dead process never return."""

    def __init__(self, inner: Store, crash: Crash) -> None:
        self._inner, self._crash = inner, crash
        self.fails: list[Exception] = []
        """Errors that the next writes raise before they write anything …"""
        self.fails_after: list[Exception] = []
        """… or after they have written everything."""
        self.unread = 0
        """Number of the next outcome queries that get no answer."""
        self.hangs = False
        """Whether writes hang."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str) -> Entry | None:
        if self.unread:
            self.unread -= 1
            raise Busy("the store cannot be read")
        return await self._inner.get(key)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        crash = self._crash
        crash.writes += 1
        dies = crash.writes == crash.die_at
        if crash.dead.is_set() or (dies and not crash.after):
            return await self._forever()
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise self.fails.pop(0)
        write = asyncio.create_task(self._write(compare, operations))
        _under_way.add(write)
        write.add_done_callback(_under_way.discard)
        revision = await asyncio.shield(write)
        if dies:
            return await self._forever()
        if self.fails_after:
            raise self.fails_after.pop(0)
        return revision

    async def _write(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        revision = await self._inner.txn(compare, operations)
        self._crash.note(operations)
        return revision

    async def _forever(self) -> int:
        self._crash.dead.set()
        return await asyncio.get_running_loop().create_future()


class Process:
    """One life of an allocator and the brokers; everything in memory is lost at its end."""

    def __init__(self, stores: Mapping[str, CrashingStore], own: str = OWN, now: float = 1000.0):
        self.now = now
        self.stores = stores
        self.store = stores[own]
        sites = {site: stores[site] for site in SITES}
        self.brokers = Brokers(stores[SITES[0]], Runtime(lambda: self.now), sites)
        self._made(own)

    def _made(self, own: str) -> None:
        self.index = RegionIndex()
        self.is_connected = True
        """Whether the index receives the changes of the brokers."""
        self.allocations = Allocations(self.store, self.index, self.brokers, self.refresh, name=own)
        self.brokers.listen(self._on_change)

    async def start(self) -> "Process":
        await self.brokers.load()
        await self.recover()
        return self

    async def recover(self) -> None:
        await self.allocations.recover()
        self.refresh(list(self.brokers.table))
        await self.allocations.load()

    def with_own(self, own: str) -> "Process":
        """Return another allocator on the same brokers."""
        other = object.__new__(Process)
        other.now, other.stores, other.brokers = self.now, self.stores, self.brokers
        other.store = self.stores[own]
        other._made(own)
        return other

    def refresh(self, machines: Iterable[str]) -> None:
        for name in machines:
            record = self.brokers.table.find(name)
            if record is None:
                self.index.remove(name)
            else:
                self._put(record)

    def _on_change(self, name: str, _: MachineRecord | None, after: MachineRecord | None) -> None:
        if self.is_connected:
            self.refresh([name])

    def _put(self, record: MachineRecord) -> None:
        held = record.hold is not None and not self.allocations.is_taking(record.machine)
        down = "" if record.state is MachineState.UP else "is down"
        self.index.put(
            record.machine,
            capacity_of(record),
            Place.of(record.location),
            record.entitlement,
            down or ("is held" if held else "") or blocking(record, self.now),
        )

    async def allocate(
        self, request: Request, quota: int | None = None, profile: str = "web"
    ) -> Allocation:
        """Allocate with a quota of machines (None: no limit)."""
        return await self.allocations.allocate(request, self.quota(request.pool, quota), profile)

    def quota(self, pool: str, quota: int | None) -> Callable[[], Allowance]:
        def left() -> Allowance:
            return Allowance(machines=None if quota is None else quota - self.index.pool(pool).size)

        return left

    # -- queries of tests

    def held(self) -> dict[str, str]:
        """Return machine → entitlement, as the brokers record it."""
        return {r.machine: r.entitlement for r in self.brokers.table.records() if r.entitlement}

    def where(self, job: str = "web") -> dict[int, str]:
        claims = self.index.claims.get(job)
        return {c.task: c.machine.name for c in claims} if claims is not None else {}

    async def stored(self) -> dict[str, AllocationRecord]:
        listing = await self.store.list_prefix(ALLOCATIONS)
        records = [decode(e.value, AllocationRecord, e.key) for e in listing.entries]
        return {record.job: record for record in records}

    async def check(self) -> None:
        """Assert that no transaction is half done and that all sums are right."""
        assert self.brokers.in_doubt() == {}
        assert all(record.hold is None for record in self.brokers.table.records())
        held = self.held()
        stored = await self.stored()
        assert stored.keys() == self.index.claims.keys()
        for job, record in stored.items():
            there = {task: name for task, name in enumerate(record.machines) if name}
            assert there == self.where(job)
            assert {held.get(name) for name in there.values()} <= {record.pool}
        for machine in self.index.machines.values():
            assert machine.pool == held.get(machine.name, "")
            claims = [c for job in set(machine.jobs) for c in job if c.machine is machine]
            assert len(claims) == len(machine.jobs)
            used = sum(c.demand.memory_bytes for c in claims)
            assert machine.free_memory + used == machine.capacity.memory_bytes
            assert machine.free_memory >= 0
            cpu = sum(c.demand.cpu_on(machine.capacity) for c in claims)
            assert machine.free_cpu + cpu == machine.capacity.cpu_room


class Region:
    """Stores that outlive the processes on them."""

    def __init__(self, folder: Path | None, machines: int = 3) -> None:
        """Keep everything in memory without a folder; `machines` is the number per data center."""
        self._folder = folder
        self._memory: dict[str, MemoryStore] = {}
        self._machines = machines
        self.crash = Crash()

    def _store(self, name: str) -> Store:
        if self._folder is not None:
            return SqliteStore(self._folder / name)
        return self._memory.setdefault(name, MemoryStore())

    @asynccontextmanager
    async def process(self, *more: str) -> AsyncIterator[Process]:
        """Run one process on all stores; none of its tasks survives its end."""
        async with AsyncExitStack() as stack:
            stores = {}
            for name in (*SITES, OWN, *more):
                inner = await stack.enter_async_context(self._store(name))
                stores[name] = CrashingStore(inner, self.crash)
            process = await Process(stores).start()
            if not process.index.machines:
                await process.brokers.add(self._inventory())
            yield process

    def _inventory(self) -> dict[str, MachineRecord]:
        found = {}
        for site in SITES:
            for number in range(1, self._machines + 1):
                name = f"{site}-{number}"
                location = Location(datacenter=site, msb=f"msb{number}")
                found[name] = a_machine(name, location=location, hardware=HARDWARE)
        return found


def a_request(
    tasks: int | Sequence[int] = 3,
    job: str = "web",
    pool: str = "front",
    demand: Demand = TASK,
    **fields: Any,
) -> Request:
    indices = tuple(range(tasks)) if isinstance(tasks, int) else tuple(tasks)
    return Request(job, pool, (Group(demand, indices),) if indices else (), **fields)


async def settle_all() -> None:
    """Cancel all tasks of this process, as its death does. Pending writes end as they would, and
    the outcome of each is recorded.
    """
    kept = {asyncio.current_task(), *_under_way}
    others = [task for task in asyncio.all_tasks() if task not in kept]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.gather(*_under_way, return_exceptions=True)
