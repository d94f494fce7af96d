"""The order in which bins of machines are tried while tasks are placed in them.

`HeapOrder` works for all preferences. `EvenOrder` gives the same order for most jobs: new ones that
are spread evenly over MSBs, then data centers. It computes no scores, because the next bin follows
from the bins that already have a task. `LazyOrder` reads bins only when it reaches them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count, islice, zip_longest
from typing import TypeVar

from control_plane.allocator.core.fine_bins import FineBins
from control_plane.allocator.core.machine_pools import Binned, Bucket
from control_plane.allocator.core.partition import Bins, Partition
from control_plane.allocator.core.preferences import Ranking, Scores

_Entry = tuple[int, int, int, Bins]
"""(score by the finest preference, 1 if machines must be taken there, tie, bins)."""
_Key = tuple[Scores, int, int, int, list[_Entry]]
"""The best entry of a heap: (scores, 1 if machines must be taken, tie, id of the heap, heap)."""
T = TypeVar("T")


def bin_order(ranking: Ranking, own: Binned, free: Binned, begin: int, *, growing: int) -> BinOrder:
    """Return the order of the bins of a pool, and of free machines that it may take.

    `begin` selects the first of equal bins, so that not all jobs begin at the same bin. With
    `growing` 1 (not 0), bins where the pool has no machines come after its own.
    """
    if _is_even(ranking, own, free, growing):
        assert isinstance(own, Partition)
        assert isinstance(free, Partition)
        return EvenOrder(ranking, own, free, begin)
    is_fine = isinstance(own, FineBins) and isinstance(free, FineBins | Partition)
    if is_fine and ranking.begins_alike:
        assert isinstance(own, FineBins)
        assert isinstance(free, FineBins | Partition)
        return LazyOrder(ranking, own, free, begin, growing=growing)
    found = [(0, bins) for bins in own]
    found += [(growing, bins) for bins in free if bins not in own]
    return HeapOrder(ranking, _rotated(found, begin))


def first_bins(
    ranking: Ranking, own: Binned, free: Binned, begin: int, *, growing: int
) -> Sequence[Bins]:
    """Return the bins with which `bin_order` begins if each of them has room.

    The list ends before machines must be taken, or a bin would come for the second time. It is
    empty if the order cannot be known beforehand.
    """
    if not _is_even(ranking, own, free, growing):
        return ()
    assert isinstance(own, Partition)
    assert isinstance(free, Partition)
    datacenters, begin = _datacenters(own, free, begin)
    rows = [_rotated(own_bins, begin) for own_bins, _ in datacenters]
    growing_at = [len(own_bins) for own_bins, grows in datacenters if grows]
    if growing_at:  # in that turn one of them has no machines of its own left
        rows = [row[: min(growing_at) + 1] for row in rows]
    return [bins for turn in zip_longest(*rows) for bins in turn if bins is not None]


def _is_even(ranking: Ranking, own: Binned, free: Binned, growing: int) -> bool:
    """Return whether `EvenOrder` suffices for a plan."""
    return (
        isinstance(own, Partition)
        and isinstance(free, Partition)
        and ranking.begins_evenly
        and bool(growing or not free)
    )


def _datacenters(
    own: Partition[Bucket], free: Partition[Bucket], begin: int
) -> tuple[list[tuple[list[Bins], list[Bins]]], int]:
    """Return for each data center its bins and those where machines must be taken.

    Also return the rest of `begin`, which selects the first bin of each.
    """
    found = _rotated(own.grouped_with(free), begin)
    return found, begin // (len(found) or 1)


def _rotated(items: Sequence[T], begin: int) -> list[T]:
    """Return all items in a cycle that begins at position `begin`."""
    begin %= len(items) or 1
    return [*items[begin:], *items[:begin]]


def _own_first(
    own: Mapping[Bins, object], free: Mapping[Bins, object], begin: int, growing: int
) -> Iterator[tuple[int, Bins]]:
    """Yield the bins of a pool with 0, then the bins without its machines with `growing`."""
    for bins in _rotated_lazily(own, begin):
        yield 0, bins
    for bins in _rotated_lazily(free, begin):
        if bins not in own:
            yield growing, bins


def _rotated_lazily(items: Mapping[T, object], begin: int) -> Iterator[T]:
    """Yield the items in the order of `_rotated`, without a copy."""
    begin %= len(items) or 1
    return chain(islice(items, begin, None), islice(items, begin))


class HeapOrder:
    """The bins of a plan, best first, by all preferences in their order.

    Bins that differ by the finest preference only are in one heap, ordered by the score of that
    preference. These heaps are in another heap, ordered by all scores of their best bin. So a task
    that goes to a bin moves two entries, not every bin of its data center or MSB.
    """

    __slots__ = (
        "_by_group",
        "_finest",
        "_heaps",
        "_heaps_with",
        "_ranking",
        "_score",
        "_ties",
        "bins",
        "growing",
    )

    def __init__(self, ranking: Ranking, found: Iterable[tuple[int, Bins]]) -> None:
        """Order bins by the tasks counted so far; 1 if machines must be taken there."""
        self._ranking, self._score, self._finest = ranking, ranking.score, ranking.score_finest
        by_group: dict[Bins, list[_Entry]] = defaultdict(list)
        self._ties = 0
        for self._ties, (growing, bins) in enumerate(found, 1):
            entry = (self._finest(bins), growing, self._ties, bins)
            by_group[ranking.group(bins)].append(entry)
        self._by_group = by_group
        self._heaps_with: dict[str, list[list[_Entry]]] = defaultdict(list)
        """Finest bin → the heaps that have it; filled only if tasks may improve bins."""
        if ranking.improves:
            for heap in by_group.values():
                for name in {entry[3][ranking.finest] for entry in heap}:
                    self._heaps_with[name].append(heap)
        for heap in by_group.values():
            heapify(heap)
        self._heaps = [self._heap_key(heap) for heap in by_group.values()]
        heapify(self._heaps)
        self.bins: Bins | None
        """The best bins; None if none are left."""
        self.growing = 0
        """1 if machines must be taken there, else 0."""
        self._find_best()

    def placed(self) -> None:
        """Restore the order after a task was counted in the best bins."""
        heap = self._heaps[0][-1]
        _, _, tie, bins = heap[0]
        heapreplace(heap, (self._finest(bins), 0, tie, bins))
        self._read_next(heap, tie)
        if self._ranking.improves:
            self._score_again(heap, bins)
        self._find_best()

    def add(self, bins: Bins) -> None:
        """Add the bins that a machine has for itself from now on."""
        self._ties += 1
        heap = self._by_group[self._ranking.group(bins)]
        heappush(heap, (self._finest(bins), 0, self._ties, bins))
        self._heaps_with[bins[self._ranking.finest]].append(heap)
        self._heaps = [key for key in self._heaps if key[-1] is not heap]
        self._heaps.append(self._heap_key(heap))
        heapify(self._heaps)
        self._find_best()

    def take_later(self) -> None:
        """Move the best bins to the end: machines must be taken there."""
        heap = self._heaps[0][-1]
        first, _, tie, bins = heap[0]
        heapreplace(heap, (first, 1, tie, bins))
        self._read_next(heap, tie)
        self._find_best()

    def drop(self) -> None:
        """Remove the best bins: they have no room."""
        heap = self._heaps[0][-1]
        tie = heappop(heap)[2]
        self._read_next(heap, tie)
        self._find_best()

    def _read_next(self, heap: list[_Entry], tie: int) -> None:
        """Read the bins after those with this tie; only `LazyOrder` has unread bins."""

    def _score_again(self, placed: list[_Entry], bins: Bins) -> None:
        """Score again all bins that a task may have improved."""
        finest = self._ranking.finest
        for heap in self._heaps_with[bins[finest]]:
            if heap is not placed:
                heap[:] = [(self._finest(b), growing, tie, b) for _, growing, tie, b in heap]
                heapify(heap)
        self._heaps = [self._heap_key(heap) for heap in self._by_group.values() if heap]
        heapify(self._heaps)

    def _find_best(self) -> None:
        while self._heaps:
            heap = self._heaps[0][-1]
            if not heap:
                heappop(self._heaps)
                continue
            finest, growing, tie, bins = heap[0]
            now = self._finest(bins)
            if now != finest:  # tasks came to the same bin through another heap
                heapreplace(heap, (now, growing, tie, bins))
                self._read_next(heap, tie)
                continue
            key = (self._score(bins), growing, tie)
            if key > self._heaps[0][:3]:
                heapreplace(self._heaps, (*key, id(heap), heap))
                continue
            self.bins, self.growing = bins, growing
            return
        self.bins = None

    def _heap_key(self, heap: list[_Entry]) -> _Key:
        _, growing, tie, bins = heap[0]
        return self._score(bins), growing, tie, id(heap), heap


class LazyOrder(HeapOrder):
    """The order for a new job for which all bins of the finest preference are equal at first.

    The bins of a group are read one by one: the next only after the last one got a task or was
    dropped. So the cost of a plan does not grow with the number of racks.
    """

    __slots__ = ("_unread",)

    def __init__(
        self,
        ranking: Ranking,
        own: FineBins,
        free: FineBins | Partition[Bucket],
        begin: int,
        *,
        growing: int,
    ) -> None:
        """Begin with one bin of each group."""
        super().__init__(ranking, ())
        free_groups = free.groups if isinstance(free, FineBins) else {}
        names = _rotated(list(dict.fromkeys((*own.groups, *free_groups))), begin)
        self._unread: dict[int, tuple[int, Iterator[_Entry]]] = {}
        """Heap → the tie of the last entry that was read for it, and the entries after that."""
        for number, name in enumerate(names):
            own_bins, free_bins = own.groups.get(name, {}), free_groups.get(name, {})
            bins = _own_first(own_bins, free_bins, begin // len(names), growing)
            entries = self._entries(bins, count(number, len(names)))
            heap = self._by_group[name]
            self._unread[id(heap)] = -1, entries
            self._read_next(heap, -1)
            if heap:
                self._heaps.append(self._heap_key(heap))
        self._ties = len(names) * (len(own) + len(free) + 1)
        heapify(self._heaps)
        self._find_best()

    def _entries(self, found: Iterator[tuple[int, Bins]], ties: Iterator[int]) -> Iterator[_Entry]:
        for growing, bins in found:
            yield self._finest(bins), growing, next(ties), bins

    def _read_next(self, heap: list[_Entry], tie: int) -> None:
        last, entries = self._unread.get(id(heap), (None, iter(())))
        if last != tie:
            return
        for entry in entries:
            heappush(heap, entry)
            self._unread[id(heap)] = entry[2], entries
            if not entry[0]:  # else tasks came to the same bin through another heap
                return


class _Datacenter:
    """The MSBs of one data center that have no task of the job yet, the next one last."""

    __slots__ = ("growing", "own")

    def __init__(self, own: list[Bins], growing: list[Bins]) -> None:
        self.own = own
        self.growing = growing
        """Bins where machines must be taken."""


class EvenOrder:
    """The order for a new job that is spread over MSBs, then data centers.

    In each turn every data center gets a task, in one of its MSBs without a task; MSBs where no
    machines must be taken come first. Once all MSBs have a task, `HeapOrder` takes over.
    """

    __slots__ = (
        "_bins_with_tasks",
        "_datacenters",
        "_heap_order",
        "_position",
        "_ranking",
        "_turn",
        "bins",
        "growing",
    )

    def __init__(
        self, ranking: Ranking, own: Partition[Bucket], free: Partition[Bucket], begin: int
    ) -> None:
        """Order bins without tasks."""
        self._ranking = ranking
        datacenters, begin = _datacenters(own, free, begin)
        self._datacenters = [
            _Datacenter(_rotated(own_bins, begin)[::-1], _rotated(growing, begin)[::-1])
            for own_bins, growing in datacenters
        ]
        self._turn: list[_Datacenter] = []
        self._position = 0
        """Position of the next data center in the turn."""
        self._bins_with_tasks: list[tuple[int, Bins]] = []
        self._heap_order: HeapOrder | None = None
        self.bins: Bins | None
        self.growing = 0
        self._find_best()

    def placed(self) -> None:
        """Continue after a task was counted in the best bins."""
        if self._heap_order is not None:
            self._heap_order.placed()
            self._show_best_of(self._heap_order)
            return
        datacenter = self._turn[self._position]
        self._position += 1
        self._bins_with_tasks.append((0, (datacenter.own or datacenter.growing).pop()))
        self._find_best()

    def add(self, bins: Bins) -> None:
        """Never called: a job with the default spread has no preferences over single machines."""
        raise AssertionError(bins)

    def take_later(self) -> None:
        """Move the best bins to the end: machines must be taken there."""
        if self._heap_order is not None:
            self._heap_order.take_later()
            self._show_best_of(self._heap_order)
            return
        datacenter = self._turn[self._position]
        datacenter.growing.append(datacenter.own.pop())
        self._order_turn()
        self._find_best()

    def drop(self) -> None:
        """Remove the best bins: they have no room."""
        if self._heap_order is not None:
            self._heap_order.drop()
            self._show_best_of(self._heap_order)
            return
        datacenter = self._turn[self._position]
        (datacenter.own or datacenter.growing).pop()
        self._order_turn()
        self._find_best()

    def _order_turn(self) -> None:
        """Order the rest of the turn: data centers with machines of the pool come first."""
        left = [d for d in self._turn[self._position :] if d.own or d.growing]
        self._turn = sorted(left, key=lambda d: not d.own)
        self._position = 0

    def _find_best(self) -> None:
        if self._position == len(self._turn):
            self._turn, self._position = self._datacenters, 0
            self._order_turn()
        if self._turn:
            datacenter = self._turn[self._position]
            if datacenter.own:
                self.bins, self.growing = datacenter.own[-1], 0
            else:
                self.bins, self.growing = datacenter.growing[-1], 1
        else:
            self._heap_order = HeapOrder(self._ranking, self._bins_with_tasks)
            self._show_best_of(self._heap_order)

    def _show_best_of(self, order: HeapOrder) -> None:
        self.bins, self.growing = order.bins, order.growing


BinOrder = HeapOrder | EvenOrder
