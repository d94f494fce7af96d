"""How much of a region is promised, and whether a promise can still be kept.

A quota is a promise: whatever other entitlements do, this one can come to hold that many
machines (CP7). So all quotas together must fit into the machines that there are, by type,
by region, data center and in RRU (CP1). Quotas of "any of these types" share machines with others.
Whether all quotas can be met at once is the transport problem of `transport`, on
classes of like machines: a region of a million machines has a few hundred.

A pool that limits both is promised its machines; the RRU then only bound what it holds.
Machines that are down count. Those that are to be decommissioned do not; those that are to be
replaced do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from msgspec.structs import replace as with_fields

from agent.api import Location, Relaxation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.api.settings import Raise
from control_plane.broker.core.capacity import MICRO, micro
from control_plane.portal.core.pools import Quota, pool_of, pool_quotas
from control_plane.portal.core.transport import Amount, FlowNetwork


@dataclass(frozen=True, slots=True, order=True)
class MachineClass:
    """Machines that no quota can tell apart."""

    machine_type: str
    datacenter: str
    micro_rru: int
    region: str = Location().region


Supply = Mapping[MachineClass, int]
"""How many machines of each class there are."""


def class_of(record: MachineRecord) -> MachineClass | None:
    """Return the class of a machine; None if it cannot be promised, since it goes away."""
    leaving = any(
        event.kind is EventKind.DECOMMISSION and event.end is None
        for event in record.unavailability
    )
    if leaving:
        return None
    place = record.location
    return MachineClass(record.machine_type, place.datacenter, micro(rru_of(record)), place.region)


def is_leaving(record: MachineRecord) -> bool:
    """Return whether a machine is to be decommissioned, now or later."""
    return any(
        event.kind is EventKind.DECOMMISSION and event.end is None
        for event in record.unavailability
    )


def rru_of(record: MachineRecord) -> float:
    """Return the RRU of a machine; one per CPU where the inventory does not say."""
    if record.hardware is not None and record.hardware.rru:
        return record.hardware.rru
    return float(record.facts.cpus) if record.facts is not None else 0.0


def supply_of(machines: Iterable[MachineRecord]) -> Counter[MachineClass]:
    """Return the supply of a whole region."""
    return Counter(found for found in map(class_of, machines) if found is not None)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Promises that the region cannot keep together, and the machines that they are for.

    Amounts are by unit: `machines`, and `RRU` in millionths.
    """

    where: str
    """The machines that all of these promises are for, in words."""
    asked: Mapping[str, int]
    """Of these machines, by the pool in question."""
    granted: Mapping[str, int]
    """Of these machines, to all other pools."""
    lacking: Mapping[str, int]
    available: Mapping[str, int]

    def __str__(self) -> str:
        """Return the sum that exceeds the available machines, in words."""
        units = {*self.asked, *self.granted}
        there = " and ".join(
            _count(unit, self.available[unit]) for unit in sorted(units, reverse=True)
        )
        return (
            f"{self.where}: {_in_words(self.granted)} granted to others +"
            f" {_in_words(self.asked)} asked > {there}"
            + (f" in the same machines, by {_in_words(self.lacking)}" if len(units) > 1 else "")
        )

    @property
    def hint(self) -> str:
        """Return in words how much could be granted, where that is one number; else empty."""
        if len(self.asked) != 1 or self.asked.keys() != self.lacking.keys():
            return ""
        return f"{_in_words(Counter(self.asked) - Counter(self.lacking))} of these could be granted"


def shortage(
    name: str, wanted: EntitlementSpec, specs: Mapping[str, EntitlementSpec], supply: Supply
) -> Shortage | None:
    """Return why an entitlement cannot have this quota in addition to all others; None if it can.

    An unrelated shortage (machines left after they were promised) does not keep the
    entitlement from growing elsewhere.
    """
    pool = pool_of(name, wanted)
    found = Promises(pool_quotas({**specs, name: wanted}), supply)
    return found.shortage(pool)


def unkept(specs: Mapping[str, EntitlementSpec], supply: Supply) -> dict[str, Shortage]:
    """Return the pools that are promised more than there is, each with its shortage."""
    quotas = pool_quotas(specs)
    found = Promises(quotas, supply)
    return {pool: short for pool in quotas if (short := found.shortage(pool)) is not None}


def asks_for_more(before: EntitlementSpec | None, after: EntitlementSpec) -> bool:
    """Return whether a change may take capacity that other entitlements could have had.

    Less of the same is not more. Other types or another place count as more: those machines may be
    scarce where the present ones are not.
    """
    if before is None:
        return True
    return bool(
        _bounds_loosened(before, after)
        or _unit(before) != _unit(after)
        or _types_changed(before, after)
        or after.datacenter != before.datacenter
        or after.region != before.region
        or after.materialization != before.materialization
        or after.business_unit != before.business_unit
        or after.priority > before.priority
        or after.overcommit.cpu > before.overcommit.cpu
        or after.overcommit.memory > before.overcommit.memory
    )


