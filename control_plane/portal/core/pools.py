"""Quotas of pools (pseudo clusters): the sum of an entitlement and its reservations.

A *pool* is an entitlement that has machines of its own. An entitlement with a `materialization` has
none. It is a stackable reservation: a quota on the pool of another entitlement, with which it
shares machines and host profile (paper §4; MO16).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.api.capacity import EntitlementSpec
from control_plane.broker.core.capacity import MICRO, micro


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a pool may hold at any time; all given limits apply together (MO6)."""

    machines: int | None = None
    per_type: Mapping[str, int] = field(default_factory=dict)
    """The most of each machine type; if not empty, no other types are allowed."""
    rru: float | None = None
    types: frozenset[str] = frozenset()
    """The allowed machine types; empty for any type."""
    datacenter: str | None = None
    region: str | None = None

    def allows(self, machine_type: str, datacenter: str, region: str) -> bool:
        """Return whether such machines may be held at all."""
        types = self.types or self.per_type.keys()
        return (
            (not types or machine_type in types)
            and self.datacenter in (None, datacenter)
            and self.region in (None, region)
        )

    def excess(self, held: HeldCapacity) -> list[str]:
        """Describe what is held beyond the quota, for instance after the quota was reduced."""
        found = list[str]()
        if self.machines is not None and held.machines > self.machines:
            found.append(f"{held.machines} machines of {self.machines}")
        if self.rru is not None and held.micro_rru > micro(self.rru):
            found.append(f"{held.micro_rru / MICRO:g} RRU of {self.rru:g}")
        for machine_type, count in sorted(held.per_type.items()) if self.per_type else ():
            most = self.per_type.get(machine_type, 0)
            if count > most:
                found.append(f"{count} machines of type {machine_type} of {most}")
        return found


@dataclass(slots=True)
class HeldCapacity:
    """The amounts that count against a quota."""

    machines: int = 0
    micro_rru: int = 0
    per_type: Counter[str] = field(default_factory=Counter)

    def add(self, machine_type: str, rru: float, sign: int = 1) -> None:
        """Add one machine, or subtract it (`sign` -1)."""
        self.machines += sign
        self.micro_rru += sign * micro(rru)
        self.per_type[machine_type] += sign


def pool_of(name: str, spec: EntitlementSpec) -> str:
    """Return the pool in which the jobs of an entitlement run: its own or a shared one."""
    return spec.materialization or name


def members(specs: Mapping[str, EntitlementSpec]) -> dict[str, list[str]]:
    """Return the entitlements of each pool, by name; the first is the pool itself."""
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(specs, key=lambda n: (specs[n].materialization is not None, n)):
        pools[pool_of(name, specs[name])].append(name)
    return {pool: names for pool, names in pools.items() if pool in specs}


def pool_quotas(specs: Mapping[str, EntitlementSpec]) -> dict[str, Quota]:
    """Return the quota of every pool: the sum over the entitlement and its reservations.

    Reservations have the same kinds of quota as their pool (`entitlement_check`), so each limit is
    given in all of them or in none.
    """
    return {
        pool: _sum_of_quotas(specs[pool], [specs[name] for name in names[1:]])
        for pool, names in members(specs).items()
    }


def _sum_of_quotas(own: EntitlementSpec, reservations: Iterable[EntitlementSpec]) -> Quota:
    machines, rru = own.machines, own.rru
    per_type = Counter(own.per_type)
    for spec in reservations:
        machines = None if machines is None else machines + (spec.machines or 0)
        rru = None if rru is None else rru + (spec.rru or 0.0)
        per_type.update(spec.per_type)
    types = frozenset(own.machine_types)
    return Quota(machines, dict(per_type), rru, types, own.datacenter, own.region)
