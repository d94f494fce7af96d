"""Reads lists of machines in CSV or JSON, and applies them to records.

A list is accepted whole or not at all: all its errors are reported at once, by line. Equal places
and kinds of hardware become the same objects.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from agent.api import COUNT_MAX, ID_PATTERN, Location
from agent.api.joining import JoinRequest
from control_plane.api.inventory import InventoryMachine, MachineScope
from control_plane.api.machines import EventKind, Hardware, MachineRecord, MachineState
from control_plane.api.requirement_parser import parse
from control_plane.api.requirements import FOR_LISTS
from control_plane.broker.core.assignment import not_free
from control_plane.broker.core.labels import read_labels
from control_plane.broker.core.matching import Listed, holds
from control_plane.broker.core.unavailability import ended, with_event
from wire.errors import FieldError
from wire.quantity_fields import TEXT_ENCODING
from wire.units import shown

NOT_JOINED = "imported; its agent has not joined yet"
_PLACE = ("region", "datacenter", "msb", "row", "rack")
_WORDS = ("generation", "sku", "gpu_type")
_COUNTS = ("cpus", "gpus", "network_mbps", "power_w")
REQUIRED = ("machine", "datacenter", "msb", "row", "rack", "machine_type")
COLUMNS = (
    *("machine", *_PLACE, "machine_type", "generation", "sku", "rru", "cpus", "memory"),
    *("gpus", "gpu_type", "network_mbps", "power_w", "cluster", "address", "labels", "disk"),
)
_NAME = re.compile(ID_PATTERN)
_WORD = re.compile(r"[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]{0,126}[^\s\x00-\x1f\x7f])?")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]{1,253}):\d{1,5}")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*([KMGTP]?)(?:iB|B)?", re.IGNORECASE)
_MOST = {"cpus": 1 << 16, "gpus": 1 << 16}
"""As in `Hardware`; the others are bounded by `Count`."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """A list as read; its machines are complete only if there are no errors."""

    machines: tuple[InventoryMachine, ...] = ()
    errors: tuple[FieldError, ...] = ()


def parse_csv(text: str) -> Inventory:
    """Read a list whose first line names the columns; their order does not matter."""
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        if errors := _header_errors(header):
            return Inventory(errors=errors)
        rows = _Rows()
        for cells in reader:
            where = f"line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                reason = f"has {len(cells)} values for {len(header)} columns"
                rows.errors.append(FieldError(field=where, reason=reason))
                continue
            rows.add(where, dict(zip(header, map(str.strip, cells), strict=True)))
    except csv.Error as e:
        return Inventory(errors=(FieldError(field=f"line {reader.line_num}", reason=str(e)),))
    return rows.inventory()


def parse_json(data: str | bytes) -> Inventory:
    """Read a list of objects, or an object with the list as `machines`; fields are the columns."""
    try:
        text = data.decode(TEXT_ENCODING) if isinstance(data, bytes) else data
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        return Inventory(errors=(FieldError(field="(whole)", reason=f"is not JSON: {e}"),))
    if isinstance(document, dict):
        document = document.get("machines")
    if not isinstance(document, list):
        reason = "must be a list of machines, or an object with one as `machines`"
        return Inventory(errors=(FieldError(field="(whole)", reason=reason),))
    rows = _Rows()
    for number, item in enumerate(document, 1):
        where = f"machine {number}"
        if not isinstance(item, dict):
            rows.errors.append(FieldError(field=where, reason="must be an object"))
            continue
        rows.add(where, {k: "" if v is None else v for k, v in item.items()})
    return rows.inventory()


def size_of(value: str) -> int:
    """Return bytes: `64G`, `64GiB`, `1.5T` and `68719476736` are understood; K is 1024."""
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError("must be a size such as 64G, 64GiB or 68719476736")
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2].upper() or " "))


def new_record(machine: InventoryMachine, now: float, *, simulated: bool) -> MachineRecord:
    """Return the record of a machine that the list adds: down until its agent answers.

    With `simulated` there is no agent, and the machine is up.
    """
    record = MachineRecord(
        machine=machine.machine,
        location=machine.location,
        machine_type=machine.machine_type,
        address=machine.address,
        hardware=machine.hardware,
        cluster=machine.cluster,
        labels=machine.labels or None,
    )
    if simulated:
        return record
    down = replace(record, state=MachineState.DOWN)
    return with_event(down, EventKind.FAILURE, NOT_JOINED, now)


def conflict_with(record: MachineRecord, machine: InventoryMachine) -> str:
    """Return why the list cannot change a known machine, as a predicate.

    Placements rely on the location and the type of a machine: both change once it is free.
    """
    same = (record.location, record.machine_type) == (machine.location, machine.machine_type)
    if same or not (why := not_free(record)):
        return ""
    return f"{why}: its place and type can change only while it is free"


def permitted_values(record: MachineRecord, machine: InventoryMachine) -> InventoryMachine:
    """Return what a list may change of a known machine: all, or all but place and type."""
    if not conflict_with(record, machine):
        return machine
    return replace(machine, location=record.location, machine_type=record.machine_type)


def with_values(record: MachineRecord, machine: InventoryMachine) -> MachineRecord:
    """Return a known machine with the list's values; its agent's facts stay."""
    return replace(
        record,
        location=machine.location,
        machine_type=machine.machine_type,
        hardware=machine.hardware,
        cluster=machine.cluster,
        labels=record.labels if machine.labels is None else machine.labels or None,
        address=record.address if record.facts or not machine.address else machine.address,
    )


def joined_record(known: MachineRecord | None, request: JoinRequest, now: float) -> MachineRecord:
    """Return the record of a machine that joins; its known assignment stays.

    If the inventory lists the machine, place and type are taken from the inventory.
    """
    if known is None:
        return MachineRecord(
            machine=request.machine,
            location=request.location,
            machine_type=request.machine_type,
            address=request.address,
            facts=request.facts,
            joined_at=now,
        )
    record = replace(known, address=request.address, facts=request.facts)
    if known.hardware is None:
        location, kind = request.location, request.machine_type
        record = replace(record, location=location, machine_type=kind)
    if known.facts is None:
        record = ended(record, now, (EventKind.FAILURE,))
        record = replace(record, state=MachineState.UP, joined_at=now)
    return record


def scope_test(scope: MachineScope) -> Callable[[MachineRecord], bool]:
    """Return the test whether a machine is in a scope, for one pass over the machines.

    `InvalidInput` has the errors of its `where`.
    """
    places = {level: v for level in _PLACE if (v := getattr(scope, level)) is not None}
    own = ("machine_type", "entitlement", "cluster", "state")
    fields = {field: v for field in own if (v := getattr(scope, field)) is not None}

    wanted = None if scope.where is None else parse(scope.where, FOR_LISTS)

    near: dict[int, bool] = {}
    """Verdict on each place by its `id`: many machines share one object."""

    def is_near(location: Location) -> bool:
        verdict = all(getattr(location, level) == value for level, value in places.items())
        near[id(location)] = verdict
        return verdict

    def suits(record: MachineRecord) -> bool:
        location = record.location
        verdict = near.get(id(location))
        if not (is_near(location) if verdict is None else verdict):
            return False
        for field, value in fields.items():
            if getattr(record, field) != value:
                return False
        if wanted is not None and not holds(wanted, Listed.of(record)):
            return False
        if scope.unavailable is None:
            return True
        found = record.state is MachineState.DOWN or any(
            event.end is None for event in record.unavailability
        )
        return found is scope.unavailable

    return suits


class _Rows:
    """The machines read so far, and the errors of the others."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []
        self._machines: list[InventoryMachine] = []
        self._seen: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], Location] = {}
        self._kinds: dict[tuple[Any, ...], Hardware] = {}

    def add(self, where: str, row: Mapping[str, Any]) -> None:
        """Check one row and add its machine."""
        before = len(self.errors)
        values: dict[str, Any] = {}
        for column, value in row.items():
            check = _CHECKS.get(column)
            if check is None:
                self._wrong(where, column, f"is not a column; columns are {', '.join(COLUMNS)}")
            elif value != "":
                try:
                    values[column] = check(value)
                except ValueError as e:
                    self._wrong(where, column, f"{e}, not {shown(value)}")
        for column in REQUIRED:
            if row.get(column, "") == "":
                self._wrong(where, column, "is missing")
        name = values.get("machine")
        if name is not None:
            first = self._seen.setdefault(name, where)
            if first != where:
                self._wrong(where, "machine", f"{name!r} is already listed at {first}")
        if len(self.errors) == before:
            self._machines.append(self._machine(values))

    def inventory(self) -> Inventory:
        """Return the machines and errors so far."""
        if not self._machines and not self.errors:
            reason = "lists no machines"
            return Inventory(errors=(FieldError(field="(whole)", reason=reason),))
        return Inventory(tuple(self._machines), tuple(self.errors))

    def _wrong(self, where: str, column: str, reason: str) -> None:
        self.errors.append(FieldError(field=f"{where}: {column}", reason=reason))

    def _machine(self, values: dict[str, Any]) -> InventoryMachine:
        place = tuple(values.get(level) for level in _PLACE)
        if place not in self._places:
            given = {level: values[level] for level in _PLACE if level in values}
            self._places[place] = Location(**given)
        kind = tuple(values.get(field) for field in _HARDWARE)
        if kind not in self._kinds:
            given = {
                _SIZES.get(field, field): values[field] for field in _HARDWARE if field in values
            }
            self._kinds[kind] = Hardware(**given)
        return InventoryMachine(
            machine=values["machine"],
            location=self._places[place],
            machine_type=values["machine_type"],
            hardware=self._kinds[kind],
            cluster=values.get("cluster", ""),
            address=values.get("address", ""),
            labels=values.get("labels"),
        )


