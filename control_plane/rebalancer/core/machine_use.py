"""Sizes and use of machines in the dimensions of the model, and the power of places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from control_plane.allocator.core.claims import Claim, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Machine
from control_plane.rebalancer.core.loads import watts_per_rru
from control_plane.rebalancer.core.model import PoweredPlace

Load = tuple[float, float, float]
"""CPU in RRU, memory in bytes, network in Mbit/s."""


def sizes_of(machine: Machine) -> Load:
    """Return the amounts with which a machine's load is compared."""
    capacity = machine.capacity
    return capacity.rru, float(capacity.memory_bytes), float(capacity.network_mbps)


def claimed_load(demand: Demand, machine: Machine) -> Load:
    """Return the load of a task on a machine if it uses all that it claims."""
    cpu = machine.capacity.rru_of(demand.cpu_on(machine.capacity))
    return cpu, float(demand.memory_bytes), float(demand.network_mbps)


def largest_share(used: Sequence[float], machine: Machine) -> float:
    """Return the largest share of use among the dimensions of a machine."""
    sizes = sizes_of(machine)
    return max((u / s for u, s in zip(used, sizes, strict=True) if s > 0), default=0.0)


def claimed_rru(machine: Machine) -> float:
    """Return the RRU that tasks have claimed on a machine."""
    capacity = machine.capacity
    return capacity.rru_of(capacity.cpu_room - machine.free_cpu)


def used_on(
    machine: Machine, load: Callable[[Claim], Load], claims_of: Callable[[str], Claims | None]
) -> list[float]:
    """Return the sum of the loads of the tasks on one machine."""
    used = [0.0, 0.0, 0.0]
    for job in dict.fromkeys(holder.job for holder in machine.jobs):
        for claim in claims_of(job) or ():
            if claim.machine is machine:
                used = [u + part for u, part in zip(used, load(claim), strict=True)]
    return used


@dataclass(slots=True)
class PowerOfPlace:
    """The power draw of one place, as its machines are added."""

    name: str
    budget_w: float
    drawn_w: float = 0.0
    moving_w: float = 0.0
    """The part that moves with tasks of the model."""
    full_w: float = 0.0
    """What full load adds to all machines."""
    machines: int = 0
    is_capped: bool = False

    def add(self, machine: Machine, watts: float, moving: float, is_capped: bool) -> None:
        """Add one machine."""
        self.drawn_w += watts
        self.moving_w += moving
        self.full_w += watts_per_rru(machine.capacity) * machine.capacity.rru
        self.machines += 1
        self.is_capped = self.is_capped or is_capped

    def limit_w(self, limit_share: float) -> float:
        """Return the power above which the place costs: below its draw while power is capped."""
        limit = limit_share * self.budget_w
        return min(limit, limit_share * self.drawn_w) if self.is_capped else limit

    def is_over(self, limit_share: float) -> bool:
        """Return whether the place draws more than its limit."""
        return self.drawn_w > self.limit_w(limit_share)

    def place(self, limit_share: float) -> PoweredPlace:
        """Return the place for the solver's model."""
        limit = self.limit_w(limit_share)
        each = self.full_w / self.machines if self.machines else 0.0
        return PoweredPlace(self.name, limit, self.drawn_w - self.moving_w, max(each, 1.0))