def raises(before: EntitlementSpec | None, after: EntitlementSpec) -> dict[Raise, str]:
    """Return what a change raises of an entitlement, each in words.

    A new entitlement is compared with one that asks for a quota only.
    """
    base = before if before is not None else EntitlementSpec()
    found = dict[Raise, str]()
    if asks_for_more(before, with_fields(after, priority=base.priority)):
        found[Raise.CAPACITY] = "more capacity"
    if after.priority > base.priority:
        found[Raise.PRIORITY] = f"priority {after.priority} instead of {base.priority}"
    rights = list[str]()
    if allowed := newly_allowed(before, after):
        rights.append(f"the relaxations {', '.join(allowed)} of its jobs")
    if base.image_keys and (not after.image_keys or {*after.image_keys} - {*base.image_keys}):
        rights.append("the change or removal of its image keys")
    if rights:
        found[Raise.RIGHTS] = " and ".join(rights)
    return found


def newly_allowed(before: EntitlementSpec | None, after: EntitlementSpec) -> list[Relaxation]:
    """Return the relaxations that jobs of an entitlement could not have before a change."""
    return sorted({*after.relaxations} - {*(before.relaxations if before else ())})


def _bounds_loosened(before: EntitlementSpec, after: EntitlementSpec) -> bool:
    pairs = ((before.machines, after.machines), (before.rru, after.rru))
    return any(b is not None and (a is None or a > b) for b, a in pairs)


def _types_changed(before: EntitlementSpec, after: EntitlementSpec) -> bool:
    if set(before.machine_types) != set(after.machine_types):
        return True
    if after.machines is not None and before.per_type and after.per_type != before.per_type:
        return True  # as many machines as before, of a mix that is less free
    if bool(before.per_type) != bool(after.per_type):
        return True
    return any(count > before.per_type.get(t, 0) for t, count in after.per_type.items())


def _unit(spec: EntitlementSpec) -> str:
    return "RRU" if spec.machines is None and not spec.per_type else "machines"


def quota_left(quota: Quota, held: Mapping[MachineClass, int]) -> Quota:
    """Return what of a quota is not held yet, for `Promises`."""
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
    """What one pool is promised of machines that suit it equally."""

    unit: str
    amount: int
    """Machines, or millionths of RRU."""
    types: frozenset[str]
    datacenter: str | None
    region: str | None
    at_most: tuple[tuple[str, int], ...] = ()
    """By type, where the sum of these is more than the amount."""

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
    """Which free machines are meant for which pools, with every promise kept that can be."""

    groups: dict[str, list[int]]
    """Pool → the groups of like promises that it is in."""
    flows: dict[int, dict[MachineClass, int]]
    """Group → machines of each class that are meant for it."""
    rest: dict[MachineClass, int]
    """Machines that are meant for no entitlement."""
    unmet: bool = False
    """Whether some promise cannot be kept: then any additional machine may be meant for it."""


