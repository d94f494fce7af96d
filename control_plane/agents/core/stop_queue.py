"""The order in which the rate limit admits stops of tasks.

The limit also holds for a bug that requests the stop of everything (F-54). A task that must not run
where it runs comes first. The other stops take turns by entitlement, so that the end of a large job
does not delay the update of a small one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A task on a machine."""

    machine: str
    task: str


class StopQueue:
    """Places that wait for a stop, each at most once."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[QueuePlace, None] = OrderedDict()
        self._by_entitlement: OrderedDict[str, OrderedDict[QueuePlace, None]] = OrderedDict()
        self._where: dict[QueuePlace, str] = {}

    def __len__(self) -> int:
        """Return how many places wait."""
        return len(self._urgent) + len(self._where)

    def __contains__(self, place: object) -> bool:
        """Return whether a place waits."""
        return place in self._urgent or place in self._where

    def add(self, place: QueuePlace, entitlement: str, *, urgent: bool) -> None:
        """Queue a place; one that is queued already may only become urgent."""
        if place in self._urgent or (place in self._where and not urgent):
            return
        self.discard(place)
        if urgent:
            self._urgent[place] = None
        else:
            self._where[place] = entitlement
            self._by_entitlement.setdefault(entitlement, OrderedDict())[place] = None

    def first(self) -> QueuePlace | None:
        """Return the next place to stop, and leave it in the queue."""
        if self._urgent:
            return next(iter(self._urgent))
        for places in self._by_entitlement.values():
            return next(iter(places))
        return None

    def take(self, place: QueuePlace) -> None:
        """Remove a place that is stopped now: its entitlement goes to the end of the turns."""
        entitlement = self._where.get(place)
        self.discard(place)
        if entitlement is not None and entitlement in self._by_entitlement:
            self._by_entitlement.move_to_end(entitlement)

    def discard(self, place: QueuePlace) -> None:
        """Remove a place, if it is queued."""
        self._urgent.pop(place, None)
        entitlement = self._where.pop(place, None)
        if entitlement is not None:
            places = self._by_entitlement[entitlement]
            del places[place]
            if not places:
                del self._by_entitlement[entitlement]
