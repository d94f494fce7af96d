"""Computes how much of a region is promised, and whether all promises can be kept.

A quota is a promise: whatever other entitlements do, this one can come to hold that many machines
(CP7). So all quotas together must fit into the region's machines, by type, region, data center and
in RRU (CP1). A quota of "any of these types" shares machines with others. Whether all quotas can be
met at once is a transport problem (`transport`) on classes of equal machines: a region of a million
machines has a few hundred classes.

A pool with a quota in machines and in RRU is promised the machines; the RRU then only bound what it
holds. Machines that are down count, and so do those that will be replaced. Machines that will be
decommissioned do not count.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from agent.api import Location
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.broker.core.capacity import MICRO, Capacity, Place, micro
from control_plane.portal.core.pools import Quota, pool_of, pool_quotas
from control_plane.portal.core.transport import Amount, FlowNetwork


class MachineClass(NamedTuple):
    """Machines that no quota distinguishes."""

    machine_type: str
    datacenter: str
    micro_rru: int
    region: str = Location().region

    @staticmethod
    def of(capacity: Capacity, place: Place) -> MachineClass:
        """Return the class of a machine."""
        rru = micro(capacity.rru)
        return MachineClass(capacity.machine_type, place.datacenter, rru, place.region)


Supply = Mapping[MachineClass, int]
"""How many machines of each class there are."""


def is_leaving(record: MachineRecord) -> bool:
    """Return whether a machine will be decommissioned, now or later."""
    return any(
        event.kind is EventKind.DECOMMISSION and event.end is None
        for event in record.unavailability
    )


def rru_of(record: MachineRecord) -> float:
    """Return the RRU of a machine; one per CPU if the inventory does not list them."""
    if record.hardware is not None and record.hardware.rru:
        return record.hardware.rru
    return float(record.facts.cpus) if record.facts is not None else 0.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Promises that the region cannot keep together, and the machines that they share.

    Amounts are by unit: `machines`, and `RRU` in millionths.
    """

    where: str
    """Describes the machines that these promises share."""
    asked: Mapping[str, int]
    """The amount of these machines that the pool in question asks for."""
    granted: Mapping[str, int]
    """The amount of these machines that is granted to all other pools."""
    lacking: Mapping[str, int]
    available: Mapping[str, int]

    def __str__(self) -> str:
        """Describe the sum that exceeds the available machines."""
        units = {*self.asked, *self.granted}
        available = " and ".join(
            _count(unit, self.available[unit]) for unit in sorted(units, reverse=True)
        )
        return (
            f"{self.where}: {_describe(self.granted)} granted to others +"
            f" {_describe(self.asked)} asked > {available}"
            + (f" in the same machines, by {_describe(self.lacking)}" if len(units) > 1 else "")
        )

    @property
    def hint(self) -> str:
        """Describe how much could be granted if that is one number; else empty."""
        if len(self.asked) != 1 or self.asked.keys() != self.lacking.keys():
            return ""
        return f"{_describe(Counter(self.asked) - Counter(self.lacking))} of these could be granted"


def shortage(
    name: str, wanted: EntitlementSpec, specs: Mapping[str, EntitlementSpec], supply: Supply
) -> Shortage | None:
    """Return why an entitlement cannot have this quota in addition to all others; None if it can.

    An unrelated shortage (machines left the region after they were promised) does not keep the
    entitlement from growing on other machines.
    """
    pool = pool_of(name, wanted)
    found = Promises(pool_quotas({**specs, name: wanted}), supply)
    return found.shortage(pool)


def unkept(specs: Mapping[str, EntitlementSpec], supply: Supply) -> dict[str, Shortage]:
    """Return the pools whose promises cannot be kept, each with its shortage."""
    quotas = pool_quotas(specs)
    found = Promises(quotas, supply)
    return {pool: short for pool in quotas if (short := found.shortage(pool)) is not None}


def quota_left(quota: Quota, held: Mapping[MachineClass, int]) -> Quota:
    """Return the part of a quota that is not held yet, as input for `Promises`."""
    machines, rru = sum(held.values()), sum(n * kind.micro_rru for kind, n in held.items())
    per_type = Counter(quota.per_type)
    for kind, count in held.items():
        per_type[kind.machine_type] -= count
    return replace(
        quota,
        machines=None if quota.machines is None else max(0, quota.machines - machines),
        per_type={t: max(0, per_type[t]) for t in quota.per_type},
        rru=None if quota.rru is None else max(0, micro(quota.rru) - rru) / MICRO,
    )


@dataclass(frozen=True, slots=True)
class _Demand:
    """The amount that one pool is promised of machines that suit it equally."""

    unit: str
    amount: int
    """Machines, or millionths of RRU."""
    types: frozenset[str]
    datacenter: str | None
    region: str | None
    at_most: tuple[tuple[str, int], ...] = ()
    """The most of each machine type, if the sum of these is more than the amount."""

    def suits(self, kind: MachineClass) -> bool:
        return (
            (not self.types or kind.machine_type in self.types)
            and self.datacenter in (None, kind.datacenter)
            and self.region in (None, kind.region)
            and (self.unit == "machines" or kind.micro_rru > 0)
        )