class Promises:
    """All promises of a region, matched with its machines.

    Demands that suit the same machines are one node of the network, so its size depends on
    how many kinds of quota there are, not on how many entitlements.
    """

    def __init__(self, quotas: Mapping[str, Quota], supply: Supply) -> None:
        """`quotas` of all pools and all machines, or the remainders of both."""
        for _ in self.making(quotas, supply):
            pass

    @classmethod
    def in_steps(
        cls, quotas: Mapping[str, Quota], supply: Supply
    ) -> Generator[None, None, Promises]:
        """Make the same in steps of bounded time, between which other actors may run."""
        made = cls.__new__(cls)
        yield from made.making(quotas, supply)
        return made

    def making(self, quotas: Mapping[str, Quota], supply: Supply) -> Generator[None, None, None]:
        """Do what `__init__` does, in steps."""
        self._supply = supply
        self._network = FlowNetwork()
        self._classes: dict[int, MachineClass] = {}
        self._supplied: dict[int, int] = {}
        self._groups: dict[int, _Demand] = {}
        self._amounts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._outlets: dict[int, int] = {}
        self._gates: dict[int, list[tuple[int, int]]] = {}
        self._inlets: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._short: set[int] | None = None
        self._build(quotas)
        yield
        yield from self._network.filling()

    def _build(self, quotas: Mapping[str, Quota]) -> None:
        network = self._network
        for kind in sorted(self._supply):
            if self._supply[kind] > 0:
                node = network.node()
                self._classes[node] = kind
                self._supplied[node] = network.arc(0, node, self._supply[kind])
        alike: defaultdict[object, list[tuple[str, _Demand]]] = defaultdict(list)
        for pool, quota in quotas.items():
            for demand in _demands_of(quota):
                alone = pool if demand.at_most else ""
                key = (demand.unit, demand.types, demand.datacenter, demand.region, alone)
                alike[key].append((pool, demand))
        for group in alike.values():
            node = network.node()
            self._groups[node] = group[0][1]
            self._amounts[node].update({pool: demand.amount for pool, demand in group})
            self._outlets[node] = network.arc(node, 1, sum(self._amounts[node].values()))
            self._connect(node, group[0][1])

    def _connect(self, node: int, demand: _Demand) -> None:
        network, gates = self._network, {}
        for machine_type, count in demand.at_most:
            gates[machine_type] = network.node()
            outlet = network.arc(gates[machine_type], node, count)
            self._gates.setdefault(node, []).append((gates[machine_type], outlet))
        for at, kind in self._classes.items():
            if demand.suits(kind):
                gain = kind.micro_rru if demand.unit == "RRU" else 1
                head = gates.get(kind.machine_type, node)
                self._inlets[node].append((at, head, network.arc(at, head, None, gain)))

    def shares(self) -> Shares:
        """Return one way of keeping all promises that can be kept, in whole machines."""
        flows: dict[int, dict[MachineClass, int]] = {}
        for node in self._groups:
            mine = flows[node] = {}
            for at, _, arc in self._inlets[node]:
                machines = self._network.flow(arc)
                if self._groups[node].unit == "RRU":
                    machines = machines / Fraction(self._classes[at].micro_rru)
                mine[self._classes[at]] = int(machines)
        rest = {
            kind: int(self._supply[kind] - self._network.flow(self._supplied[at]))
            for at, kind in self._classes.items()
        }
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for node, amounts in self._amounts.items():
            for pool in amounts:
                groups[pool].append(node)
        unmet = any(self._lacking(node) > 0 for node in self._groups)
        return Shares(dict(groups), flows, rest, unmet)

    def lacking(self) -> Counter[str]:
        """Return how much of all promises cannot be kept, by unit."""
        found: Counter[str] = Counter()
        for node, demand in self._groups.items():
            found[demand.unit] += math.ceil(self._lacking(node))
        return found

    def spare(self, pool: str) -> dict[MachineClass, int]:
        """Return the classes whose machines a pool may take with all promises still kept.

        Each has a number that may be taken at once. For an allocator, on remainders: quotas less
        what is held, and the free machines. A pool of "any type" must not use up a type that
        others cannot replace (CP7). Where promises are short already, an allowed take does not
        increase the shortage.
        """
        found: dict[MachineClass, int] = {}
        for node, amounts in self._amounts.items():
            if amounts[pool] > 0:
                reached: dict[int, set[int]] = {}
                for at, head, arc in self._inlets[node]:
                    if head not in reached:
                        reached[head] = self._network.reachable(head)
                    flow = self._network.flow(arc)
                    if flow > 0 or at in reached[head]:
                        found[self._classes[at]] = max(1, int(self._unpromised(at, node, flow)))
        return found

    def _unpromised(self, at: int, node: int, flow: Amount) -> Amount:
        """Return how many machines of a class are for this demand, or for no demand."""
        kind = self._classes[at]
        machines = flow / Fraction(kind.micro_rru) if self._groups[node].unit == "RRU" else flow
        return machines + self._supply[kind] - self._network.flow(self._supplied[at])

    def shortage(self, pool: str) -> Shortage | None:
        """Return the unmet promises that this pool takes part in, or None."""
        if self._short is None:
            unmet = {node for node in self._groups if self._lacking(node) > 0}
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
            total = self._amounts[node].total() - self._elsewhere(node, short)
            own = total if self._groups[node].at_most else self._amounts[node][pool]
            asked[unit] += own
            granted[unit] += total - own
            lacking[unit] += math.ceil(self._lacking(node))
        machines = sum(self._supply[kind] for kind in kinds)
        micro_rru = sum(self._supply[kind] * kind.micro_rru for kind in kinds)
        return Shortage(
            where=_where(kinds, suited, self._classes.values()),
            asked=dict(+asked),
            granted=dict(+granted),
            lacking=dict(+lacking),
            available={"machines": machines, "RRU": micro_rru},
        )

    def _lacking(self, node: int) -> Amount:
        return self._amounts[node].total() - self._network.flow(self._outlets[node])

    def _elsewhere(self, node: int, short: set[int]) -> int:
        """Return what a demand gets of types that are not short, up to its bounds for them."""
        gates = self._gates.get(node, [])
        return sum(int(self._network.flow(outlet)) for gate, outlet in gates if gate not in short)


def _where(
    kinds: Iterable[MachineClass], demands: Iterable[_Demand], region: Iterable[MachineClass]
) -> str:
    """Return in words which machines are short; those asked for, where there are none."""
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
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for datacenter, found in sorted(of_datacenter.items()):
        alike[tuple(sorted(found))].append(datacenter)
    return "; ".join(
        f"type{'s' if len(types) > 1 else ''} {', '.join(types)} in {', '.join(datacenters)}"
        for types, datacenters in alike.items()
    )


def _in_words(amounts: Mapping[str, int]) -> str:
    words = [_count(unit, n) for unit, n in sorted(amounts.items(), reverse=True) if n]
    return " and ".join(words) or "nothing"


def _count(unit: str, amount: int) -> str:
    return f"{amount:,} machines" if unit == "machines" else f"{amount / MICRO:,.10g} RRU"
