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

    def left(self, held: Iterable[tuple[str, float]]) -> PoolRemainder:
        """Return the rest of the quota when these machines are held, each given as (type, RRU)."""
        left = PoolRemainder(self)
        for machine_type, rru in held:
            left.take(machine_type, rru)
        return left


class PoolRemainder:
    """What is held of a quota."""

    __slots__ = ("_machines", "_micro_rru", "_per_type", "quota")

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._machines = 0
        self._micro_rru = 0
        self._per_type: Counter[str] = Counter()

    def take(self, machine_type: str, rru: float) -> None:
        """Count one more machine as held, whether or not the quota allows it."""
        self._machines += 1
        self._micro_rru += micro(rru)
        self._per_type[machine_type] += 1

    def over(self) -> list[str]:
        """Describe what is held beyond a quota that was made smaller."""
        quota, found = self.quota, list[str]()
        if quota.machines is not None and self._machines > quota.machines:
            found.append(f"{self._machines} machines of {quota.machines}")
        if quota.rru is not None and self._micro_rru > micro(quota.rru):
            found.append(f"{self._micro_rru / MICRO:g} RRU of {quota.rru:g}")
        if quota.per_type:
            for machine_type, count in sorted(self._per_type.items()):
                most = quota.per_type.get(machine_type, 0)
                if count > most:
                    found.append(f"{count} machines of type {machine_type} of {most}")
        return found


def pool_of(name: str, spec: EntitlementSpec) -> str:
    """Return the pool in which the jobs of an entitlement run: its own or a shared one."""
    return spec.materialization or name


def members(specs: Mapping[str, EntitlementSpec]) -> dict[str, list[str]]:
    """Return the entitlements of each pool, by name; the first is the pool itself."""
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(specs, key=lambda n: (specs[n].materialization is not None, n)):
        pools[pool_of(name, specs[name])].append(name)
    return {pool: names for pool, names in pools.items() if pool in specs}


def pool_quota(pool: str, specs: Mapping[str, EntitlementSpec]) -> Quota:
    """Return the quota of a pool: the sum over the entitlement and its reservations.

    Reservations have the same kinds of quota as their pool (`entitlement_check`), so each limit is
    given in all of them or in none.
    """
    reserved = (spec for spec in specs.values() if spec.materialization == pool)
    return sum_quota(specs[pool], reserved)


def pool_quotas(specs: Mapping[str, EntitlementSpec]) -> dict[str, Quota]:
    """Return the quota of every pool, in one pass."""
    return {
        pool: sum_quota(specs[pool], [specs[name] for name in names if name != pool])
        for pool, names in members(specs).items()
    }


def sum_quota(own: EntitlementSpec, reservations: Iterable[EntitlementSpec]) -> Quota:
    """Return the quota of a pool and of the reservations on it together."""
    machines, rru = own.machines, own.rru
    per_type = Counter(own.per_type)
    for spec in reservations:
        machines = None if machines is None else machines + (spec.machines or 0)
        rru = None if rru is None else rru + (spec.rru or 0.0)
        per_type.update(spec.per_type)
    types = frozenset(own.machine_types)
    return Quota(machines, dict(per_type), rru, types, own.datacenter, own.region)
