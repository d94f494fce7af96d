"""Which kind of machine suits a task: the one of which least is stranded, in every dimension.

Tasks that need no GPU would strand GPUs, small ones would strand the memory of large machines,
and so on. What a dimension is worth is how scarce it is: all of it in the region is worth the
same, so of few GPUs each one is worth much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from control_plane.allocator.core.demand import Demand
from control_plane.broker.core.capacity import MICRO, Capacity, micro


@dataclass(frozen=True, slots=True)
class Totals:
    """What all machines of a region offer together."""

    micro_rru: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    network_mbps: int = 0

    @staticmethod
    def of(kinds: Iterable[tuple[Capacity, int]]) -> Totals:
        """Add up so many machines of each kind."""
        rru = memory = gpus = network = 0
        for capacity, number in kinds:
            rru += micro(capacity.rru) * number
            memory += capacity.memory_bytes * number
            gpus += capacity.gpus * number
            network += capacity.network_mbps * number
        return Totals(rru, memory, gpus, network)


_RARE = 2.0
"""How often as much memory per RRU as the region has in the mean is a rare thing."""


def is_rare(capacity: Capacity, totals: Totals) -> bool:
    """Return whether machines of a kind have what most do not: GPUs, or far more memory.

    If load were even there, soon none of them had room for a task that needs all of one.
    """
    if capacity.gpus:
        return True
    mean = totals.memory_bytes * micro(capacity.rru)
    return capacity.memory_bytes * totals.micro_rru > _RARE * mean > 0


def stranded(demand: Demand, capacity: Capacity, totals: Totals) -> float:
    """Return what a task strands of such a machine, as a share of the region: its part of all
    that is left when no more of them fit. The sum is over the dimensions.
    """
    cpu = demand.cpu_on(capacity) / (capacity.per_rru or 1)
    parts = (
        (cpu, micro(capacity.rru), totals.micro_rru),
        (demand.memory_bytes, capacity.memory_bytes, totals.memory_bytes),
        (demand.gpus, capacity.gpus, totals.gpus),
        (demand.network_mbps, capacity.network_mbps, totals.network_mbps),
    )
    fit = min((there / need for need, there, _ in parts if need > 0), default=float(MICRO))
    if fit <= 0:
        return float("inf")
    left = sum((there - fit * need) / total for need, there, total in parts if total > 0)
    return round(left / fit, 15)
