"""Serves requests of operators and subscribers about machines, for the front end."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from control_plane.api.inventory import (
    BrokerMachines,
    BrokerView,
    BrokerViews,
    Drain,
    ImportResult,
    Lend,
    MachineChange,
    MachineScope,
    Records,
    Relabel,
    Revoke,
    Undrain,
)
from control_plane.api.machines import MachineRecord, Machines, MachineView, RegionMap
from control_plane.broker.broker import Broker
from control_plane.broker.brokers import Brokers, change_each
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.inventory import parse_csv, parse_json, scope_test
from control_plane.broker.core.labels import relabelled
from control_plane.broker.core.region_map import MAP_FACTS, Draw, RegionCount
from control_plane.broker.loans import Loans, ProfileOf
from control_plane.broker.outages import Outages
from control_plane.runtime.limits import Limit
from control_plane.runtime.runtime import Runtime
from control_plane.store import Compacted
from wire.errors import Conflict, InvalidInput, NotFound
from wire.quantity_fields import TEXT_ENCODING

MAX_PAGE = 5000
"""Machines in one answer, which is then some 5 MB."""
_Row = tuple[tuple[str | int, ...], str]
"""Sort key, and the machine."""
_ROWS = 1000
"""Machines that are sorted in one call: freeing 50,000 rows at once would take 12 ms."""
_LOOK = 20
"""Machines that are read between two checks whether other tasks of the loop wait."""
_ERRORS_SHOWN = 200
View = Callable[[MachineRecord], MachineView]
TasksOf = Callable[[str], tuple[int, bool]]
"""Returns how many tasks a machine has, and whether its agent answered lately."""


@dataclass(frozen=True, slots=True)
class MachineQuery:
    """Which machines are listed: those of a scope with a text in their name; and in which order."""

    scope: MachineScope
    search: str = ""
    sort: str = "name"


_ORDERS: dict[str, Callable[[MachineRecord, int], tuple[str | int, ...]]] = {
    "entitlement": lambda record, _: (not record.entitlement, record.entitlement),
    "type": lambda record, _: (record.machine_type,),
    "tasks": lambda _, tasks: (-tasks,),
    "profile": lambda record, _: (not record.profile, record.profile),
    "place": lambda r, _: (r.location.datacenter, r.location.msb, r.location.rack),
}
"""Name of an order → function of a machine and its number of tasks that returns its sort key.

