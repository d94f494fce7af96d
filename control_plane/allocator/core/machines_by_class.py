"""Groups equal machines by free room (space classes), and finds groups where a demand may fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from control_plane.allocator.core.class_maxima import ClassMaxima
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.free_space_classes import (
    BLOCKED,
    BY_GPUS,
    CUTS,
    MOST_GPUS,
    ORDERS,
    QUARTERS,
    Classified,
    space_class_of,
)
from control_plane.broker.core.capacity import Capacity

_ROUNDING = 1e-5


M = TypeVar("M", bound=Classified)


class MachinesByClass(Generic[M]):
    """The machines of one bucket, by space class."""

    __slots__ = ("by_class", "capacity", "maxima", "most_memory", "moves")

    def __init__(self, capacity: Capacity) -> None:
        """Make empty space classes for machines of this capacity."""
        self.capacity = capacity
        self.most_memory = 1
        """Largest memory of all machines that were ever here; equal machines differ a little."""
        self.by_class: list[list[M] | None] = [None] * (BLOCKED + 1)
        self.moves = 0
        """Rises before and after a machine changes space classes, so it is odd during a change."""
        self.maxima: ClassMaxima[M] = ClassMaxima(self)

    @property
    def is_scarce(self) -> bool:
        """Whether its machines have GPUs; such machines are filled one by one."""
        return self.capacity.gpus > 0

    def _remove(self, machine: M) -> None:
        """Take a machine out of its space class; the last machine there gets its position."""
        row = self.by_class[machine.space_class]
        assert row is not None
        last = row.pop()
        if last is not machine:
            row[machine.at] = last
            last.at = machine.at

    def reclassify(self, machine: M) -> None:
        """Move a machine to another space class if its room changed that much."""
        space_class = space_class_of(machine)
        if space_class != machine.space_class:
            self.moves += 1
            self._remove(machine)
            row = self.by_class[space_class]
            if row is None:
                row = self.by_class[space_class] = []
            machine.space_class, machine.at = space_class, len(row)
            row.append(machine)
            self.moves += 1
        self.maxima.raised(machine)

    def first(self) -> M | None:
        """Return a machine with most room; one that takes no tasks only if there is no other."""
        for row in self.by_class:
            if row:
                for machine in row:  # another thread may empty the row meanwhile
                    return machine
        return None

    def machines(self) -> Iterator[M]:
        """Yield all machines, including those that take no tasks."""
        for row in self.by_class:
            yield from row or ()

    def roomiest(self, kind: str, space_class: int) -> M | None:
        """Return the machine with the largest free amount of a kind (`FREE_OF`)."""
        row = self.by_class[space_class]
        return self.maxima.roomiest(kind, space_class, row) if row else None

    def _order(self, demand: Demand | None) -> Sequence[int]:
        """Return the space classes where a demand of this class may find room, most room first."""
        if self.is_scarce:
            gpus = 0 if demand is None else min(int(demand.gpus), MOST_GPUS)
            rru = 0 if demand is None else bisect_right(QUARTERS, self._share(demand) - _ROUNDING)
            return BY_GPUS[gpus, rru]
        return ORDERS[self._least(demand)]

    def _promising(self, order: Sequence[int], demand: Demand | None) -> Iterator[int]:
        """Yield the space classes of an order, without those whose maxima exclude the demand."""
        if demand is None:
            yield from order
            return
        is_below, by_class = self.maxima.is_below, self.by_class
        memory, cpu = demand.memory_bytes, demand.cpu_on(self.capacity)
        for space_class in order:
            if by_class[space_class] and not is_below(space_class, memory, cpu):
                yield space_class

    def _share(self, demand: Demand) -> float:
        capacity = self.capacity
        return demand.cpu_on(capacity) / capacity.cpu_room if capacity.cpu_room else 0.0

    def _least(self, demand: Demand | None) -> tuple[int, int]:
        """Return the classes of RRU and memory below which no machine has room."""
        if demand is None:
            return 0, 0
        rru = self._share(demand)
        memory = demand.memory_bytes / self.most_memory
        return bisect_right(CUTS, rru - _ROUNDING), bisect_right(CUTS, memory - _ROUNDING)
