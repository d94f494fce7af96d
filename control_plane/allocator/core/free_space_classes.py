"""Space classes: groups of machines by free room, and the order in which they are tried."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from control_plane.broker.core.capacity import Capacity


class Classified(Protocol):
    """The properties of a machine that space classes depend on (`machine_pools.Machine`)."""

    free_cpu: int
    free_memory: int
    free_gpus: float
    space_class: int
    at: int

    @property
    def bucket(self) -> object: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def blocked(self) -> str: ...
    @property
    def jobs(self) -> tuple[object, ...]: ...


T = TypeVar("T", bound=Classified)
CUTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Bounds between space classes: shares of a machine's room that are free."""
CLASSES = len(CUTS) + 1
BY_ROOM = sorted(
    ((rru, memory) for rru in range(CLASSES) for memory in range(CLASSES)),
    key=lambda c: (min(c), sum(c)),
    reverse=True,
)
"""Classes of RRU and memory left, most room first."""
SPACE_CLASS = {classes: 1 + place for place, classes in enumerate(BY_ROOM)}
SPACE_CLASS_OF = [[SPACE_CLASS[rru, memory] for memory in range(CLASSES)] for rru in range(CLASSES)]
EMPTY, BLOCKED = 0, 1 + len(BY_ROOM)
"""Numbers of space classes in the order in which they are tried: first machines without tasks, then
the classes of room, last machines that take no tasks."""
ORDERS = {
    (rru, memory): (
        EMPTY,
        *(space_class for (r, m), space_class in SPACE_CLASS.items() if r >= rru and m >= memory),
    )
    for rru, memory in BY_ROOM
}
"""Least sufficient classes of RRU and memory → the space classes to try."""
BY_TIGHTNESS = {
    (rru, memory): [
        [
            space_class
            for (r, m), space_class in SPACE_CLASS.items()
            if r >= rru and m >= memory and min(r, m) == low
        ]
        for low in range(CLASSES)
    ]
    for rru, memory in BY_ROOM
}
"""The same with the least room first, ordered by the lesser of the two shares."""
QUARTERS = (1 / 4, 1 / 2, 3 / 4)
MOST_GPUS = len(BY_ROOM) // (len(QUARTERS) + 1) - 1
BY_GPUS = {
    (gpus, rru): (
        *(1 + g * 4 + r for g in range(gpus, MOST_GPUS + 1) for r in range(rru, 4)),
        EMPTY,
    )
    for gpus in range(MOST_GPUS + 1)
    for rru in range(4)
}
"""Least sufficient number of GPUs and quarter of RRU → the space classes to try, fewest GPUs first.

Machines with GPUs are in space classes by the number of free GPUs and by quarters of free RRU."""


BY_CLASS = {
    "memory": [
        [SPACE_CLASS[rru, low] for rru in range(CLASSES)] for low in reversed(range(CLASSES))
    ],
    "cpu": [[SPACE_CLASS[low, mem] for mem in range(CLASSES)] for low in reversed(range(CLASSES))],
}
"""Space classes without the empty machines, in groups: those with most memory or CPU left first."""
LEAST = tuple(CUTS[low - 1] if low else 0.0 for low in reversed(range(CLASSES)))
"""For each group of `BY_CLASS`, the least share that is free on each of its machines."""
ALL = [list(range(1, BLOCKED))]


def scarcity(machine: Classified) -> tuple[int, bool, int]:
    """Return the sort key of a machine with GPUs, in the order of the space classes."""
    return min(int(machine.free_gpus), MOST_GPUS), not machine.jobs, machine.space_class


def tightness(machine: Classified) -> tuple[float, float]:
    """Return how much is left of a machine; the less, the tighter a task sits there."""
    rru, memory = _shares(machine)
    return min(rru, memory), rru + memory


def most_room_first(machines: Iterable[T]) -> Iterator[T]:
    """Yield machines without tasks at once, so that a caller may stop at the first; then others."""
    others = list[T]()
    for machine in machines:
        if machine.space_class == EMPTY:
            yield machine
        else:
            others.append(machine)
    yield from sorted(others, key=lambda m: m.space_class)


def space_class_of(machine: Classified) -> int:
    """Return the space class of a machine."""
    if machine.blocked:
        return BLOCKED
    if not machine.jobs:
        return EMPTY
    capacity = machine.capacity  # `_shares` inline: this runs once for each placed task
    memory = machine.free_memory / capacity.memory_bytes if capacity.memory_bytes else 0.0
    rru = machine.free_cpu / capacity.cpu_room if capacity.cpu_room else 1.0
    if capacity.gpus:
        return 1 + 4 * max(0, min(int(machine.free_gpus), MOST_GPUS)) + bisect_right(QUARTERS, rru)
    return SPACE_CLASS_OF[bisect_right(CUTS, rru)][bisect_right(CUTS, memory)]


def _shares(machine: Classified) -> tuple[float, float]:
    """Return the free shares of its RRU and memory."""
    capacity = machine.capacity
    memory = machine.free_memory / capacity.memory_bytes if capacity.memory_bytes else 0.0
    rru = machine.free_cpu / capacity.cpu_room if capacity.cpu_room else 1.0
    return rru, memory
