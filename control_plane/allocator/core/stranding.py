"""Finds the kind of machine on which a task strands the least resources.

A task without GPUs would strand GPUs, and a small task the memory of a large machine. Scarce
resources have a higher value: the sum over the region has the same value for each resource. So with
few GPUs each of them has a high value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.allocator.core.demand import Demand
from control_plane.broker.core.capacity import MICRO, Capacity, micro

_NAMES = ("memory", "network", "disk")


def _amounts(of: Capacity | Demand) -> tuple[int, int, int]:
    return of.memory_bytes, of.network_mbps, of.disk_bytes


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of the resources of all machines of a region."""

    micro_rru: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    network_mbps: int = 0
    disk_bytes: int = 0
    rru_with: tuple[int, int, int] = (0, 0, 0)
    """RRU of the machines whose memory, network and disk are known, in that order."""

    @staticmethod
    def of(kinds: Iterable[tuple[Capacity, int]]) -> Totals:
        """Return the sums over kinds of machines, each with its number of machines."""
        rru = gpus = 0
        total, rru_with = [0, 0, 0], [0, 0, 0]
        for capacity, number in kinds:
            rru += micro(capacity.rru) * number
            gpus += capacity.gpus * number
            for at, available in enumerate(_amounts(capacity)):
                total[at] += available * number
                rru_with[at] += micro(capacity.rru) * number if available else 0
        memory, network, disk = total
        return Totals(rru, memory, gpus, network, disk, (rru_with[0], rru_with[1], rru_with[2]))

    def means(self) -> Iterable[tuple[int, int]]:
        """Return memory, network and disk, each with the RRU of the machines that have it."""
        return zip(
            (self.memory_bytes, self.network_mbps, self.disk_bytes), self.rru_with, strict=True
        )


_RARE = 2.0
"""A resource is rare if a machine has more than this many times the region's mean per RRU."""


def rarities(capacity: Capacity, totals: Totals) -> frozenset[str]:
    """Return the resources of a machine (GPUs, memory, network, disk) that most others lack.

    Under even load no such machine would keep room for a task that needs all of one resource.
    """
    rru = micro(capacity.rru)
    found = {"gpus"} if capacity.gpus else set()
    for name, available, (total, of) in zip(
        _NAMES, _amounts(capacity), totals.means(), strict=True
    ):
        if available * of > _RARE * total * rru > 0:
            found.add(name)
    return frozenset(found)


def needs(demand: Demand, capacity: Capacity, totals: Totals) -> frozenset[str]:
    """Return the resources that a task claims more of, per RRU, than the region's mean."""
    rru = demand.cpu_on(capacity) / (capacity.per_rru or 1)
    found = {"gpus"} if demand.gpus else set()
    for name, wanted, (total, of) in zip(_NAMES, _amounts(demand), totals.means(), strict=True):
        if wanted * of > total * rru:
            found.add(name)
    return frozenset(found)


def stranded(demand: Demand, capacity: Capacity, totals: Totals) -> float:
    """Return the resources that a task strands on such a machine, as a share of the region.

    As many such tasks as fit leave a rest of each resource. The result is one task's part of these
    rests, summed over the resources.
    """
    cpu = demand.cpu_on(capacity) / (capacity.per_rru or 1)
    parts = (
        (cpu, micro(capacity.rru), totals.micro_rru),
        (demand.memory_bytes, capacity.memory_bytes, totals.memory_bytes),
        (demand.gpus, capacity.gpus, totals.gpus),
        (demand.network_mbps, capacity.network_mbps, totals.network_mbps),
        (demand.disk_bytes, capacity.disk_bytes, totals.disk_bytes),
    )
    fit = min((available / need for need, available, _ in parts if need > 0), default=float(MICRO))
    if fit <= 0:
        return float("inf")
    left = sum((available - fit * need) / total for need, available, total in parts if total > 0)
    return round(left / fit, 15)


class Traits(NamedTuple):
    """What a kind of machine means for equal tasks."""

    is_rare: bool
    """Whether its machines have a resource that most others lack."""
    is_kept: bool
    """Whether they are kept for other tasks, because these do not need that resource."""
    strands: float
    """`stranded` for one of the tasks."""

    @staticmethod
    def of(demand: Demand, capacity: Capacity, totals: Totals) -> Traits:
        """Return what machines of this kind mean for tasks with this demand."""
        rare = rarities(capacity, totals)
        is_kept = bool(rare) and not rare & needs(demand, capacity, totals)
        return Traits(bool(rare), is_kept, stranded(demand, capacity, totals))
