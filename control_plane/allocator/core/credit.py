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
        self.total = (0.0, 0, 0, 0)
        self.left = (0.0, 0, 0, 0)
        self._lent = (0.0, 0, 0, 0)

    def add(self, demand: Demand, capacity: Capacity) -> None:
        """Add what one task had."""
        rru, memory, gpus, network = self.total
        self.total = self.left = (
            rru + demand.rru_on(capacity),
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
        rru, memory, gpus, network = (
            max(type(left)(0), left - (lent - free))
            for left, lent, free in zip(self.left, self._lent, now, strict=True)
        )
        self.left = (float(rru), int(memory), int(gpus), int(network))
        _add(machine, self.left, -1)

    def release(self, machine: Machine, demand: Demand) -> None:
        """Keep what the change uses of a task's room, which the machine was just given back."""
        freed = (
            demand.rru_on(machine.capacity),
            demand.memory_bytes,
            demand.gpus,
            demand.network_mbps,
        )
        rru, memory, gpus, network = (t - f for t, f in zip(self.total, freed, strict=True))
        self.total = (rru, int(memory), int(gpus), int(network))
        _add(machine, self.left, 1)
        rru, memory, gpus, network = map(min, self.left, self.total)
        self.left = (rru, int(memory), int(gpus), int(network))
        _add(machine, self.left, -1)
        _add(machine, freed, -1)

    def pay(self, machine: Machine) -> None:
        """Charge the machine with what was used of the credit."""
        rru, memory, gpus, network = self.total
        _add(machine, self.left, 1)
        _add(machine, (rru, memory, gpus, network), -1)
        self.left = self.total


def _room(machine: Machine) -> tuple[float, int, int, int]:
    return machine.free_rru, machine.free_memory, machine.free_gpus, machine.free_network


def _add(machine: Machine, room: tuple[float, int, int, int], sign: int) -> None:
    rru, memory, gpus, network = room
    machine.free_rru += sign * rru
    machine.free_memory += sign * memory
    machine.free_gpus += sign * gpus
    machine.free_network += sign * network
