"""Sums the granted, held, used and remaining capacity of a region's machines.

`PortalReport.add` is called once per machine, so that the caller can let other tasks run between
the calls: a region has a million machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.capacity_report import (
    Amount,
    CapacityReport,
    Fragmentation,
    LargestTask,
    Line,
    Split,
    StackProposal,
)
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.capacity import size_of
from control_plane.broker.core.unavailability import blocking
from control_plane.portal.core.pools import Quota, pool_quotas

SMALL_MACHINES = 10
"""An entitlement with a quota of at most this many machines is small (CP8)."""
FULL_SHARE = 0.05
"""A machine with less than this share of a resource left is full."""


@dataclass(frozen=True, slots=True)
class Used:
    """The amounts of one machine that were promised to tasks."""

    rru: float = 0.0
    memory_bytes: int = 0


NOTHING = Used()


class _RunningSum:
    """A running sum of an amount."""

    __slots__ = ("machines", "memory_bytes", "power_w", "rru")

    def __init__(self) -> None:
        self.machines, self.rru, self.memory_bytes, self.power_w = 0, 0.0, 0, 0

    def add(self, machines: int, rru: float, memory_bytes: int, power_w: int) -> None:
        self.machines += machines
        self.rru += rru
        self.memory_bytes += memory_bytes
        self.power_w += power_w

    def add_sum(self, other: _RunningSum) -> None:
        self.add(other.machines, other.rru, other.memory_bytes, other.power_w)

    def amount(self) -> Amount:
        return Amount(
            machines=self.machines,
            rru=round(self.rru, 3),
            memory_bytes=self.memory_bytes,
            power_w=self.power_w,
        )

    def part(self, machines: int) -> Amount:
        """Return the amount of this many average machines."""
        share = machines / self.machines if self.machines else 0.0
        return Amount(
            machines=machines,
            rru=round(self.rru * share, 3),
            memory_bytes=round(self.memory_bytes * share),
            power_w=round(self.power_w * share),
        )


class _LineSums:
    """The sums of one line of the report."""

    __slots__ = ("all", "free", "held", "used")

    def __init__(self) -> None:
        self.all, self.held, self.used, self.free = (
            _RunningSum(),
            _RunningSum(),
            _RunningSum(),
            _RunningSum(),
        )


class PortalReport:
    """Collects machines, then returns the report."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._by_class: dict[
            tuple[str, str, str, str, str, str], tuple[_RunningSum, _RunningSum]
        ] = {}
        """Type, data center, MSB, entitlement, owner and class → size and use of the machines."""
        self._by_entitlement: defaultdict[str, _LineSums] = defaultdict(_LineSums)
        self._owned: defaultdict[str, _RunningSum] = defaultdict(_RunningSum)
        self._types: defaultdict[str, _LineSums] = defaultdict(_LineSums)
        self._datacenters: defaultdict[str, _LineSums] = defaultdict(_LineSums)
        self._msbs: defaultdict[str, _LineSums] = defaultdict(_LineSums)
        self._split: dict[str, _RunningSum] = {
            kind: _RunningSum()
            for kind in ("all", "guaranteed", "lent", "idle", "free", "unusable")
        }
        self._largest: dict[str, tuple[float, LargestTask]] = {}
        self._half_empty = self._idle = 0
        self._stranded_rru, self._stranded_memory = 0.0, 0

    def add(self, record: MachineRecord, used: Used = NOTHING) -> None:
        """Count one machine."""
        rru, memory_bytes, power_w = size_of(record)
        usable = record.state is MachineState.UP and not blocking(record, self._now)
        place, loan, entitlement = record.location, record.loan, record.entitlement
        owner = entitlement if loan is None else loan.donor
        kind = self._class_of(record, used, usable)
        key = (record.machine_type, place.datacenter, place.msb, entitlement, owner, kind)
        sums = self._by_class.get(key)
        if sums is None:
            sums = self._by_class[key] = _RunningSum(), _RunningSum()
        sums[0].add(1, rru, memory_bytes, power_w)
        if used != NOTHING:
            sums[1].add(1, used.rru, used.memory_bytes, 0)
        if entitlement:
            self._add_fragmentation(rru, memory_bytes, used)
        if usable:
            self._update_largest(record.machine_type, rru, memory_bytes, used)

    def _class_of(self, record: MachineRecord, used: Used, usable: bool) -> str:
        if not usable:
            return "unusable"
        if not record.entitlement:
            return "free"
        if record.loan is not None:
            return "lent"
        return "idle" if used == NOTHING else "guaranteed"

    def _add_to_lines(self) -> None:
        """Add the sums of equal machines to all lines that they belong to."""
        for key, (size, busy) in self._by_class.items():
            machine_type, datacenter, msb, entitlement, owner, kind = key
            lines = [
                self._types[machine_type],
                self._datacenters[datacenter],
                self._msbs[f"{datacenter}/{msb}"],
            ]
            if entitlement:
                lines.append(self._by_entitlement[entitlement])
            for line in lines:
                line.all.add_sum(size)
                (line.held if entitlement else line.free).add_sum(size)
                line.used.add_sum(busy)
            if owner:
                self._owned[owner].add_sum(size)
            self._split[kind].add_sum(size)
            self._split["all"].add_sum(size)
        self._by_class.clear()

    def _add_fragmentation(self, all_rru: float, all_bytes: int, used: Used) -> None:
        """Add the use of one held machine to the fragmentation."""
        rru = used.rru / all_rru if all_rru else 0.0
        memory = used.memory_bytes / all_bytes if all_bytes else 0.0
        self._half_empty += rru < 0.5 and memory < 0.5
        self._idle += used == NOTHING
        if memory > 1 - FULL_SHARE >= rru:
            self._stranded_rru += all_rru - used.rru
        if rru > 1 - FULL_SHARE >= memory:
            self._stranded_memory += all_bytes - used.memory_bytes

    def _update_largest(
        self, machine_type: str, all_rru: float, all_bytes: int, used: Used
    ) -> None:
        """Keep the machine of its type with the largest free share of its scarcer resource."""
        memory = max(0, all_bytes - used.memory_bytes)
        rru = max(0.0, all_rru - used.rru)
        share = memory / all_bytes if all_bytes else 0.0
        if all_rru:
            share = min(share, rru / all_rru)
        known = self._largest.get(machine_type)
        if known is None or (share, memory) > (known[0], known[1].memory_bytes):
            task = LargestTask(machine_type=machine_type, memory_bytes=memory, rru=round(rru, 3))
            self._largest[machine_type] = (share, task)

    # -- the end

    def finish(self, entitlements: Iterable[EntitlementRecord]) -> CapacityReport:
        """Return the report on all machines added."""
        self._add_to_lines()
        specs = {record.name: record.spec for record in entitlements}
        lines = [self._entitlement_line(name, spec) for name, spec in sorted(specs.items())]
        return CapacityReport(
            at=self._now,
            entitlements=lines,
            units=_roll_up(lines, specs),
            types=list(_place_lines(self._types)),
            datacenters=list(_place_lines(self._datacenters)),
            msbs=list(_place_lines(self._msbs)),
            fragmentation=self._fragmentation(lines, specs),
            split=self._make_split(pool_quotas(specs)),
        )

    def _entitlement_line(self, name: str, spec: EntitlementSpec) -> Line:
        sums = self._by_entitlement.get(name) or _LineSums()
        machines = _promised(spec)
        return Line(
            name=name,
            granted_machines=machines or 0,
            granted_rru=(spec.rru or 0.0) if machines is None else 0.0,
            held=sums.held.amount(),
            used=sums.used.amount(),
        )

    def _fragmentation(
        self, lines: list[Line], specs: Mapping[str, EntitlementSpec]
    ) -> Fragmentation:
        average = self._average_rru()
        small = [
            line
            for line in lines
            if line.granted_machines + line.granted_rru / average <= SMALL_MACHINES
        ]
        proposed = stacks(small, specs, average, self._average_memory())
        return Fragmentation(
            stacks=proposed,
            stacks_save=sum(stack.held - stack.needed for stack in proposed),
            entitlements=len(specs),
            small=len(small),
            small_share=len(small) / len(specs) if specs else 0.0,
            small_held=sum(line.held.machines for line in small),
            held=sum(line.held.machines for line in lines),
            half_empty=self._half_empty,
            idle=self._idle,
            stranded_rru=round(self._stranded_rru, 3),
            stranded_memory_bytes=self._stranded_memory,
            largest=[task for _, (_, task) in sorted(self._largest.items())],
        )

    def _make_split(self, quotas: Mapping[str, Quota]) -> Split:
        free = self._split["free"]
        promised = min(free.machines, sum(self._unheld(p, q) for p, q in quotas.items()))
        found = {kind: total.amount() for kind, total in self._split.items() if kind != "free"}
        unused, buffer = free.part(promised), free.part(free.machines - promised)
        usable = self._split["all"].rru - self._split["unusable"].rru
        spare = found["lent"].rru + found["idle"].rru + unused.rru + buffer.rru
        return Split(
            **found,
            unused_quota=unused,
            buffer=buffer,
            opportunistic_share=round(spare / usable, 4) if usable else 0.0,
            guaranteed_share=round(found["guaranteed"].rru / usable, 4) if usable else 0.0,
        )

    def _unheld(self, pool: str, quota: Quota) -> int:
        """Return how many machines a pool may still get; machines that it lent count as held."""
        owned = self._owned.get(pool) or _RunningSum()
        counts = [quota.machines] if quota.machines is not None else []
        counts += [sum(quota.per_type.values())] if quota.per_type else []
        if counts:
            return max(0, min(counts) - owned.machines)
        return max(0, int(((quota.rru or 0.0) - owned.rru) / self._average_rru()))

    def _average_rru(self) -> float:
        total = self._split["all"]
        return total.rru / total.machines if total.rru else 1.0

    def _average_memory(self) -> float:
        total = self._split["all"]
        return total.memory_bytes / total.machines if total.machines else 1.0


