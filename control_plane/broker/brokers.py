"""Combines the resource brokers of a region: each request goes to the machine's own broker.

All brokers together form one free pool that every entitlement shares (RB7). A name is one machine
in the whole region. A free machine may move to another data center (`moves`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from agent.api.joining import JoinRequest
from control_plane.api.inventory import ImportResult, InventoryMachine, MachineScope
from control_plane.api.machine_commands import MachineCommand
from control_plane.api.machines import MachineRecord
from control_plane.broker.broker import Broker
from control_plane.broker.core.inventory import scope_test
from control_plane.broker.holds import Take, refused
from control_plane.broker.imports import Imports
from control_plane.broker.keys import find_datacenters
from control_plane.broker.moves import Moves, OnMachineChange
from control_plane.broker.region_table import RegionTable
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import PART, Loaded, for_each
from control_plane.store import Store
from wire.errors import Conflict, FieldError, NotFound, TwineError

_UNREACHABLE_S = 10.0
"""How long the machines of a broker that did not answer are left out of plans."""
_LOOK = 5000
"""Machines that are read before other tasks of the loop run: a few milliseconds."""
T = TypeVar("T")


class Brokers:
    """The region's brokers; each is made for the first machine of its data center."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        stores: Mapping[str, Store] | None = None,
        writer: str = "",
    ) -> None:
        """`stores` has the data centers with a store of their own (RB9).

        If several processes write to these stores, `writer` names this one. The name is unique
        among them, and the same after a restart.
        """
        self.by_datacenter: dict[str, Broker] = {}
        self.table = RegionTable(self.by_datacenter)
        self._store = store
        self._stores = dict(stores or {})
        self._runtime, self._writer = runtime, writer
        self._listeners: list[OnMachineChange] = []
        self._loaders: list[Loaded[MachineRecord]] = []
        self.is_followed = False
        """Whether other processes write machines, too (`followed_machines`)."""
        self._membership = asyncio.Lock()
        """Held while machines come, go or move, so that a name is in one place."""
        self._moves = Moves(
            self.by_datacenter,
            list(dict.fromkeys([store, *self._stores.values()])),
            lambda: self.is_followed,
            self._report,
        )
        self._imports = Imports(store, runtime, self, writer)
        self._loaded = False
        self._parties: dict[str, list[Broker]] = {}
        """Transaction → the brokers that were asked to hold machines for it."""
        self._unreachable: dict[str, tuple[str, float]] = {}
        """Data center whose broker did not answer → why, and until when it is not called."""

    async def load(self) -> None:
        """Read all machines of the region; see `Table.load`."""
        for datacenter in sorted(await find_datacenters(self._store) | self._stores.keys()):
            self.at(datacenter)
        await self._moves.load()
        for broker in self.by_datacenter.values():
            await broker.load()
        if not (self.is_followed and self._writer):  # else the moving process settles
            await self._moves.settle()
        self._loaded = True
        await self._imports.load()

    def at(self, datacenter: str) -> Broker:
        """Return the broker of a data center, a new one if there is none."""
        broker = self.by_datacenter.get(datacenter)
        if broker is None:
            store = self._stores.get(datacenter, self._store)
            broker = Broker(store, self._runtime, datacenter, self._writer)
            broker.table.is_followed = self.is_followed
            broker.table.listen(self._moves.on_change, self._on_load)
            self.by_datacenter[datacenter] = broker
            if self._loaded:
                broker.table.start_revisions()
        return broker

    def of(self, machine: str) -> Broker:
        """Return the broker of a machine, or raise `NotFound`."""
        home = self.table.broker_of(machine)
        if home is None:
            raise NotFound(f"there is no machine {machine!r}")
        return home

    def listen(
        self, on_change: OnMachineChange, loaded: Loaded[MachineRecord] | None = None
    ) -> None:
        """Call `on_change(machine, before, after)` after each change (RB4); see `Table.listen`."""
        self._listeners.append(on_change)
        self._loaders.append(loaded or for_each(on_change))

    # -- finding

    def held(self, entitlement: str) -> list[MachineRecord]:
        """Return the machines of an entitlement; of the free pool for `FREE` (RB7)."""
        parts = [broker.held(entitlement) for broker in self.by_datacenter.values()]
        return list(heapq.merge(*parts, key=lambda record: record.machine))

    def names_held(self, entitlement: str) -> list[str]:
        """Return the names of the machines of an entitlement, in order."""
        return sorted(
            chain.from_iterable(b.names_held(entitlement) for b in self.by_datacenter.values())
        )

    def count(self, entitlement: str) -> int:
        """Return how many machines an entitlement has in the region."""
        return sum(broker.count(entitlement) for broker in self.by_datacenter.values())

    async def scan(self, scope: MachineScope) -> list[MachineRecord]:
        """Return the machines of a scope, by name; other tasks run meanwhile."""
        suits, found = scope_test(scope), list[MachineRecord]()
        for number, name in enumerate(self.table):
            if number % _LOOK == 0:
                await asyncio.sleep(0)
            record = self.table.find(name)
            if record is not None and suits(record):
                found.append(record)
        return found

    # -- coming, going and moving

    async def join(self, request: JoinRequest) -> MachineRecord:
        """Record a machine; one of another data center moves if it is free, else `Conflict`."""
        async with self._membership:
            await self._moves.settle()
            home = self.table.broker_of(request.machine)
            known = home.table.get(request.machine) if home is not None else None
            if home is None:
                home = self.at(request.location.datacenter)
            elif known is not None and known.hardware is None:
                home = await self.ensure_in(known, request.location.datacenter)
            return await home.join(request)

    async def move(self, machine: str, datacenter: str) -> None:
        """Move a free machine to another data center, or raise `Conflict`."""
        async with self._membership:
            await self._settle()
            await self.ensure_in(self.table.get(machine), datacenter)

    async def remove(self, machine: str) -> None:
        """Forget a free machine that is decommissioned or was replaced; see `Broker.remove`."""
        async with self._membership:
            await self._settle()
            await self.of(machine).remove(machine)

    async def add(self, records: Mapping[str, MachineRecord]) -> None:
        """Add new machines to the free pool (RB10), in transactions of a thousand."""
        async with self._membership:
            await self._settle()
            known = [name for name in records if self.table.find(name) is not None]
            if known:
                errors = [FieldError(field=name, reason="is already known") for name in known]
                raise refused(f"add {len(records)} machines", errors)
            await self.add_new(records)

    async def import_machines(
        self,
        machines: Sequence[InventoryMachine],
        *,
        simulated: bool = False,
        dry_run: bool = False,
    ) -> ImportResult:
        """Apply a list of machines to the records; `Conflict` names everything that prevents it.

        New machines are added, known ones are updated, machines that are not listed stay. The list
        is applied whole or not at all, even across failures (`imports`).
        """
        async with self._membership:
            await self._settle()
            return await self._imports.apply(machines, simulated=simulated, dry_run=dry_run)

    async def finish_imports(self) -> None:
        """Finish imports that a failure interrupted, until cancelled."""
        await self._imports.run(self._membership)

    # -- calls to the broker of each machine

    async def release(self, machine: str, *, revision: int) -> MachineRecord:
        """Give a machine back to the free pool, unless anything changed since `revision`."""
        return (await self.of(machine).release_many({machine: revision}))[0]

    async def resolve_outcome(self, machine: str) -> None:
        """Read a machine again if the outcome of its last write is unknown."""
        async with self.of(machine).table.lock(machine):
            pass  # taking the lock reads the record first

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all these machines at their brokers, or none and raise `Conflict` (AL12)."""
        parts = self.split(takes)
        self._parties[transaction] = list(parts)
        try:
            await _gather_all(
                self._answer_of(b, b.holds.prepare(transaction, {n: takes[n] for n in names}))
                for b, names in parts.items()
            )
        except TwineError:
            await self.abort(transaction)
            raise

    async def commit(self, transaction: str) -> list[MachineRecord]:
        """Assign the machines that a transaction holds; a repetition changes nothing."""
        brokers = self._brokers_of(transaction)
        done = await _gather_all(self._answer_of(b, b.holds.commit(transaction)) for b in brokers)
        self._parties.pop(transaction, None)
        return [record for records in done for record in records]

    def unreachable(self) -> dict[str, str]:
        """Return the data centers whose brokers did not answer lately, and why."""
        now = self._runtime.now() if self._unreachable else 0.0
        self._unreachable = {dc: found for dc, found in self._unreachable.items() if found[1] > now}
        return {datacenter: why for datacenter, (why, _) in self._unreachable.items()}

    async def _answer_of(self, broker: Broker, work: Awaitable[T]) -> T:
        """Return a broker's answer; if none comes, record that, so that later calls do not wait."""
        try:
            return await work
        except (Conflict, NotFound):
            raise
        except (TwineError, OSError) as e:
            self._unreachable[broker.datacenter] = str(e), self._runtime.now() + _UNREACHABLE_S
            raise
        except asyncio.CancelledError:
            why = "it did not answer in time"
            self._unreachable[broker.datacenter] = why, self._runtime.now() + _UNREACHABLE_S
            raise

    async def abort(self, transaction: str) -> None:
        """Release the machines that a transaction holds; a repetition changes nothing."""
        await _gather_all(
            broker.holds.abort(transaction) for broker in self._brokers_of(transaction)
        )
        self._parties.pop(transaction, None)

    def _brokers_of(self, transaction: str) -> list[Broker]:
        """Return the brokers of a transaction: where it was prepared, and where it holds machines.

        After a restart only the holds identify them.
        """
        holding = [b for b in self.by_datacenter.values() if b.holds.of(transaction)]
        return list(dict.fromkeys([*self._parties.get(transaction, ()), *holding]))

    def in_doubt(self) -> dict[str, list[str]]:
        """Return each transaction that holds machines, with their names."""
        found: dict[str, list[str]] = {}
        for broker in self.by_datacenter.values():
            for transaction, names in broker.holds.in_doubt().items():
                found[transaction] = sorted(found.get(transaction, []) + names)
        return found

    async def carry_out(self, machine: str, command: MachineCommand) -> MachineRecord:
        """Carry out a command for a machine; `NotFound` if there is no such machine."""
        return (await self.of(machine).carry_out({machine: command}))[0]

    def split(self, names: Mapping[str, object] | Sequence[str]) -> dict[Broker, list[str]]:
        """Return the machines by broker, or raise `NotFound`."""
        parts: dict[Broker, list[str]] = {}
        for name in names:
            parts.setdefault(self.of(name), []).append(name)
        return parts

    # -- internal

    async def add_new(self, records: Mapping[str, MachineRecord]) -> None:
        """Add new machines; the caller holds the membership lock."""
        by_datacenter: dict[str, list[MachineRecord]] = defaultdict(list)
        for record in records.values():
            by_datacenter[record.location.datacenter].append(record)
        for datacenter, added in by_datacenter.items():
            for first in range(0, len(added), PART):
                part = {record.machine: record for record in added[first : first + PART]}
                await self.at(datacenter).put_many(part)
                await asyncio.sleep(0)

    async def ensure_in(self, record: MachineRecord, datacenter: str) -> Broker:
        """Return the broker of a data center once it has the machine; `Conflict` if it is taken.

        The caller holds the membership lock.
        """
        home, target = self.of(record.machine), self.at(datacenter)
        if home is not target:
            await self._moves.move(record.machine, home, target)
        return target

    async def _settle(self) -> None:
        """Finish interrupted moves and imports, or raise why that is impossible."""
        await self._moves.settle()
        await self._imports.settle()

    def _on_load(self, records: Mapping[str, MachineRecord]) -> None:
        if self._moves.any_doubled:
            for name, record in records.items():
                self._moves.on_change(name, None, record)
            return
        for loaded in self._loaders:
            loaded(records)

    def _report(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        for on_change in self._listeners:
            on_change(name, before, after)


async def change_each(
    brokers: Brokers,
    machines: Collection[str],
    change: Callable[[MachineRecord], MachineRecord],
) -> list[MachineRecord]:
    """Change each machine, and return all by name; if a part fails, earlier changes stay."""
    changed: list[MachineRecord] = []
    for broker, names in brokers.split(sorted(set(machines))).items():
        for first in range(0, len(names), PART):
            changed += await broker.change_many(names[first : first + PART], change)
            await asyncio.sleep(0)
    return sorted(changed, key=lambda record: record.machine)


async def _gather_all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results once all have ended; if some failed, raise the most informative error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failures:
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    errors = [e for failure in failures if isinstance(failure, Conflict) for e in failure.errors]
    others = [failure for failure in failures if not isinstance(failure, Conflict)]
    if others or not errors:
        raise (others or failures)[0]
    raise refused("hold machines at all brokers", errors) if len(failures) > 1 else failures[0]
