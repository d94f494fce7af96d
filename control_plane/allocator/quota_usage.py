"""Counts the machines against quotas (CP3).

With a quota of N, an entitlement has at any time:

- at most N machines that it holds and that take tasks, or that it lent to others;
- at most another N machines that its tasks must leave (drained, called back). So it may get other
  machines before these are empty, and has at most 2 N in all (docs/adr/0134).

Machines that an entitlement borrowed count against the quota of the lender (EL4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import micro
from control_plane.broker.core.unavailability import MOVING, leaving
from control_plane.portal.core.grants import MachineClass
from control_plane.portal.core.pools import HeldCapacity, Quota


@dataclass(frozen=True, slots=True)
class _Special:
    """A machine that is lent, or has a planned event that has not ended."""

    pool: str
    donor: str | None
    """The entitlement that lent it; None if it is not on loan."""
    leaves: bool
    """Whether its tasks must move away now."""


class QuotaUsage:
    """Follows loans and planned events, and computes which machines count."""

    def __init__(self, index: RegionIndex, wall: Callable[[], float]) -> None:
        """`wall` returns the date; the caller calls `note` for each record."""
        self._index, self._wall = index, wall
        self._special: dict[str, _Special] = {}
        self._special_in: dict[str, dict[str, None]] = {}
        """Pool → its special machines: dictionaries, because sets have no order."""
        self._lent_by: dict[str, dict[str, None]] = {}

    def note(self, record: MachineRecord) -> bool:
        """Record a machine's state; return whether that changes the counts."""
        events = record.unavailability
        planned = bool(events) and any(e.end is None and e.kind in MOVING for e in events)
        found = None
        if planned or record.loan is not None:
            donor = record.loan.donor if record.loan is not None else None
            found = _Special(record.entitlement, donor, leaving(record, self._wall()))
        return self._replace(record.machine, found)

    def forget(self, name: str) -> bool:
        """Forget a machine that is gone; return whether that changes the counts."""
        return self._replace(name, None)

    def special(self) -> list[str]:
        """Return the machines whose counting may change with time."""
        return list(self._special)

    def leaves(self, name: str) -> bool:
        """Return whether the tasks of a machine must leave it now."""
        special = self._special.get(name)
        return special is not None and special.leaves

    def held(self, pool: str, quota: Quota) -> HeldCapacity:
        """Return the amounts that count against a pool's quota."""
        found = self._index.pool(pool)
        held = HeldCapacity(found.size, found.micro_rru, Counter(found.per_type))
        for machine in self.uncounted(pool, quota):
            held.add(machine.capacity.machine_type, machine.capacity.rru, -1)
        for machine in self._lent(pool):
            held.add(machine.capacity.machine_type, machine.capacity.rru)
        return held

    def uncounted(self, pool: str, quota: Quota) -> Iterator[Machine]:
        """Yield the machines of a pool that do not count against its quota."""
        machines, rru = 0, 0
        for machine, special in self._of(pool):
            if special.donor is not None and special.donor != pool:
                yield machine
            elif special.leaves:
                machines += 1
                rru += micro(machine.capacity.rru)
                if quota.machines is not None and machines > quota.machines:
                    continue
                if quota.rru is None or rru <= micro(quota.rru):
                    yield machine

    def aside(self, pool: str, quota: Quota) -> Counter[MachineClass]:
        """Return class → how many of a pool's machines do not count; negative if lent ones add."""
        found: Counter[MachineClass] = Counter()
        for machine in self.uncounted(pool, quota):
            found[MachineClass.of(machine.capacity, machine.place)] += 1
        for machine in self._lent(pool):
            found[MachineClass.of(machine.capacity, machine.place)] -= 1
        return found

    def _of(self, pool: str) -> Iterator[tuple[Machine, _Special]]:
        for name in self._special_in.get(pool, ()):
            machine = self._index.machines.get(name)
            if machine is not None and machine.pool == pool:
                yield machine, self._special[name]

    def _lent(self, pool: str) -> Iterator[Machine]:
        if pool == FREE:
            return
        for name in self._lent_by.get(pool, ()):
            machine = self._index.machines.get(name)
            if machine is not None and machine.pool != pool:
                yield machine

    def _replace(self, name: str, special: _Special | None) -> bool:
        known = self._special.get(name)
        if known == special:
            return False
        if known is not None:
            del self._special[name]
            _remove_from(self._special_in, known.pool, name)
            _remove_from(self._lent_by, known.donor, name)
        if special is not None:
            self._special[name] = special
            self._special_in.setdefault(special.pool, {})[name] = None
            if special.donor is not None:
                self._lent_by.setdefault(special.donor, {})[name] = None
        return True


def _remove_from(table: dict[str, dict[str, None]], key: str | None, name: str) -> None:
    if key is None:
        return
    names = table[key]
    del names[name]
    if not names:
        del table[key]
