"""In which order bins of machines are tried, while tasks come to them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from control_plane.core.machine_pools import Bins
from control_plane.core.preferences import Ranking, Scores

_Entry = tuple[int, int, int, Bins]
"""(score by the first preference, 1: machines must be taken there, tie, bins)."""


_Key = tuple[int, Scores | int, int, int, int, list[_Entry]]
"""The same of the best entry of a heap, with the score by the other preferences; the heap."""


class BinOrder:
    """The bins of a plan, best first.

    Bins that differ by the first preference only lie in one heap; these heaps lie in another
    one, ordered by their best bin. A task that goes to a bin then moves two entries and not
    every bin of its data center.
    """

    def __init__(self, ranking: Ranking, bins: Iterable[tuple[Bins, int]], begin: int) -> None:
        """Order bins, each with whether machines must be taken there (0 or 1).

        `begin` decides between equals, so that not every job begins at the same bin.
        """
        self._first, self._rest = ranking.score_first, ranking.score_rest
        self._score_all_again = ranking.improves
        found = list(bins)
        begin %= len(found) or 1
        heaps: dict[Bins, list[_Entry]] = defaultdict(list)
        for tie, (bins_, growing) in enumerate(found[begin:] + found[:begin]):
            heaps[bins_[1:]].append((self._first(bins_), growing, tie, bins_))
        for heap in heaps.values():
            heapq.heapify(heap)
        self._heaps = [self._key(heap) for heap in heaps.values()]
        heapq.heapify(self._heaps)

    def best(self) -> tuple[Bins, int] | None:
        """Return the best bins, and whether machines must be taken there; None: none is left."""
        while self._heaps:
            heap = self._heaps[0][-1]
            if not heap:
                heapq.heappop(self._heaps)
                continue
            first, growing, tie, bins = heap[0]
            now = self._first(bins)
            if now != first:  # tasks came to the same bin by way of another heap
                heapq.heapreplace(heap, (now, growing, tie, bins))
                continue
            key = (first, self._rest(bins), growing, tie)
            if key > self._heaps[0]:
                heapq.heapreplace(self._heaps, (*key, id(heap), heap))
                continue
            return bins, growing
        return None

    def must_grow(self) -> None:
        """Try the best bins again later, then by taking machines."""
        heap = self._heaps[0][-1]
        first, _, tie, bins = heap[0]
        heapq.heapreplace(heap, (first, 1, tie, bins))

    def drop(self) -> None:
        """Forget the best bins: there is no room."""
        heapq.heappop(self._heaps[0][-1])

    def placed(self) -> None:
        """Order anew after a task came to the best bins and was counted."""
        heap = self._heaps[0][-1]
        _, _, tie, bins = heap[0]
        heapq.heapreplace(heap, (self._first(bins), 0, tie, bins))
        if self._score_all_again:
            for _, _, _, _, _, heap in self._heaps:
                heap[:] = [(self._first(b), growing, tie, b) for _, growing, tie, b in heap]
                heapq.heapify(heap)
            self._heaps = [self._key(heap) for *_, heap in self._heaps if heap]
            heapq.heapify(self._heaps)

    def _key(self, heap: list[_Entry]) -> _Key:
        first, growing, tie, bins = heap[0]
        return first, self._rest(bins), growing, tie, id(heap), heap
