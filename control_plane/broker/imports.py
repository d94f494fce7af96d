"""Imports lists of machines whole or not at all, in any number of transactions.

Differences are staged first, in rows that no component reads. Then one write decides: before it no
part of the list is valid, after it all of the list is. This process or the next one then writes the
machines. Repeating a part changes nothing, so no progress is recorded. Rows are deleted when all
are written, and the decision last.

While a decided list is unfinished, operators cannot move or remove machines, and no other list is
accepted. Entitlements still take and give back machines. A machine that is taken after the decision
keeps its place and type, because placements rely on them, and gets the list's other values. If the
same list is sent again, its error names that machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Protocol

from control_plane.api.imports import ImportDecision, ImportRow
from control_plane.api.inventory import ImportResult, InventoryMachine
from control_plane.api.machines import MachineRecord
from control_plane.broker.broker import Broker
from control_plane.broker.core.inventory import (
    conflict_with,
    new_record,
    permitted_values,
    with_values,
)
from control_plane.broker.holds import refused
from control_plane.broker.region_table import RegionTable
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import PAGE, PART
from control_plane.store import Delete, Put, Store
from control_plane.store.outcomes import Slots, WriteAttempt
from control_plane.store.protocol import LAST
from control_plane.store.records import IMPORT_DECISIONS, IMPORTS, decode, encode
from wire.errors import Busy, Conflict, FieldError, TwineError, UnknownOutcome

log = logging.getLogger(__name__)
_ROWS = 8
"""Rows of one transaction. A row is usually 16 KiB, and at most 170 KiB; a distributed store
accepts 1.5 MiB."""
_AGAIN_S = 5.0
"""Pause between two attempts to finish an import whose stores fail."""


class ImportTarget(Protocol):
    """The operations of the region's brokers that an import uses."""

    table: RegionTable

    def split(self, names: Sequence[str]) -> dict[Broker, list[str]]:
        """Return the machines by broker."""

    async def add_new(self, records: Mapping[str, MachineRecord]) -> None:
        """Add new machines."""

    async def ensure_in(self, record: MachineRecord, datacenter: str) -> Broker:
        """Move a free machine to another data center, or raise `Conflict`."""


