"""Room that a change frees on machines; until the change is stored, only its claims may use it."""

from __future__ import annotations

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Machine
from control_plane.broker.core.capacity import Capacity

Amounts = tuple[int, int, float, int, int]
"""Grains of CPU, bytes of memory, GPUs, Mbit/s, bytes of disk."""
NOTHING: Amounts = (0, 0, 0, 0, 0)


class FreedRoom:
    """Room that a change frees on one machine: a credit for its own claims."""

    __slots__ = ("_lent", "left", "total")

    def __init__(self) -> None:
        self.total = NOTHING
        self.left = NOTHING
        self._lent = NOTHING

    def add(self, demand: Demand, capacity: Capacity) -> None:
        """Add the room of one task."""
        self.total = self.left = _add_amounts(self.total, _amounts_of(demand, capacity), 1)

    def lend(self, machine: Machine) -> None:
        """Add the rest of the credit to the machine's room."""
        _add_to_machine(machine, self.left, 1)
        self._lent = _room(machine)

    def take_back(self, machine: Machine) -> None:
        """Remove the credit from the machine again; claims in between are paid from it first."""
        used = _add_amounts(self._lent, _room(machine), -1)
        cpu, memory, gpus, network, disk = _add_amounts(self.left, used, -1)
        self.left = (max(0, cpu), max(0, memory), max(0, gpus), max(0, network), max(0, disk))
        _add_to_machine(machine, self.left, -1)

    def release(self, machine: Machine, demand: Demand) -> None:
        """After a task's room was returned to the machine, keep the part that the change uses."""
        freed = _amounts_of(demand, machine.capacity)
        self.total = _add_amounts(self.total, freed, -1)
        _add_to_machine(machine, self.left, 1)
        self.left = _minimum(self.left, self.total)
        _add_to_machine(machine, self.left, -1)
        _add_to_machine(machine, freed, -1)

    def pay(self, machine: Machine) -> None:
        """Charge the machine with the used part of the credit."""
        _add_to_machine(machine, self.left, 1)
        _add_to_machine(machine, self.total, -1)
        self.left = self.total

    def recount_cpu(self, freed: int, wanted: int) -> int:
        """Set the CPU in new grains: the freed CPU, and the CPU that the change claims.

        Return how much of the freed CPU the claims use.
        """
        used = min(freed, wanted)
        self.total = (freed, *self.total[1:])
        self.left = (freed - used, *self.left[1:])
        return used


def _amounts_of(demand: Demand, capacity: Capacity) -> Amounts:
    cpu, memory = demand.cpu_on(capacity), demand.memory_bytes
    return cpu, memory, demand.gpus, demand.network_mbps, demand.disk_bytes


def _add_amounts(one: Amounts, other: Amounts, sign: int) -> Amounts:
    cpu, memory, gpus, network, disk = one
    c, m, g, n, d = other
    return cpu + sign * c, memory + sign * m, gpus + sign * g, network + sign * n, disk + sign * d


def _minimum(one: Amounts, other: Amounts) -> Amounts:
    cpu, memory, gpus, network, disk = one
    c, m, g, n, d = other
    return min(cpu, c), min(memory, m), min(gpus, g), min(network, n), min(disk, d)


def _room(machine: Machine) -> Amounts:
    cpu, memory, gpus = machine.free_cpu, machine.free_memory, machine.free_gpus
    return cpu, memory, gpus, machine.free_network, machine.free_disk


def _add_to_machine(machine: Machine, room: Amounts, sign: int) -> None:
    cpu, memory, gpus, network, disk = room
    machine.free_cpu += sign * cpu
    machine.free_memory += sign * memory
    machine.free_gpus += sign * gpus
    machine.free_network += sign * network
    machine.free_disk += sign * disk
