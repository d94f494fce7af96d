"""Allocators as `placement.py` asks them: the product's own, and a simple one in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, Self

from control_plane.allocator.core import demand as demands
from control_plane.allocator.core.region_index import IndexedMachine, RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.transactions import Allocations
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.capacity import Kinds
from control_plane.runtime.garbage import heap_that_stays
from control_plane.runtime.runtime import Runtime
from control_plane.store.records import ENTITLEMENTS, MACHINES, decode
from control_plane.store.sqlite import SqliteStore
from tests.bench.placement_floors import BestFit, Demand, Machines

PAGE = 2000
STEP = 1000
"""Machines that are entered between two turns of the event loop."""


class Engine(Protocol):
    """What is measured. It reads the stores below its folder; `async with` lets go of them."""

    hits: int
    misses: int

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def load(self) -> None:
        """Read everything and make what answers are computed from."""
        ...

    async def allocate(
        self, job: str, entitlement: str, demand: Demand, tasks: int
    ) -> Sequence[str]:
        """Return the machines of the job's tasks, once that would survive a crash.

        Asked again, tasks stay where they are as far as possible; those that have room
        nowhere are left out.
        """
        ...

    async def free(self, job: str) -> None: ...

    async def fail(self, machine: str) -> None: ...

    async def restore(self, machine: str) -> None: ...

    def explain(self, job: str) -> str:
        """Return why some of its tasks have no machine; empty: all have one."""
        ...


class Stores:
    """One store per data center and one for the allocator, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.own = SqliteStore(folder / "allocator")
        names = sorted(path.name for path in (folder / "brokers").iterdir())
        self.brokers = {name: SqliteStore(folder / "brokers" / name) for name in names}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for store in (self.own, *self.brokers.values()):
            await self._stack.enter_async_context(store)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def entitlements(self) -> dict[str, EntitlementRecord]:
        entries = (await self.own.list_prefix(ENTITLEMENTS)).entries
        records = [decode(entry.value, EntitlementRecord, entry.key) for entry in entries]
        return {record.name: record for record in records}


class BestFitEngine:
    """The best-fit floor behind the same interface: stores nothing, caches nothing."""

    def __init__(self, folder: Path) -> None:
        self.hits = self.misses = 0
        self._stores = Stores(folder)
        self._placed: dict[str, tuple[Demand, list[int]]] = {}

    async def __aenter__(self) -> Self:
        await self._stores.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stores.__aexit__(*error)

    async def load(self) -> None:
        self._entitlements = await self._stores.entitlements()
        records: list[MachineRecord] = []
        for store in self._stores.brokers.values():
            after, full = "", True
            while full:
                entries = (await store.list_prefix(MACHINES, after, PAGE)).entries
                records += [decode(entry.value, MachineRecord, entry.key) for entry in entries]
                full = len(entries) == PAGE
                after = entries[-1].key if entries else ""
        self._machines = Machines(records)
        self._floor = BestFit(self._machines)

    async def allocate(
        self, job: str, entitlement: str, demand: Demand, tasks: int
    ) -> Sequence[str]:
        self.misses += 1
        await self.free(job)
        machines = self._machines
        wanted = self._entitlements[entitlement].spec.machine_types or machines.kinds
        kinds = [machines.kinds[kind] for kind in wanted if kind in machines.kinds]
        owner = machines.owners.setdefault(entitlement, len(machines.owners))
        placed = self._floor.place(owner, kinds, demand, tasks)
        self._placed[job] = (demand, placed)
        return [machines.names[number] for number in placed]

    async def free(self, job: str) -> None:
        if known := self._placed.pop(job, None):
            self._floor.free(known[1], known[0])

    async def fail(self, machine: str) -> None:
        self._floor.set_up(self._machines.number[machine], up=False)

    async def restore(self, machine: str) -> None:
        self._floor.set_up(self._machines.number[machine], up=True)

    def explain(self, job: str) -> str:
        return ""