class Imports:
    """Applies lists to the records. Callers hold the region's membership lock."""

    def __init__(
        self, store: Store, runtime: Runtime, target: ImportTarget, writer: str = ""
    ) -> None:
        """Rows and decisions are in the region's main store."""
        self._store, self._runtime, self._target = store, runtime, target
        self._slots = Slots(store, IMPORTS.rstrip("/"), writer)
        self._open: dict[str, WriteAttempt | None] = {}
        """Import that may have rows → its deciding write; None for imports of earlier processes."""
        self._count = 0
        self._unfinished = asyncio.Event()
        """Set when `run` must finish an import or delete its rows."""

    async def load(self) -> None:
        """Finish imports that were decided before this start, and delete the others."""
        for prefix in (IMPORTS, IMPORT_DECISIONS):
            after = ""
            while entries := (await self._store.list_prefix(prefix, after, 1)).entries:
                name = entries[0].key.removeprefix(prefix).split("/", 1)[0]
                self._open[name] = None
                after = f"{prefix}{name}/{LAST}"
        await self.settle()

    async def run(self, membership: asyncio.Lock) -> None:
        """Finish interrupted imports or delete their rows, until cancelled."""
        while True:
            await self._unfinished.wait()
            self._unfinished.clear()
            try:
                async with membership:
                    await self.settle()
            except (TwineError, OSError) as e:
                log.warning("an import waits for its completion", extra={"reason": str(e)})
                self._unfinished.set()
                await self._runtime.sleep(_AGAIN_S)

    async def apply(
        self, machines: Sequence[InventoryMachine], *, simulated: bool, dry_run: bool
    ) -> ImportResult:
        """Apply a list, or raise and change nothing; see `ImportResult.pending`.

        `Conflict` names everything that prevents it.
        """
        new, changed = await self._differences(machines)
        pending = False
        if not dry_run and (new or changed):
            pending = not await self._decide_and_write([*new, *changed], simulated=simulated)
        return ImportResult(
            added=len(new),
            updated=len(changed),
            unchanged=len(machines) - len(new) - len(changed),
            dry_run=dry_run,
            pending=pending,
        )

    async def settle(self) -> None:
        """Finish each decided import, and delete staged rows of others."""
        for name, attempt in list(self._open.items()):
            if attempt is not None:
                await attempt.outcome()  # after this, a late arrival of the write is refused
            entry = await self._store.get(IMPORT_DECISIONS + name)
            if entry is not None:
                await self._carry_out(name, decode(entry.value, ImportDecision, entry.key))
            await self._delete_rows(name)
            del self._open[name]

    # -- internal

    async def _differences(
        self, machines: Sequence[InventoryMachine]
    ) -> tuple[list[InventoryMachine], list[InventoryMachine]]:
        """Return the new and the changed machines, or raise all errors that prevent the import."""
        new, changed = list[InventoryMachine](), list[InventoryMachine]()
        errors = []
        for number, machine in enumerate(machines):
            if number % PAGE == 0:
                await asyncio.sleep(0)
            known = self._target.table.find(machine.machine)
            if known is None:
                new.append(machine)
            elif why := conflict_with(known, machine):
                errors.append(FieldError(field=machine.machine, reason=why))
            elif with_values(known, machine) != known:
                changed.append(machine)
        if errors:
            raise refused(f"import {len(machines)} machines", errors)
        return new, changed

    async def _decide_and_write(
        self, machines: Sequence[InventoryMachine], *, simulated: bool
    ) -> bool:
        """Decide an import, and return whether all of it is written.

        Every error is raised before the decision.
        """
        self._count += 1
        name = f"{self._store.epoch()}-{self._count}"
        key = IMPORT_DECISIONS + name
        decision = ImportDecision(simulated=simulated, time=self._runtime.date())
        attempt = WriteAttempt(self._slots, {key: 0}, [Put(key, encode(decision))])
        self._open[name] = attempt
        try:
            await self._stage(name, machines)
            await self._differences(machines)  # staging takes time: machines may be taken by now
            await _decide(attempt, len(machines))
            try:
                await self.settle()
                return True
            except (TwineError, OSError) as e:
                log.warning("an import is completed later", extra={"reason": str(e)})
                self._unfinished.set()
                return False
        except BaseException:
            self._unfinished.set()
            raise

    async def _stage(self, name: str, machines: Sequence[InventoryMachine]) -> None:
        """Write the differences to rows; each row has machines of one data center."""
        puts = (
            Put(f"{IMPORTS}{name}/{number:06d}", encode(row))
            for number, row in enumerate(_rows(machines))
        )
        while part := list(islice(puts, _ROWS)):
            try:
                await self._store.txn({}, part)
            except UnknownOutcome as e:
                raise _failed(len(machines)) from e
            await self._runtime.checkpoint()

    async def _carry_out(self, name: str, decision: ImportDecision) -> None:
        """Write a decided list; a data center whose store fails does not delay the others."""
        failed: dict[str, Exception] = {}
        prefix, after, count = f"{IMPORTS}{name}/", "", 0
        while entries := (await self._store.list_prefix(prefix, after, _ROWS)).entries:
            after = entries[-1].key
            for entry in entries:
                machines = decode(entry.value, ImportRow, entry.key).machines
                datacenter = machines[0].location.datacenter
                if datacenter in failed:
                    continue
                try:
                    await self._write(machines, decision)
                except (TwineError, OSError) as e:
                    failed[datacenter] = e
                count += len(machines)
                await self._runtime.checkpoint()
        if failed:
            raise next(iter(failed.values()))
        log.info("inventory imported", extra={"machines": count})

    async def _write(self, machines: Sequence[InventoryMachine], decision: ImportDecision) -> None:
        """Write those machines of a row that do not have the list's values yet."""
        table = self._target.table
        new: dict[str, MachineRecord] = {}
        changed: dict[str, InventoryMachine] = {}
        for machine in machines:
            known = table.find(machine.machine)
            if known is None:
                found = new_record(machine, decision.time, simulated=decision.simulated)
                new[machine.machine] = found
            elif with_values(known, permitted_values(known, machine)) != known:
                changed[machine.machine] = machine
        await self._target.add_new(new)
        for name, machine in changed.items():
            wanted = permitted_values(table.get(name), machine)
            await self._target.ensure_in(table.get(name), wanted.location.datacenter)

        def change(record: MachineRecord) -> MachineRecord:
            machine = permitted_values(record, changed[record.machine])
            if machine.location.datacenter != record.location.datacenter:
                raise Conflict(
                    f"machine {record.machine!r} became free just now; the retry of the "
                    "import moves it"
                )
            return with_values(record, machine)

        for broker, names in self._target.split(list(changed)).items():
            await broker.change_many(names, change)

    async def _delete_rows(self, name: str) -> None:
        """Delete the rows of an import, and its decision last."""
        prefix = f"{IMPORTS}{name}/"
        while entries := (await self._store.list_prefix(prefix, "", PART)).entries:
            await self._store.txn({}, [Delete(entry.key) for entry in entries])
        if await self._store.get(IMPORT_DECISIONS + name) is not None:
            await self._store.txn({}, [Delete(IMPORT_DECISIONS + name)])


def _rows(machines: Sequence[InventoryMachine]) -> Iterator[ImportRow]:
    """Yield rows of `PART` machines, each written in one transaction of one broker."""
    ordered = sorted(machines, key=lambda machine: machine.location.datacenter)
    for _, alike in groupby(ordered, lambda machine: machine.location.datacenter):
        while part := list(islice(alike, PART)):
            yield ImportRow(machines=part)


async def _decide(attempt: WriteAttempt, count: int) -> None:
    """Make the deciding write; raise if it was not made, or if its outcome is unknown."""
    try:
        await attempt.make()
        return
    except UnknownOutcome as e:
        lost = e
    try:
        made = await attempt.outcome()
    except TwineError as e:
        raise UnknownOutcome(
            f"unknown whether the list of {count} machines was accepted: {e}",
            hint=(
                "send it again once the store answers: the import is first completed or discarded"
            ),
        ) from e
    if not made:
        raise _failed(count) from lost


def _failed(count: int) -> Busy:
    return Busy(
        f"cannot import {count} machines: the store failed",
        hint="nothing was changed; the list may be sent again",
    )
