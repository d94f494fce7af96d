"""The largest free amounts in each space class, so that a search need not read every machine.

A space class is skipped while its maximum is less than a task needs. The reason "at most 3 GiB
free" costs the same for ten machines and for a million. A maximum rises when machines come or get
more room. It is computed again only if it must be exact, or after a search that found no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from control_plane.allocator.core.free_space_classes import Classified

M = TypeVar("M", bound=Classified)
FREE_OF: dict[str, Callable[[Any], float]] = {
    kind: attrgetter(f"free_{kind}") for kind in ("memory", "cpu", "gpus", "network", "disk")
}
"""Kind of `feasibility.Tally` → function that returns the free amount; CPU in grains."""
_KEPT = ("memory", "cpu")
"""Kinds whose maxima are always kept; others are found when a reason needs them."""


class ClassMaxima(Generic[M]):
    """For each space class of one bucket, the machines with the largest free amounts."""

    __slots__ = ("_bucket", "_by_class")

    def __init__(self, bucket: object) -> None:
        self._bucket = bucket
        self._by_class: dict[int, dict[str, tuple[float, M]]] = {}
        """Space class → kind → an upper bound of the free amounts, and the machine that had it."""

    def raised(self, machine: M) -> None:
        """Record that a machine came to its space class, or has more room there."""
        kinds = self._by_class.get(machine.space_class)
        if kinds is None:  # the first machine of this space class
            kept = {kind: (FREE_OF[kind](machine), machine) for kind in _KEPT}
            self._by_class[machine.space_class] = kept
            return
        for kind, (most, _) in kinds.items():
            free = FREE_OF[kind](machine)
            if free > most:
                kinds[kind] = free, machine

    def roomiest(self, kind: str, space_class: int, row: Sequence[M]) -> M:
        """Return the machine of a space class (`row`) with the largest free amount.

        They are searched only if the machine with the maximum was charged or has left, and only
        until another machine has the same amount.
        """
        free = FREE_OF[kind]
        kinds = self._by_class[space_class]
        known = kinds.get(kind)
        if known is None or not self._is_there(known[1], space_class) or free(known[1]) != known[0]:
            found = max(_until(row, free, known and known[0]), key=free)
            known = kinds[kind] = free(found), found
        return known[1]

    def is_below(self, space_class: int, memory: int, cpu: int) -> bool:
        """Return whether all machines of a space class have less free memory or CPU than this."""
        kinds = self._by_class.get(space_class)
        return kinds is not None and (kinds["memory"][0] < memory or kinds["cpu"][0] < cpu)

    def _is_there(self, machine: M, space_class: int) -> bool:
        return (
            machine.at >= 0
            and machine.bucket is self._bucket
            and machine.space_class == space_class
        )


def _until(row: Sequence[M], free: Callable[[M], float], bound: float | None) -> Iterator[M]:
    """Yield machines up to the first that reaches the upper bound."""
    for machine in row:
        yield machine
        if free(machine) == bound:
            return
