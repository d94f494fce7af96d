"""Tests whether a machine meets a requirement, and reads the properties of machines.

Jobs, entitlements and lists of machines use `holds`. For a group of machines (a bucket or a kind),
`may_hold` tests the properties that they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import Protocol, assert_never

from control_plane.api.machines import MachineRecord
from control_plane.api.policy import Property
from control_plane.api.requirements import (
    CAPABILITY,
    LABEL,
    SIZES,
    AllOf,
    AnyOf,
    Because,
    Compare,
    Exists,
    Maybe,
    Not,
    Term,
)
from control_plane.broker.core.capacity import Capacity, Place, capacity_of
from wire.units import size_text


class Subject(Protocol):
    """The properties of a machine that requirements can test."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def place(self) -> Place: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A machine as lists filter it: requirements can also test properties that change."""

    record: MachineRecord
    capacity: Capacity
    place: Place

    @staticmethod
    def of(record: MachineRecord) -> Listed:
        """Return the machine of a record."""
        return Listed(record, capacity_of(record), Place.of(record.location))

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.machine


_WORDS: Mapping[str, Callable[[Subject], str]] = {
    Property.REGION: lambda m: m.place.region,
    Property.DATACENTER: lambda m: m.place.datacenter,
    Property.MSB: lambda m: m.place.msb,
    Property.ROW: lambda m: m.place.row,
    Property.RACK: lambda m: m.place.rack,
    Property.MACHINE: lambda m: m.name,
    Property.MACHINE_TYPE: lambda m: m.capacity.machine_type,
    Property.GENERATION: lambda m: m.capacity.generation,
    Property.SKU: lambda m: m.capacity.sku,
    Property.GPU_TYPE: lambda m: m.capacity.gpu_type,
}
_NUMBERS: Mapping[str, Callable[[Subject], float]] = {
    "rru": lambda m: m.capacity.rru,
    "cpus": lambda m: m.capacity.cpus,
    "memory": lambda m: m.capacity.memory_bytes,
    "gpus": lambda m: m.capacity.gpus,
    "network_mbps": lambda m: m.capacity.network_mbps,
    "disk": lambda m: m.capacity.disk_bytes,
    "power_w": lambda m: m.capacity.power_w,
}
_COMPARISONS = {"=": eq, "<": lt, "<=": le, ">": gt, ">=": ge}
_OF_RECORDS: Mapping[str, Callable[[MachineRecord], str]] = {
    "state": lambda r: r.state.value,
    "entitlement": lambda r: r.entitlement,
    "cluster": lambda r: r.cluster,
    "profile": lambda r: r.profile,
}


def bin_of(property_: str, machine: Subject) -> str:
    """Return the bin of a property in which a machine is; a place is a path from the data center.

    Machines without a label share the bin "".
    """
    return get(machine) if (get := _WORDS.get(property_)) else _word(property_, machine)


def names(bin_: str, value: str) -> bool:
    """Return whether a value from a user names a bin: `msb3` or `dc1/msb3`."""
    return bin_ == value or bin_.endswith("/" + value)


def holds(term: Term, machine: Subject) -> bool:
    """Return whether a machine meets a requirement."""
    if isinstance(term, tuple):  # nearly all requirements have this form
        property_, values = term
        get = _WORDS.get(property_)
        return _is_among(get(machine) if get else _word(property_, machine), values)
    return _verdict(term, machine, None) is True


def may_hold(term: Term, machine: Subject, known: frozenset[str]) -> bool:
    """Return whether a requirement can be met when only these properties are known."""
    return _verdict(term, machine, known) is not False


def _verdict(term: Term, machine: Subject, known: frozenset[str] | None) -> bool | None:
    """Return the verdict on a requirement; None if it depends on properties not in `known`."""
    match term:
        case AllOf(terms):
            found = [_verdict(inner, machine, known) for inner in terms]
            return False if False in found else None if None in found else True
        case AnyOf(terms):
            found = [_verdict(inner, machine, known) for inner in terms]
            return True if True in found else None if None in found else False
        case Not(inner):
            verdict = _verdict(inner, machine, known)
            return None if verdict is None else not verdict
        case Because(inner):
            return _verdict(inner, machine, known)
        case Maybe(inner, only):
            return _verdict(inner, machine, only if known is None else only & known) is not False
        case Exists(property_):
            if known is not None and property_ not in known:
                return None
            return bool(_word(property_, machine))
        case Compare(property_, operator, number):
            if known is not None and property_ not in known:
                return None
            return _compares(property_, operator, number, machine)
        case (property_, _):
            return None if known is not None and property_ not in known else holds(term, machine)
        case _:
            assert_never(term)


def _word(property_: str, machine: Subject) -> str:
    """Return a property as text; empty if the machine does not have it."""
    if property_.startswith(LABEL):
        name = property_.removeprefix(LABEL)
        return next((value for label, value in machine.capacity.labels if label == name), "")
    if property_.startswith(CAPABILITY):
        name = property_.removeprefix(CAPABILITY)
        return name if name in machine.capacity.capabilities else ""
    if (word := _WORDS.get(property_)) is not None:
        return word(machine)
    if (number := _NUMBERS.get(property_)) is not None:
        value = number(machine)
        text = size_text(int(value)) if property_ in SIZES else f"{value:g}"
        return text if value else ""
    get = _OF_RECORDS.get(property_)
    return get(machine.record) if get is not None and isinstance(machine, Listed) else ""


def _compares(property_: str, operator: str, number: float, machine: Subject) -> bool:
    get = _NUMBERS.get(property_)
    try:
        value = get(machine) if get is not None else float(_word(property_, machine))
    except ValueError:  # a label that does not exist, or no number
        return False
    return bool(_COMPARISONS[operator](value, number))


def _is_among(bin_: str, values: frozenset[str]) -> bool:
    """Return whether any of the values `names` the bin; there may be thousands of them."""
    if bin_ in values:
        return True
    at = bin_.find("/")
    while at >= 0:
        if bin_[at + 1 :] in values:
            return True
        at = bin_.find("/", at + 1)
    return False
