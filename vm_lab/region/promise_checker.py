"""The checker of promises in a simulated region: free machines must suffice for all quotas.

It reads entitlements and machines from etcd's log, and has its own arithmetic. Its three rules:

- no process takes a machine for an entitlement that is pinned to another region;
- the sum of all quotas never exceeds the machines of the region;
- no process takes a free machine that another entitlement needs to fill its quota.

The last rule has a closed form, because an entitlement may have the machines of one data center, of
one region, or any machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from control_plane.store.protocol import Delete, Operation
from control_plane.store.records import ENTITLEMENTS, MACHINES

_FREE = ""


class _Place(msgspec.Struct):
    """The fields read of a location."""

    region: str = ""
    datacenter: str = ""


class _PlacedMachine(msgspec.Struct):
    """The fields read of a stored machine."""

    machine: str
    location: _Place = msgspec.field(default_factory=_Place)
    entitlement: str = _FREE


class _Quota(msgspec.Struct):
    """The fields read of a quota."""

    machines: int = 0
    datacenter: str | None = None
    region: str | None = None


class _Granted(msgspec.Struct):
    """The fields read of a stored entitlement."""

    name: str
    spec: _Quota


class PromiseChecker:
    """Checks the machines and the quotas of every transaction of etcd."""

    def __init__(self, violate: Callable[[str, str], None]) -> None:
        """Call `violate(rule, text)` for each promise that was broken."""
        self._violate = violate
        self._quotas: dict[str, _Quota] = {}
        self._machines: dict[str, _PlacedMachine] = {}
        self._region_of: dict[str, str] = {}
        """Data center → region."""

    def check_commit(self, operations: Sequence[Operation]) -> None:
        """Record one transaction, and compare the states before and after it."""
        missing_before, taken, granted = self._missing(), list[str](), list[str]()
        for operation in operations:
            kind, _, name = operation.key.partition("/")
            if f"{kind}/" == MACHINES:
                self._machine_stored(name, operation, taken)
            elif f"{kind}/" == ENTITLEMENTS:
                self._entitlement_stored(name, operation, granted)
        missing = self._missing()
        if taken and missing > missing_before:
            left = ", ".join(f"{n} in {dc}" for dc, n in sorted(self._free().items())) or "nothing"
            self._violate(
                "promises",
                f"{'; '.join(taken)}: {missing} promised machines are missing, {left} left",
            )
        if granted and (shortage := self._missing_in_all()):
            self._violate(
                "promises", f"{'; '.join(granted)}: {shortage} machines beyond the region"
            )

    def _machine_stored(self, name: str, operation: Operation, taken: list[str]) -> None:
        if isinstance(operation, Delete):
            self._machines.pop(name, None)
            return
        record = msgspec.json.decode(operation.value, type=_PlacedMachine)
        before = self._machines.get(record.machine)
        self._machines[record.machine] = record
        place = record.location
        self._region_of[place.datacenter] = place.region
        if before is not None and before.entitlement == _FREE != record.entitlement:
            taken.append(f"{record.entitlement} takes {record.machine}")
            quota = self._quotas.get(record.entitlement, _Quota())
            if quota.region not in (None, place.region):
                self._violate("pins", f"{taken[-1]} of {place.region}, not of {quota.region}")

    def _entitlement_stored(self, name: str, operation: Operation, granted: list[str]) -> None:
        if isinstance(operation, Delete):
            self._quotas.pop(name, None)
            return
        record = msgspec.json.decode(operation.value, type=_Granted)
        self._quotas[record.name] = record.spec
        granted.append(f"{record.name} is granted {record.spec.machines}")

    def _free(self) -> Counter[str]:
        return self._by_place(m for m in self._machines.values() if m.entitlement == _FREE)

    def _missing(self) -> int:
        """Return how many machines the quotas allow that free machines cannot provide."""
        held = Counter(m.entitlement for m in self._machines.values())
        left = {name: max(0, q.machines - held[name]) for name, q in self._quotas.items()}
        return self._shortage(left, self._free())

    def _missing_in_all(self) -> int:
        """Return by how many machines the sum of all quotas exceeds the region."""
        asked = {name: quota.machines for name, quota in self._quotas.items()}
        return self._shortage(asked, self._by_place(self._machines.values()))

    def _shortage(self, asked: dict[str, int], supply: Counter[str]) -> int:
        bound, pinned, anywhere = Counter[str](), Counter[str](), 0
        for name, count in asked.items():
            quota = self._quotas[name]
            if quota.datacenter is not None:
                bound[quota.datacenter] += count
            elif quota.region is not None:
                pinned[quota.region] += count
            else:
                anywhere += count
        in_region = Counter[str]()
        for datacenter, count in (supply - bound).items():
            in_region[self._region_of[datacenter]] += count
        unbound = in_region - pinned
        missing = (bound - supply).total() + (pinned - in_region).total()
        return missing + max(0, anywhere - unbound.total())

    @staticmethod
    def _by_place(machines: Iterable[_PlacedMachine]) -> Counter[str]:
        return Counter(machine.location.datacenter for machine in machines)
