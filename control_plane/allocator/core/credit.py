"""Room that a change frees, while nobody may have it yet but the change itself."""

from __future__ import annotations

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Machine
from control_plane.broker.core.capacity import Capacity


class Credit:
    """Room that a change frees on a machine: its own claims may use it, nobody else yet."""

    __slots__ = ("_lent", "left", "total")

    def __init__(self) -> None:
        """Free nothing yet."""
        self.total = (0, 0, 0, 0)
        self.left = (0, 0, 0, 0)
        self._lent = (0, 0, 0, 0)

    def add(self, demand: Demand, capacity: Capacity) -> None:
        """Add what one task had."""
        cpu, memory, gpus, network = self.total
        self.total = self.left = (
            cpu + demand.cpu_on(capacity),
            memory + demand.memory_bytes,
            gpus + demand.gpus,
            network + demand.network_mbps,
        )

    def lend(self, machine: Machine) -> None:
        """Show the machine with what is left of the credit."""
        _add(machine, self.left, 1)
        self._lent = _room(machine)

    def take_back(self, machine: Machine) -> None:
        """Hide it again; what was charged meanwhile is paid from the credit first."""
        now = _room(machine)
        cpu, memory, gpus, network = (
            max(0, left - (lent - free))
            for left, lent, free in zip(self.left, self._lent, now, strict=True)
        )
        self.left = (cpu, memory, gpus, network)
        _add(machine, self.left, -1)

    def release(self, machine: Machine, demand: Demand) -> None:
        """Keep what the change uses of a task's room, which the machine was just given back."""
        freed = (
            demand.cpu_on(machine.capacity),
            demand.memory_bytes,
            demand.gpus,
            demand.network_mbps,
        )
        cpu, memory, gpus, network = (t - f for t, f in zip(self.total, freed, strict=True))
        self.total = (cpu, memory, gpus, network)
        _add(machine, self.left, 1)
        cpu, memory, gpus, network = map(min, self.left, self.total)
        self.left = (cpu, memory, gpus, network)
        _add(machine, self.left, -1)
        _add(machine, freed, -1)

    def pay(self, machine: Machine) -> None:
        """Charge the machine with what was used of the credit."""
        _add(machine, self.left, 1)
        _add(machine, self.total, -1)
        self.left = self.total

    def recount_cpu(self, freed: int, wanted: int) -> int:
        """Count its CPU anew in other grains: what was freed, and what claims want of it.

        Return how much of it they use.
        """
        used = min(freed, wanted)
        self.total = (freed, *self.total[1:])
        self.left = (freed - used, *self.left[1:])
        return used


def _room(machine: Machine) -> tuple[int, int, int, int]:
    return machine.free_cpu, machine.free_memory, machine.free_gpus, machine.free_network


def _add(machine: Machine, room: tuple[int, int, int, int], sign: int) -> None:
    cpu, memory, gpus, network = room
    machine.free_cpu += sign * cpu
    machine.free_memory += sign * memory
    machine.free_gpus += sign * gpus
    machine.free_network += sign * network