def stacks(
    small: Iterable[Line], specs: Mapping[str, EntitlementSpec], rru: float, memory: float
) -> list[StackProposal]:
    """Return the small entitlements that would hold fewer machines as reservations on one of them.

    Only entitlements whose tasks may share machines are combined: they have the same host profile,
    place, types, and rules for images and sandboxes. `rru` and `memory` are those of an average
    machine.
    """
    alike: defaultdict[tuple[object, ...], list[Line]] = defaultdict(list)
    for line in small:
        spec = specs[line.name]
        if spec.materialization is None:
            kind = (
                spec.host_profile,
                spec.region,
                spec.datacenter,
                tuple(sorted(spec.machine_types)),
            )
            rules = tuple(map(str, (spec.requires, spec.image_keys, spec.relaxations)))
            alike[*kind, *rules].append(line)
    found = []
    for lines in alike.values():
        used_rru = sum(line.used.rru for line in lines) / max(rru, 1e-9)
        used_memory = sum(line.used.memory_bytes for line in lines) / max(memory, 1e-9)
        held = sum(line.held.machines for line in lines)
        needed = max(1, ceil(max(used_rru, used_memory) - 1e-9))
        if len(lines) > 1 and needed < held:
            names = [line.name for line in lines]
            profile = specs[names[0]].host_profile
            found.append(
                StackProposal(host_profile=profile, entitlements=names, held=held, needed=needed)
            )
    return sorted(found, key=lambda stack: stack.needed - stack.held)