def _demands_of(quota: Quota) -> list[_Demand]:
    """Return a pool's promise as demands that can be met independently."""
    where = (quota.datacenter, quota.region)
    if quota.per_type:
        if quota.machines is None or quota.machines >= sum(quota.per_type.values()):
            items = quota.per_type.items()
            return [_Demand("machines", n, frozenset({t}), *where) for t, n in items]
        caps = tuple(sorted(quota.per_type.items()))
        return [_Demand("machines", quota.machines, frozenset(quota.per_type), *where, caps)]
    if quota.machines is not None:
        return [_Demand("machines", quota.machines, quota.types, *where)]
    if quota.rru is not None:
        return [_Demand("RRU", micro(quota.rru), quota.types, *where)]
    return []


@dataclass(slots=True)
class Shares:
    """Which free machines are meant for which pools, so that the most promises are kept."""

    groups: dict[str, list[int]]
    """Pool → the groups of equal promises that it is in."""
    flows: dict[int, dict[MachineClass, int]]
    """Group → machines of each class that are meant for it."""
    rest: dict[MachineClass, int]
    """Machines that are meant for no entitlement."""
    unmet: bool = False
    """Whether a promise cannot be kept; then any additional machine may be meant for it."""


class Promises:
    """All promises of a region, matched with its machines.

    Demands that suit the same machines are one node of the network. So its size depends on the
    number of kinds of quota, not on the number of entitlements.
    """

    def __init__(
        self, quotas: Mapping[str, Quota], supply: Supply, *, is_matched: bool = True
    ) -> None:
        """`quotas` of all pools and all machines, or the remainders of both."""
        self._supply = supply
        self._network = FlowNetwork()
        self._classes: dict[int, MachineClass] = {}
        self._supplied: dict[int, int] = {}
        self._groups: dict[int, _Demand] = {}
        self._amounts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._to_sink: dict[int, int] = {}
        self._type_limits: dict[int, list[tuple[int, int]]] = {}
        self._from_classes: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._short: set[int] | None = None
        self._build(quotas)
        for _ in self._network.push_all() if is_matched else ():
            pass

    @staticmethod
    def in_steps(quotas: Mapping[str, Quota], supply: Supply) -> Generator[None, None, Promises]:
        """Return the same as the constructor, in steps of bounded time."""
        made = Promises(quotas, supply, is_matched=False)
        yield
        yield from made._network.push_all()
        return made

    def _build(self, quotas: Mapping[str, Quota]) -> None:
        network = self._network
        for kind in sorted(self._supply):
            if self._supply[kind] > 0:
                node = network.node()
                self._classes[node] = kind
                self._supplied[node] = network.arc(0, node, self._supply[kind])
        groups: defaultdict[object, list[tuple[str, _Demand]]] = defaultdict(list)
        for pool, quota in quotas.items():
            for demand in _demands_of(quota):
                own_group = pool if demand.at_most else ""
                key = (demand.unit, demand.types, demand.datacenter, demand.region, own_group)
                groups[key].append((pool, demand))
        for group in groups.values():
            node = network.node()
            self._groups[node] = group[0][1]
            self._amounts[node].update({pool: demand.amount for pool, demand in group})
            self._to_sink[node] = network.arc(node, 1, sum(self._amounts[node].values()))
            self._connect(node, group[0][1])

    def _connect(self, node: int, demand: _Demand) -> None:
        network, limits = self._network, {}
        for machine_type, count in demand.at_most:
            limits[machine_type] = network.node()
            outlet = network.arc(limits[machine_type], node, count)
            self._type_limits.setdefault(node, []).append((limits[machine_type], outlet))
        for at, kind in self._classes.items():
            if demand.suits(kind):
                gain = kind.micro_rru if demand.unit == "RRU" else 1
                head = limits.get(kind.machine_type, node)
                self._from_classes[node].append((at, head, network.arc(at, head, None, gain)))

    def shares(self) -> Shares:
        """Return one way of keeping all promises that can be kept, in whole machines."""
        flows: dict[int, dict[MachineClass, int]] = {}
        for node in self._groups:
            own = flows[node] = {}
            for at, _, arc in self._from_classes[node]:
                machines = self._network.flow(arc)
                if self._groups[node].unit == "RRU":
                    machines = machines / Fraction(self._classes[at].micro_rru)
                own[self._classes[at]] = int(machines)
        rest = {
            kind: int(self._supply[kind] - self._network.flow(self._supplied[at]))
            for at, kind in self._classes.items()
        }
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for node, amounts in self._amounts.items():
            for pool in amounts:
                groups[pool].append(node)
        unmet = any(self._missing_of(node) > 0 for node in self._groups)
        return Shares(dict(groups), flows, rest, unmet)

    def lacking(self) -> Counter[str]:
        """Return how much of all promises cannot be kept, by unit."""
        found: Counter[str] = Counter()
        for node, demand in self._groups.items():
            found[demand.unit] += math.ceil(self._missing_of(node))
        return found

    def spare(self, pool: str) -> dict[MachineClass, int]:
        """Return the classes whose machines a pool may take with all promises still kept.

        Each class has the number that may be taken at once. An allocator calls this on remainders:
        quotas less the held machines, and the free machines. A pool of "any type" must not use up a
        type that others cannot replace (CP7). If promises are short already, an allowed take does
        not increase the shortage.
        """
        found: dict[MachineClass, int] = {}
        for node, amounts in self._amounts.items():
            if amounts[pool] > 0:
                reached: dict[int, set[int]] = {}
                for at, head, arc in self._from_classes[node]:
                    if head not in reached:
                        reached[head] = self._network.reachable(head)
                    flow = self._network.flow(arc)
                    if flow > 0 or at in reached[head]:
                        found[self._classes[at]] = max(1, int(self._unpromised(at, node, flow)))
        return found

    def _unpromised(self, at: int, node: int, flow: Amount) -> Amount:
        """Return how many machines of a class serve this demand or no demand."""
        kind = self._classes[at]
        machines = flow / Fraction(kind.micro_rru) if self._groups[node].unit == "RRU" else flow
        return machines + self._supply[kind] - self._network.flow(self._supplied[at])

    def shortage(self, pool: str) -> Shortage | None:
        """Return the unmet promises that this pool takes part in, or None."""
        if self._short is None:
            unmet = {node for node in self._groups if self._missing_of(node) > 0}
            self._short = self._network.reaching(unmet)
        short = self._short
        groups = [node for node in self._groups if node in short]
        if not any(self._amounts[node][pool] for node in groups):
            return None
        kinds = [kind for node, kind in self._classes.items() if node in short]
        suited = [self._groups[node] for node in groups]
        asked, granted, lacking = Counter[str](), Counter[str](), Counter[str]()
        for node in groups:
            unit = self._groups[node].unit
            total = self._amounts[node].total() - self._from_other_types(node, short)
            own = total if self._groups[node].at_most else self._amounts[node][pool]
            asked[unit] += own
            granted[unit] += total - own
            lacking[unit] += math.ceil(self._missing_of(node))
        machines = sum(self._supply[kind] for kind in kinds)
        micro_rru = sum(self._supply[kind] * kind.micro_rru for kind in kinds)
        return Shortage(
            where=_describe_machines(kinds, suited, self._classes.values()),
            asked=dict(+asked),
            granted=dict(+granted),
            lacking=dict(+lacking),
            available={"machines": machines, "RRU": micro_rru},
        )

    def _missing_of(self, node: int) -> Amount:
        return self._amounts[node].total() - self._network.flow(self._to_sink[node])

    def _from_other_types(self, node: int, short: set[int]) -> int:
        """Return the amount that a demand with bounds by type gets of types that are not short."""
        limits = self._type_limits.get(node, [])
        return sum(
            int(self._network.flow(outlet)) for limit, outlet in limits if limit not in short
        )


