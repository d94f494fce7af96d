"""Puts machines of one class on shelves by free room, and finds shelves where a demand may fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.free_space_classes import (
    BLOCKED,
    BY_GPUS,
    CUTS,
    MOST_GPUS,
    ORDERS,
    QUARTERS,
    FreeSpaceClass,
    space_class_of,
)
from control_plane.allocator.core.shelf_maxima import ShelfMaxima, Shelved
from control_plane.broker.core.capacity import Capacity

_ROUNDING = 1e-5


class OnShelf(FreeSpaceClass, Shelved, Protocol):
    """The properties of a machine that shelves depend on (`machine_pools.Machine`)."""


M = TypeVar("M", bound=OnShelf)


class Shelves(Generic[M]):
    """The shelves of one bucket."""

    __slots__ = ("capacity", "maxima", "most_memory", "moves", "shelves")

    def __init__(self, capacity: Capacity) -> None:
        """Make empty shelves for machines of this class."""
        self.capacity = capacity
        self.most_memory = 1
        """Largest memory of all machines that were ever here; equal machines differ a little."""
        self.shelves: list[list[M] | None] = [None] * (BLOCKED + 1)
        self.moves = 0
        """Rises before and after a machine changes shelves, so it is odd during a change."""
        self.maxima: ShelfMaxima[M] = ShelfMaxima(self)

    @property
    def is_scarce(self) -> bool:
        """Whether its machines have GPUs; such machines are filled one by one."""
        return self.capacity.gpus > 0

    def _take_off(self, machine: M) -> None:
        """Take a machine off its shelf; the last machine there gets its position."""
        row = self.shelves[machine.shelf]
        assert row is not None
        last = row.pop()
        if last is not machine:
            row[machine.at] = last
            last.at = machine.at

    def reshelve(self, machine: M) -> None:
        """Move a machine to another shelf if its room changed that much."""
        shelf = space_class_of(machine)
        if shelf != machine.shelf:
            self.moves += 1
            self._take_off(machine)
            row = self.shelves[shelf]
            if row is None:
                row = self.shelves[shelf] = []
            machine.shelf, machine.at = shelf, len(row)
            row.append(machine)
            self.moves += 1
        self.maxima.raised(machine)

    def first(self) -> M | None:
        """Return a machine with most room; one that takes no tasks only if there is no other."""
        for row in self.shelves:
            if row:
                for machine in row:  # another thread may empty the row meanwhile
                    return machine
        return None

    def machines(self) -> Iterator[M]:
        """Yield all machines, including those that take no tasks."""
        for row in self.shelves:
            yield from row or ()

    def roomiest(self, kind: str, shelf: int) -> M | None:
        """Return the machine of a shelf with the largest free amount of a kind (`FREE_OF`)."""
        row = self.shelves[shelf]
        return self.maxima.roomiest(kind, shelf, row) if row else None

    def _order(self, demand: Demand | None) -> Sequence[int]:
        """Return the shelves where a demand of this class may find room, most room first."""
        if self.is_scarce:
            gpus = 0 if demand is None else min(int(demand.gpus), MOST_GPUS)
            rru = 0 if demand is None else bisect_right(QUARTERS, self._share(demand) - _ROUNDING)
            return BY_GPUS[gpus, rru]
        return ORDERS[self._least(demand)]

    def _promising(self, order: Sequence[int], demand: Demand | None) -> Iterator[int]:
        """Yield the shelves of an order, without those whose maxima exclude the demand."""
        if demand is None:
            yield from order
            return
        is_below, shelves = self.maxima.is_below, self.shelves
        memory, cpu = demand.memory_bytes, demand.cpu_on(self.capacity)
        for shelf in order:
            if shelves[shelf] and not is_below(shelf, memory, cpu):
                yield shelf

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