def _promised(spec: EntitlementSpec) -> int | None:
    """Return an entitlement's quota in machines; None if it is in RRU."""
    total = sum(spec.per_type.values())
    if spec.machines is None:
        return total or None
    return min(spec.machines, total) if spec.per_type else spec.machines


def _place_lines(sums: Mapping[str, _LineSums]) -> Iterator[Line]:
    for name, line in sorted(sums.items()):
        yield Line(
            name=name,
            all=line.all.amount(),
            held=line.held.amount(),
            used=line.used.amount(),
            free=line.free.amount(),
        )


def _roll_up(lines: Iterable[Line], specs: Mapping[str, EntitlementSpec]) -> list[Line]:
    """Return every node of the accounting hierarchy with the sum of all nodes below (MO13)."""
    nodes: dict[str, Line] = {}
    for line in lines:
        parts = [part for part in specs[line.name].business_unit.split("/") if part]
        for depth in range(len(parts) + 1):
            node = "/".join(parts[:depth])
            known = nodes.get(node) or Line(name=node)
            nodes[node] = replace(
                known,
                granted_machines=known.granted_machines + line.granted_machines,
                granted_rru=known.granted_rru + line.granted_rru,
                held=_plus(known.held, line.held),
                used=_plus(known.used, line.used),
            )
    return [nodes[name] for name in sorted(nodes, key=lambda name: name.split("/"))]


def _plus(first: Amount, second: Amount) -> Amount:
    return Amount(
        machines=first.machines + second.machines,
        rru=round(first.rru + second.rru, 3),
        memory_bytes=first.memory_bytes + second.memory_bytes,
        power_w=first.power_w + second.power_w,
    )