def _describe_machines(
    kinds: Iterable[MachineClass], demands: Iterable[_Demand], region: Iterable[MachineClass]
) -> str:
    """Describe the machines that are short, or the requested ones if the region has none."""
    places = {(kind.machine_type, kind.datacenter) for kind in kinds}
    if not places:
        wanted = next(iter(demands))
        types = f"types {', '.join(sorted(wanted.types))}" if wanted.types else "all types"
        where = (wanted.datacenter, wanted.region and f"region {wanted.region}")
        return " in ".join((types, *filter(None, where)))
    if places == {(kind.machine_type, kind.datacenter) for kind in region}:
        return "the whole region"
    of_datacenter: defaultdict[str, set[str]] = defaultdict(set)
    for machine_type, datacenter in places:
        of_datacenter[datacenter].add(machine_type)
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for datacenter, found in sorted(of_datacenter.items()):
        groups[tuple(sorted(found))].append(datacenter)
    return "; ".join(
        f"type{'s' if len(types) > 1 else ''} {', '.join(types)} in {', '.join(datacenters)}"
        for types, datacenters in groups.items()
    )


def _describe(amounts: Mapping[str, int]) -> str:
    words = [_count(unit, n) for unit, n in sorted(amounts.items(), reverse=True) if n]
    return " and ".join(words) or "nothing"


def _count(unit: str, amount: int) -> str:
    return f"{amount:,} machines" if unit == "machines" else f"{amount / MICRO:,.10g} RRU"