Machines with equal keys are sorted by name."""


def _smallest_rows(number: int, rows: list[_Row]) -> list[_Row]:
    return heapq.nsmallest(number, rows)


class MachineService:
    """Lists, drains, lends, imports and removes machines, for callers of the front end."""

    def __init__(
        self,
        brokers: Brokers,
        runtime: Runtime,
        view: View,
        profile_of: ProfileOf,
        take_away: Limit | None = None,
        tasks_of: TasksOf = lambda _: (0, False),
        draw: Draw = lambda _: (0.0, 0.0),
    ) -> None:
        """`view` returns the tasks of a machine, `profile_of` the profile of an entitlement.

        `tasks_of` and `draw` are for the map of the region.
        """
        self._tasks_of, self._draw = tasks_of, draw
        self.outages = Outages(brokers, runtime)
        self.loans = Loans(brokers, runtime, take_away)
        self._brokers = brokers
        self._runtime = runtime
        self._view = view
        self._profile_of = profile_of

    async def run(self) -> None:
        """End revoked loans and finish decided imports, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._brokers.finish_imports())
            await self.loans.run(self._is_empty, self._profile_of)

    # -- reading

    async def page(self, query: MachineQuery, after: str, limit: int) -> Machines:
        """Return some machines after `after`: a name, or a position in another order."""
        limit, found = max(1, min(limit, MAX_PAGE)), list[MachineView]()
        if query.sort != "name":
            return await self._sorted_page(query, after, limit)
        async for record in self._suitable(query, after):
            if len(found) == limit:
                return Machines(machines=found, next=found[-1].record.machine)
            found.append(self._view(record))
        return Machines(machines=found)

    async def _sorted_page(self, query: MachineQuery, after: str, limit: int) -> Machines:
        """Return machines in another order than by name; this reads all machines."""
        key = _ORDERS.get(query.sort)
        if key is None:
            orders = ", ".join(("name", *_ORDERS))
            raise InvalidInput(f"parameter sort is one of {orders}, not {query.sort!r}")
        if after and not (after.isascii() and after.isdecimal() and len(after) < 9):
            raise InvalidInput(f"with sort = {query.sort}, after is a number, not {after[:20]!r}")
        begin = int(after or 0)
        end = begin + limit
        rows, first, suitable = list[_Row](), list[_Row](), 0
        async for record in self._suitable(query, ""):
            rows.append((key(record, self._tasks_of(record.machine)[0]), record.machine))
            suitable += 1
            if len(rows) == _ROWS:
                first, rows = await self._runtime.offload(_smallest_rows, end, first + rows), []
        first = await self._runtime.offload(_smallest_rows, end, first + rows)
        records = (self._brokers.table.find(name) for _, name in first[begin:])
        views = [self._view(record) for record in records if record is not None]
        return Machines(machines=views, next=str(end) if suitable > end else "")

    async def _suitable(self, query: MachineQuery, after: str) -> AsyncIterator[MachineRecord]:
        """Yield the machines that match a query, by name."""
        suits, table = scope_test(query.scope), self._brokers.table
        for number, name in enumerate(table.after(after)):
            if number % _LOOK == 0:
                await self._runtime.checkpoint(answers=True)
            record = table.find(name)
            if record is not None and query.search in name and suits(record):
                yield record

    async def region_map(
        self, by: str, counts: Callable[[MachineRecord], bool] | None = None
    ) -> RegionMap:
        """Return the machines for which `counts` is true, by place and by one fact about each."""
        if by not in MAP_FACTS:
            raise InvalidInput(f"parameter by is one of {', '.join(MAP_FACTS)}, not {by!r}")
        tasks_of, found = self._tasks_of, RegionCount(by, len(self._brokers.table), self._draw)
        add = found.add  # names are looked up once, not for each of 50,000 machines
        for broker in list(self._brokers.by_datacenter.values()):
            find = broker.table.find
            for number, name in enumerate(broker.table.names()):
                if number % _LOOK == 0:
                    await self._runtime.checkpoint(answers=True)
                record = find(name)
                if record is not None and (counts is None or counts(record)):
                    add(record, *tasks_of(name))
        return await self._runtime.compute(len(self._brokers.table), found.answer)

    def get(self, name: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        return self._view(self._brokers.table.get(name))

    def known(self, names: Iterable[str]) -> list[str]:
        """Return those names that machines of the region have."""
        return [name for name in names if self._brokers.table.find(name) is not None]

    def joined(self) -> list[str]:
        """Return the machines that have an agent."""
        return [record.machine for record in self._brokers.table.records() if record.address]

    def brokers(self) -> BrokerViews:
        """Return all brokers, by data center."""
        return BrokerViews(
            brokers=[
                BrokerView(
                    datacenter=name,
                    machines=len(broker.table),
                    free=broker.count(FREE),
                    revision=broker.table.latest,
                )
                for name, broker in sorted(self._brokers.by_datacenter.items())
            ]
        )

    async def broker_page(self, datacenter: str, name_after: str, limit: int) -> BrokerMachines:
        """Return some of a broker's machines, and the revision from which to watch."""
        table = self._broker(datacenter).table
        revision = table.latest
        limit = max(1, min(limit, MAX_PAGE))
        names = list(islice(table.after(name_after), limit))
        more = next(table.after(names[-1]), "") if names else ""
        return BrokerMachines(
            revision=revision,
            machines=[record for name in names if (record := table.find(name)) is not None],
            next=names[-1] if more else "",
        )

    async def broker_changes(
        self, datacenter: str, after: int, limit: int, wait_s: float
    ) -> BrokerMachines:
        """Return a broker's changes after a revision; waits up to `wait_s` for the first."""
        table = self._broker(datacenter).table
        try:
            async with asyncio.timeout(wait_s):
                await table.changed(after)
        except TimeoutError:
            pass
        try:
            found = table.changes(after, max(1, min(limit, MAX_PAGE)))
        except Compacted:
            return BrokerMachines(revision=table.latest, lost=True)
        changes = [MachineChange(name=n, record=r, revision=at) for n, r, at in found]
        return BrokerMachines(revision=changes[-1].revision if changes else after, changes=changes)

    # -- changing

    async def drain(self, request: Drain) -> Records:
        """Announce that machines will be unavailable, so that tasks move away in time."""
        start = self._runtime.date() + request.start_in_s
        changed = await self.outages.plan_unavailability(
            await self.outages.machines(request.machines, request.scope),
            kind=request.kind,
            reason=request.reason,
            start=start,
            deadline=None if request.deadline_s is None else start + request.deadline_s,
            expected_duration_s=request.duration_s,
            tasks_survive=request.tasks_survive,
        )
        return Records(machines=changed)

    async def undrain(self, request: Undrain) -> Records:
        """End planned unavailability of machines."""
        names = await self.outages.machines(request.machines, request.scope)
        return Records(machines=await self.outages.undrain(names))

    async def label(self, request: Relabel) -> Records:
        """Set and remove labels of machines: of all of them, or of none if one would be invalid."""
        names = await self.outages.machines(request.machines, request.scope)
        both = sorted(request.set.keys() & set(request.remove))
        if both or not (request.set or request.remove):
            why = f"{both[0]!r} is both set and removed" if both else "there is nothing to change"
            raise InvalidInput(f"cannot label machines: {why}", hint="--set NAME=VALUE")
        for name in names:
            relabelled(self._brokers.table.get(name), request.set, request.remove)
        changed = await change_each(
            self._brokers, names, lambda record: relabelled(record, request.set, request.remove)
        )
        return Records(machines=changed)

    async def lend(self, request: Lend) -> MachineRecord:
        """Give an empty machine to another entitlement for a while."""
        profile = self._profile_of(request.borrower)
        if not profile:
            raise NotFound(
                f"there is no entitlement {request.borrower!r} with its own machines",
                hint="twinectl entitlement list",
            )
        empty = self._is_empty(request.machine)
        return await self.loans.lend(
            request.machine, request.borrower, profile, donor=request.donor, empty=empty
        )

    async def revoke(self, request: Revoke) -> Records:
        """Call lent machines back."""
        return Records(machines=await self.loans.revoke(request.machines, request.return_within_s))

    async def remove(self, name: str) -> None:
        """Forget a machine that is free, empty, and decommissioned or replaced."""
        tasks = self.get(name).tasks
        if tasks:
            raise Conflict(f"cannot remove machine {name!r}: it still runs {', '.join(tasks[:5])}")
        await self._brokers.remove(name)

    async def import_inventory(
        self, data: bytes, format_: str, *, simulated: bool = False, dry_run: bool = False
    ) -> ImportResult:
        """Apply a list of machines to the records, whole or not at all."""
        if format_ == "csv":
            try:
                text = data.decode(TEXT_ENCODING)
            except UnicodeDecodeError as e:
                raise InvalidInput(f"cannot import the list: it is not UTF-8: {e}") from e
            inventory = await asyncio.to_thread(parse_csv, text)
        else:
            inventory = await asyncio.to_thread(parse_json, data)
        if inventory.errors:
            count = len(inventory.errors)
            first = inventory.errors[0]
            more = f" (and {count - 1} more)" if count > 1 else ""
            raise InvalidInput(
                f"cannot import the list, nothing was changed: {first.field}: {first.reason}{more}",
                errors=inventory.errors[:_ERRORS_SHOWN],
            )
        return await self._brokers.import_machines(
            inventory.machines, simulated=simulated, dry_run=dry_run
        )

    def _broker(self, datacenter: str) -> Broker:
        broker = self._brokers.by_datacenter.get(datacenter)
        if broker is None:
            raise NotFound(f"there is no broker of data center {datacenter!r}")
        return broker

    def _is_empty(self, name: str) -> bool:
        return not self.get(name).tasks
