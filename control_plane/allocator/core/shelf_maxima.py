"""The largest free amounts on each shelf, so that a search need not read every machine.

A shelf is skipped while its maximum is less than a task needs. The reason "at most 3 GiB free"
costs the same for ten machines and for a million. A maximum rises when machines come or get more
room. It is computed again only if it must be exact, or after a search that found no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar


class Shelved(Protocol):
    """The properties of a machine that maxima depend on (`machine_pools.Machine`)."""

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
"""Kind of `feasibility.Tally` → function that returns the free amount; CPU in grains."""
_KEPT = ("memory", "cpu")
"""Kinds whose maxima are always kept; others are found when a reason needs them."""


class ShelfMaxima(Generic[M]):
    """For each shelf of one bucket, the machines with the largest free amounts."""

    __slots__ = ("_bucket", "_by_shelf")

    def __init__(self, bucket: object) -> None:
        self._bucket = bucket
        self._by_shelf: dict[int, dict[str, tuple[float, M]]] = {}
        """Shelf → kind → an upper bound of the free amounts, and the machine that had it."""

    def raised(self, machine: M) -> None:
        """Record that a machine came to its shelf, or has more room there."""
        kinds = self._by_shelf.get(machine.shelf)
        if kinds is None:  # the first machine on this shelf
            kept = {kind: (FREE_OF[kind](machine), machine) for kind in _KEPT}
            self._by_shelf[machine.shelf] = kept
            return
        for kind, (most, _) in kinds.items():
            free = FREE_OF[kind](machine)
            if free > most:
                kinds[kind] = free, machine

    def roomiest(self, kind: str, shelf: int, row: Sequence[M]) -> M:
        """Return the machine of a shelf with the largest free amount; `row` has all of the shelf.

        The shelf is searched only if the machine with the maximum was charged or has left, and only
        until another machine has the same amount.
        """
        free = FREE_OF[kind]
        kinds = self._by_shelf[shelf]
        known = kinds.get(kind)
        if known is None or not self._is_there(known[1], shelf) or free(known[1]) != known[0]:
            found = max(_until(row, free, known and known[0]), key=free)
            known = kinds[kind] = free(found), found
        return known[1]

    def is_below(self, shelf: int, memory: int, cpu: int) -> bool:
        """Return whether all machines of a shelf surely have less free memory or CPU than this."""
        kinds = self._by_shelf.get(shelf)
        return kinds is not None and (kinds["memory"][0] < memory or kinds["cpu"][0] < cpu)

    def _is_there(self, machine: M, shelf: int) -> bool:
        return machine.at >= 0 and machine.bucket is self._bucket and machine.shelf == shelf


def _until(row: Sequence[M], free: Callable[[M], float], bound: float | None) -> Iterator[M]:
    """Yield machines up to the first that reaches the upper bound."""
    for machine in row:
        yield machine
        if free(machine) == bound:
            return