def _header_errors(header: list[str]) -> tuple[FieldError, ...]:
    errors = []
    for column in header:
        if column not in COLUMNS:
            known = ", ".join(COLUMNS)
            reason = f"{column!r} is not a column; columns are {known}"
            errors.append(FieldError(field="line 1", reason=reason))
        elif header.count(column) > 1:
            errors.append(FieldError(field="line 1", reason=f"column {column!r} occurs twice"))
    missing = [column for column in REQUIRED if column not in header]
    if missing:
        reason = f"columns are missing: {', '.join(missing)}"
        errors.append(FieldError(field="line 1", reason=reason))
    return tuple(dict.fromkeys(errors))


def _pattern_check(pattern: re.Pattern[str], words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(words)
        return value

    return check


def _count(value: Any, most: int = COUNT_MAX) -> int:
    try:
        number = int(value) if not isinstance(value, float | bool) else -1
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= most:
        raise ValueError(f"must be a whole number from 0 to {most}")
    return number


def _rru(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= 1e9:
        raise ValueError("must be a number from 0 to 1e9")
    return number


def _size(value: Any) -> int:
    return _count(size_of(value) if isinstance(value, str) else value)


_SIZES = {"memory": "memory_bytes", "disk": "disk_bytes"}
_HARDWARE = (*_WORDS, *_COUNTS, "rru", *_SIZES)
_NAMES: Iterable[str] = ("machine", *_PLACE, "machine_type", "cluster")
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **{n: _pattern_check(_NAME, "must be 1 to 63 of a-z, 0-9 and -") for n in _NAMES},
    **{n: _pattern_check(_WORD, "must be at most 128 printable characters") for n in _WORDS},
    **{n: partial(_count, most=_MOST.get(n, COUNT_MAX)) for n in _COUNTS},
    "rru": _rru,
    **dict.fromkeys(_SIZES, _size),
    "address": _pattern_check(_ADDRESS, "must be HOST:PORT"),
    "labels": read_labels,
}
