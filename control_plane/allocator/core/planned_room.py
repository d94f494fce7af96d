"""A copy of the room on a machine, in which a plan takes and frees room."""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import PORTS, take_room
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.ports import Ports
from control_plane.broker.core.capacity import Capacity, Place

_NOWHERE = Place("", "", "", "", "")


class PlannedRoom:
    """A copy of a machine's room, which a plan changes instead of the machine."""

    __slots__ = ("free_cpu", "free_disk", "free_gpus", "free_memory", "free_network", "ports")

    def __init__(self, machine: Machine) -> None:
        """Copy the room of a machine."""
        self.free_cpu = machine.free_cpu
        self.free_memory = machine.free_memory
        self.free_gpus = machine.free_gpus
        self.free_network = machine.free_network
        self.free_disk = machine.free_disk
        ports = machine.ports
        self.ports = Ports(ports.taken, ports.next) if ports else None

    @staticmethod
    def whole(capacity: Capacity) -> PlannedRoom:
        """Return the room of an empty machine."""
        return PlannedRoom(Machine("", capacity, _NOWHERE, ""))

    @property
    def free_ports(self) -> int:
        """How many ports no task has."""
        return PORTS - len(self.ports.taken) if self.ports else PORTS

    def take(self, demand: Demand, capacity: Capacity, times: int = 1) -> None:
        """Subtract the room of tasks; a negative `times` adds it. Ports are not included."""
        take_room(self, demand, capacity, times)

    def pick_ports(self, names: Iterable[str]) -> dict[str, int]:
        """Take the ports of one task."""
        if self.ports is None:
            self.ports = Ports()
        return self.ports.pick(names)
