"""The most that is left on any machine of a shelf, so that a refusal need not read each machine.

A shelf is passed over while its maximum is less than what a task needs, and the reason "at most 3
GiB free" costs the same for ten machines and for a million. A maximum rises as machines come or get
more room. It is computed again where it must be exact, or after a search that found nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar


class Shelved(Protocol):
    """A machine as far as this depends on it: `machine_pools.Machine`."""

    free_cpu: int
    free_memory: int
    shelf: int
    at: int

    @property
    def bucket(self) -> object: ...


M = TypeVar("M", bound=Shelved)
FREE_OF: dict[str, Callable[[Any], float]] = {
    kind: attrgetter(f"free_{kind}") for kind in ("memory", "cpu", "gpus", "network", "disk")
}
"""What a machine has left, by the words of `feasibility.Tally`; CPU in grains of its capacity."""
_KEPT = ("memory", "cpu")
"""Always kept; maxima of other kinds are found when a reason is about them."""


class ShelfMaxima(Generic[M]):
    """For the shelves of one bucket, the machines that have most of something left."""

    __slots__ = ("_bucket", "_by_shelf")

    def __init__(self, bucket: object) -> None:
        self._bucket = bucket
        self._by_shelf: dict[int, dict[str, tuple[float, M]]] = {}
        """Shelf → kind → a bound of the free room on each machine, and the machine that had it."""

    def raised(self, machine: M) -> None:
        """Record that a machine came to its shelf, or has more left there."""
        kinds = self._by_shelf.get(machine.shelf)
        if kinds is None:  # it is the first one that came there
            kept = {kind: (FREE_OF[kind](machine), machine) for kind in _KEPT}
            self._by_shelf[machine.shelf] = kept
            return
        for kind, (most, _) in kinds.items():
            free = FREE_OF[kind](machine)
            if free > most:
                kinds[kind] = free, machine

    def roomiest(self, kind: str, shelf: int, row: Sequence[M]) -> M:
        """Return a machine of a shelf that has most of something left; `row`: all that are there.

        The shelf is searched if the machine that had most was charged or left since, and only
        until another one has as much.
        """
        free = FREE_OF[kind]
        kinds = self._by_shelf[shelf]
        known = kinds.get(kind)
        if known is None or not self._is_there(known[1], shelf) or free(known[1]) != known[0]:
            found = max(_until(row, free, known and known[0]), key=free)
            known = kinds[kind] = free(found), found
        return known[1]

    def is_below(self, shelf: int, memory: int, cpu: int) -> bool:
        """Return whether surely no machine of a shelf has so much memory or CPU left."""
        kinds = self._by_shelf.get(shelf)
        return kinds is not None and (kinds["memory"][0] < memory or kinds["cpu"][0] < cpu)

    def _is_there(self, machine: M, shelf: int) -> bool:
        return machine.at >= 0 and machine.bucket is self._bucket and machine.shelf == shelf


def _until(row: Sequence[M], free: Callable[[M], float], bound: float | None) -> Iterator[M]:
    """Yield machines up to one that has as much left as none can exceed."""
    for machine in row:
        yield machine
        if free(machine) == bound:
            return
