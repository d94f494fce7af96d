"""Allocators with the interface of `placement.py`: the product's, and a simple one in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, Self

from agent.api import Limits
from control_plane.allocator.standalone import allocator_over
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.jobs import JobSpec
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import MachineRecord
from control_plane.runtime.garbage import permanent_heap
from control_plane.store.records import ENTITLEMENTS, MACHINES, decode
from control_plane.store.sqlite import SqliteStore
from tests.bench.placement_floors import BestFit, Demand, Machines

PAGE = 2000


class Engine(Protocol):
    """An allocator to measure. It reads the stores below its folder; `async with` releases them."""

    hits: int
    misses: int

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def load(self) -> None:
        """Read everything, and build the data from which answers are computed."""
        ...

    async def allocate(
        self, job: str, entitlement: str, demand: Demand, tasks: int
    ) -> Sequence[str]:
        """Return the machines of the job's tasks, once the placement would survive a crash.

        In a repeated request, tasks stay where they are as far as possible. Tasks without room are
        left out.
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
    """The allocator of the control plane as a program uses it: `Allocator.place`, durable.

    Request, promises, priorities and quarantines are part of each answer, as in the product; there
    are no agents and no scheduler.
    """

    def __init__(self, folder: Path) -> None:
        self._stores = Stores(folder)
        self._stack = AsyncExitStack()
        self._reasons: dict[str, tuple[str, ...]] = {}
        self._specs: dict[str, tuple[Demand, int, JobSpec]] = {}

    @property
    def hits(self) -> int:
        return self.allocator.allocations.counts.hits

    @property
    def misses(self) -> int:
        return self.allocator.allocations.counts.misses

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._stores)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def load(self) -> None:
        with permanent_heap():
            opened = allocator_over(self._stores.own, self._stores.brokers)
            self.allocator = await self._stack.enter_async_context(opened)

    async def allocate(
        self, job: str, entitlement: str, demand: Demand, tasks: int
    ) -> Sequence[str]:
        known = self._specs.get(job)
        if known is None or known[:2] != (demand, tasks):
            spec = JobSpec(
                name=job,
                entitlement=entitlement,
                tasks=tasks,
                image=_IMAGE,
                command=["/bin/server"],
                limits=Limits(memory_max_bytes=demand.memory_bytes),
                rru=demand.rru,
                gpus=demand.gpus,
            )
            known = self._specs[job] = (demand, tasks, spec)
        done = await self.allocator.place(known[2])
        if done.reasons or job in self._reasons:
            self._reasons[job] = done.reasons
        return _Names(done.claims)

    async def free(self, job: str) -> None:
        self._specs.pop(job, None)
        await self.allocator.forget(job)

    async def fail(self, machine: str) -> None:
        await self.allocator.broker.carry_out(machine, MarkDown(reason="the bench says so"))

    async def restore(self, machine: str) -> None:
        await self.allocator.broker.carry_out(machine, MarkUp())

    def explain(self, job: str) -> str:
        return "; ".join(self._reasons.get(job, ()))


_IMAGE = "sha256:" + "1" * 64


class _Names(Sequence[str]):
    """Machine names of claims, read on access."""

    def __init__(self, claims: object) -> None:
        self._claims = claims

    def __len__(self) -> int:
        return len(self._claims) if self._claims is not None else 0  # type: ignore[arg-type]

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return [claim.machine.name for claim in self._claims or ()][at]  # type: ignore[attr-defined]


ENGINES = {"twine": TwineEngine, "best-fit": BestFitEngine}