class TwineEngine:
    """The allocator of the control plane over its brokers, without agents and scheduler."""

    def __init__(self, folder: Path) -> None:
        self._stores = Stores(folder)
        self.index = RegionIndex()
        self._kinds = Kinds()
        self._reasons: dict[str, tuple[str, ...]] = {}
        self._down: set[str] = set()
        self._hurt: set[str] = set()
        """Jobs with tasks on machines that are down, until they have asked for others."""
        self._demands: dict[Demand, demands.Demand] = {}

    @property
    def hits(self) -> int:
        return self.allocations.counts.hits

    @property
    def misses(self) -> int:
        return self.allocations.counts.misses

    async def __aenter__(self) -> Self:
        await self._stores.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stores.__aexit__(*error)

    async def load(self) -> None:
        with heap_that_stays():
            await self._load()

    async def _load(self) -> None:
        self.brokers = Brokers(self._stores.own, Runtime(), self._stores.brokers)
        self.allocations = Allocations(self._stores.own, self.index, self.brokers, self._refresh)
        self._entitlements = await self._stores.entitlements()
        await self.brokers.load()
        for broker in self.brokers.by_datacenter.values():
            records = list(broker.table.values())
            for start in range(0, len(records), STEP):
                self.index.put_many(map(self._as_indexed, records[start : start + STEP]))
                await asyncio.sleep(0)
        self.brokers.listen(self._heard)
        await self.allocations.recover()
        await self.allocations.load()

    async def allocate(
        self, job: str, entitlement: str, demand: Demand, tasks: int
    ) -> Sequence[str]:
        made = self._demands.get(demand)
        if made is None:
            made = self._demands[demand] = demands.Demand(
                memory_bytes=demand.memory_bytes, rru=demand.rru, gpus=demand.gpus
            )
        request = Request(job, entitlement, self._groups(job, made, tasks))
        done = await self.allocations.allocate(request, lambda: self._allowance(entitlement))
        self._reasons[job] = done.reasons
        return _Names(done.claims)

    async def free(self, job: str) -> None:
        claims = self.index.claims.get(job)
        if claims is not None:
            await self.allocations.allocate(Request(job, claims.pool), Allowance)

    def _groups(self, job: str, demand: demands.Demand, tasks: int) -> tuple[Group, ...]:
        """Return what the scheduler asks: tasks of machines that are down must leave them."""
        if job not in self._hurt:
            return (Group(demand, tuple(range(tasks))),)
        self._hurt.discard(job)
        claims = self.index.claims.get(job)
        leaving: dict[str, list[int]] = {}
        for claim in claims or ():
            if claim.machine.name in self._down and claim.task < tasks:
                leaving.setdefault(claim.machine.name, []).append(claim.task)
        moved = {task for found in leaving.values() for task in found}
        stay = tuple(task for task in range(tasks) if task not in moved)
        groups = [
            Group(demand, tuple(found), leave=frozenset({name})) for name, found in leaving.items()
        ]
        return (Group(demand, stay), *groups)

    async def fail(self, machine: str) -> None:
        self._down.add(machine)
        self._hurt.update(claims.job for claims in self.index.machines[machine].jobs)
        await self.brokers.mark_down(machine, "the bench says so")

    async def restore(self, machine: str) -> None:
        self._down.discard(machine)
        await self.brokers.mark_up(machine)

    def explain(self, job: str) -> str:
        return "; ".join(self._reasons.get(job, ()))

    def _allowance(self, entitlement: str) -> Allowance:
        spec = self._entitlements[entitlement].spec
        held = self.index.pool(entitlement)
        left = None if spec.machines is None else spec.machines - held.size
        return Allowance(machines=left, types=frozenset(spec.machine_types))

    def _refresh(self, machines: object) -> None:
        for name in machines:  # type: ignore[attr-defined]
            self.index.put(*self._as_indexed(self.brokers.table.get(name)))

    def _heard(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        if after is None:
            self.index.remove(name)
        else:
            self.index.put(*self._as_indexed(after))

    def _as_indexed(self, record: MachineRecord) -> IndexedMachine:
        pool = record.hold.entitlement if record.hold is not None else record.entitlement
        capacity, place = self._kinds.capacity(record), self._kinds.place(record)
        blocked = "" if record.state is MachineState.UP else "is down"
        return record.machine, capacity, place, pool, blocked


class _Names(Sequence[str]):
    """Machine names of claims, read only when somebody looks."""

    def __init__(self, claims: object) -> None:
        self._claims = claims

    def __len__(self) -> int:
        return len(self._claims) if self._claims is not None else 0  # type: ignore[arg-type]

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return [claim.machine.name for claim in self._claims or ()][at]  # type: ignore[attr-defined]


ENGINES = {"twine": TwineEngine, "best-fit": BestFitEngine}
