"""In which order bins of machines are tried, while tasks come to them.

Two orders do the same: `HeapOrder` for any preferences, and `EvenOrder` for what most jobs
are: new, and spread evenly over MSBs, then data centers. It need not score anything, because
the next bin is known from those that had a task already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heapreplace

from control_plane.core.machine_pools import Bins
from control_plane.core.preferences import Ranking, Scores

Best = tuple[Bins, int]
"""Bins, and whether machines must be taken there (0 or 1)."""
_Bin = tuple[int, int, Bins]
"""The same, with what decides between equals: (1: machines must be taken there, tie, bins)."""
_Entry = tuple[int, int, int, Bins]
"""(score by the first preference, 1: machines must be taken there, tie, bins)."""
_Key = tuple[int, Scores | int, int, int, int, list[_Entry]]
"""The same of the best entry of a heap, with the score by the other preferences; the heap."""


def bin_order(
    ranking: Ranking,
    own: Mapping[Bins, object],
    free: Mapping[Bins, object],
    begin: int,
    *,
    growing: int,
) -> BinOrder:
    """Return the order of the bins of a pool, and of free machines that it may take.

    `begin` decides between equals, so that not every job begins at the same bin.
    `growing` (0 or 1): whether bins where the pool has nothing come after its own.
    """
    found = [(0, bins) for bins in own]
    if free:
        found += [(growing, bins) for bins in free if bins not in own]
    begin %= len(found) or 1
    bins = [(grow, tie, b) for tie, (grow, b) in enumerate(found[begin:] + found[:begin])]
    return EvenOrder(ranking, bins) if ranking.begins_evenly else HeapOrder(ranking, bins)


class HeapOrder:
    """The bins of a plan, best first.

    Bins that differ by the first preference only lie in one heap; these heaps lie in another
    one, ordered by their best bin. A task that goes to a bin then moves two entries and not
    every bin of its data center.
    """

    __slots__ = ("_first", "_heaps", "_rest", "_score_all_again", "best")

    def __init__(self, ranking: Ranking, bins: Iterable[_Bin]) -> None:
        """Order bins by the tasks that are counted already."""
        self._first, self._rest = ranking.score_first, ranking.score_rest
        self._score_all_again = ranking.improves
        heaps: dict[Bins, list[_Entry]] = defaultdict(list)
        for growing, tie, bins_ in bins:
            heaps[bins_[1:]].append((self._first(bins_), growing, tie, bins_))
        for heap in heaps.values():
            heapify(heap)
        self._heaps = [self._key(heap) for heap in heaps.values()]
        heapify(self._heaps)
        self.best: Best | None = self._next()
        """None: no bin is left."""

    def placed(self) -> None:
        """Order anew after a task came to the best bins and was counted."""
        heap = self._heaps[0][-1]
        _, _, tie, bins = heap[0]
        heapreplace(heap, (self._first(bins), 0, tie, bins))
        if self._score_all_again:
            for _, _, _, _, _, heap in self._heaps:
                heap[:] = [(self._first(b), growing, tie, b) for _, growing, tie, b in heap]
                heapify(heap)
            self._heaps = [self._key(heap) for *_, heap in self._heaps if heap]
            heapify(self._heaps)
        self.best = self._next()

    def must_grow(self) -> None:
        """Try the best bins again later, then by taking machines."""
        heap = self._heaps[0][-1]
        first, _, tie, bins = heap[0]
        heapreplace(heap, (first, 1, tie, bins))
        self.best = self._next()

    def drop(self) -> None:
        """Forget the best bins: there is no room."""
        heappop(self._heaps[0][-1])
        self.best = self._next()

    def _next(self) -> Best | None:
        while self._heaps:
            heap = self._heaps[0][-1]
            if not heap:
                heappop(self._heaps)
                continue
            first, growing, tie, bins = heap[0]
            now = self._first(bins)
            if now != first:  # tasks came to the same bin by way of another heap
                heapreplace(heap, (now, growing, tie, bins))
                continue
            key = (first, self._rest(bins), growing, tie)
            if key > self._heaps[0]:
                heapreplace(self._heaps, (*key, id(heap), heap))
                continue
            return bins, growing
        return None

    def _key(self, heap: list[_Entry]) -> _Key:
        first, growing, tie, bins = heap[0]
        return first, self._rest(bins), growing, tie, id(heap), heap


class EvenOrder:
    """The same for a new job that is spread over MSBs, then data centers.

    In each turn every data center gets a task, in that of its MSBs that has none yet and
    comes first. Once all MSBs have had one, `HeapOrder` takes over.
    """

    __slots__ = ("_after", "_done", "_later", "_ranking", "_turn", "best")

    def __init__(self, ranking: Ranking, bins: Iterable[_Bin]) -> None:
        """Order bins of which none has a task."""
        self._ranking = ranking
        datacenters: dict[str, list[_Bin]] = {}
        for bin_ in bins:
            datacenter = bin_[2][1]
            if datacenter in datacenters:
                datacenters[datacenter].append(bin_)
            else:
                datacenters[datacenter] = [bin_]
        for heap in datacenters.values():
            heap.sort()
        self._turn: list[tuple[_Bin, list[_Bin]]] = []
        """The data centers that get a task in this turn: their first MSB, and all."""
        self._later = [(heap[0], heap) for heap in datacenters.values()]
        self._done: list[_Bin] = []
        self._after: HeapOrder | None = None
        self.best: Best | None
        self._next()

    def placed(self) -> None:
        """Go on after a task came to the best bins and was counted."""
        if self._after is not None:
            self._after.placed()
            self.best = self._after.best
            return
        _, heap = heappop(self._turn)
        _, tie, bins = heappop(heap)
        self._done.append((0, tie, bins))
        if heap:
            self._later.append((heap[0], heap))
        self._next()

    def must_grow(self) -> None:
        """Try the best bins again later, then by taking machines."""
        if self._after is not None:
            self._after.must_grow()
            self.best = self._after.best
            return
        _, heap = self._turn[0]
        _, tie, bins = heap[0]
        heapreplace(heap, (1, tie, bins))
        heapreplace(self._turn, (heap[0], heap))
        self._next()

    def drop(self) -> None:
        """Forget the best bins: there is no room."""
        if self._after is not None:
            self._after.drop()
            self.best = self._after.best
            return
        _, heap = self._turn[0]
        heappop(heap)
        if heap:
            heapreplace(self._turn, (heap[0], heap))
        else:
            heappop(self._turn)
        self._next()

    def _next(self) -> None:
        if not self._turn:
            self._turn, self._later = self._later, self._turn
            heapify(self._turn)
        if self._turn:
            growing, _, bins = self._turn[0][0]
            self.best = bins, growing
        else:
            self._after = HeapOrder(self._ranking, self._done)
            self.best = self._after.best


BinOrder = HeapOrder | EvenOrder
