"""The checker of promises in a simulated region: what is left serves what may still be taken.

It reads grants and machines from etcd's log, as they were stored, and counts by itself. Two rules:
the sum of all quotas never exceeds the machines there are, and no process takes a free machine
without which another entitlement cannot get what its quota leaves it. What is left can be counted
in closed form: an entitlement may have the machines of one data center, or of any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from control_plane.store.protocol import Delete, Operation
from control_plane.store.records import ENTITLEMENTS, MACHINES

_FREE = ""


class _Place(msgspec.Struct):
    """What is read of a location."""

    datacenter: str = ""


class _Stored(msgspec.Struct):
    """What is read of a stored machine."""

    machine: str
    location: _Place = msgspec.field(default_factory=_Place)
    entitlement: str = _FREE


class _Quota(msgspec.Struct):
    """What is read of a quota."""

    machines: int = 0
    datacenter: str | None = None


class _Granted(msgspec.Struct):
    """What is read of a stored entitlement."""

    name: str
    spec: _Quota


class PromiseChecker:
    """Checks in every transaction of etcd the machines that it takes and the quotas it grants."""

    def __init__(self, violate: Callable[[str, str], None]) -> None:
        """Call `violate(rule, text)` for each promise that was broken."""
        self._violate = violate
        self._quotas: dict[str, _Quota] = {}
        self._machines: dict[str, _Stored] = {}

    def applied(self, operations: Sequence[Operation]) -> None:
        """Record one transaction, and compare the state after it with that before."""
        lacked, taken, granted = self._lacking(), list[str](), list[str]()
        for operation in operations:
            kind, _, name = operation.key.partition("/")
            if f"{kind}/" == MACHINES:
                self._machine_stored(name, operation, taken)
            elif f"{kind}/" == ENTITLEMENTS:
                self._entitlement_stored(name, operation, granted)
        lacks = self._lacking()
        if taken and lacks > lacked:
            left = ", ".join(f"{n} in {dc}" for dc, n in sorted(self._free().items())) or "nothing"
            self._violate(
                "promises", f"{'; '.join(taken)}: {lacks} promised ones lack, {left} left"
            )
        if granted and (short := self._short_of_all()):
            self._violate("promises", f"{'; '.join(granted)}: {short} machines beyond the region")

    def _machine_stored(self, name: str, operation: Operation, taken: list[str]) -> None:
        if isinstance(operation, Delete):
            self._machines.pop(name, None)
            return
        record = msgspec.json.decode(operation.value, type=_Stored)
        before = self._machines.get(record.machine)
        self._machines[record.machine] = record
        if before is not None and before.entitlement == _FREE != record.entitlement:
            taken.append(f"{record.entitlement} takes {record.machine}")

    def _entitlement_stored(self, name: str, operation: Operation, granted: list[str]) -> None:
        if isinstance(operation, Delete):
            self._quotas.pop(name, None)
            return
        record = msgspec.json.decode(operation.value, type=_Granted)
        self._quotas[record.name] = record.spec
        granted.append(f"{record.name} is granted {record.spec.machines}")

    def _free(self) -> Counter[str]:
        return self._by_place(m for m in self._machines.values() if m.entitlement == _FREE)

    def _lacking(self) -> int:
        """Return how many machines entitlements may still take that they could not get."""
        held = Counter(m.entitlement for m in self._machines.values())
        left = {name: max(0, q.machines - held[name]) for name, q in self._quotas.items()}
        return self._short(left, self._free())

    def _short_of_all(self) -> int:
        """Return by how many machines all quotas together exceed the region."""
        asked = {name: quota.machines for name, quota in self._quotas.items()}
        return self._short(asked, self._by_place(self._machines.values()))

    def _short(self, asked: dict[str, int], supply: Counter[str]) -> int:
        bound, anywhere = Counter[str](), 0
        for name, count in asked.items():
            where = self._quotas[name].datacenter
            if where is None:
                anywhere += count
            else:
                bound[where] += count
        unbound = supply - bound
        return (bound - supply).total() + max(0, anywhere - unbound.total())

    @staticmethod
    def _by_place(machines: Iterable[_Stored]) -> Counter[str]:
        return Counter(machine.location.datacenter for machine in machines)
