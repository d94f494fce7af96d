"""Machines of a pool by bins that are finer than buckets: rows, racks, labels, memory.

Partitioning a million machines takes longer than placing a job. So each bucket keeps the partition
of its machines until one comes or goes, and a pool combines these partitions group by group. The
orders of bins then read only the bins that they reach.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from control_plane.allocator.core.machine_pools import Bucket, Cell, Part, Pool
from control_plane.allocator.core.partition import Bins
from control_plane.allocator.core.preferences import Ranking

Parted = dict[Bins, Part]
"""The machines of one bucket, or of one group, by their bins."""
Group = Bins
"""All bins except the finest one."""
_KEPT = 16
"""Number of cached partitions of a pool; others are made again."""


class FineBins(Mapping[Bins, Sequence[Part]]):
    """The machines of a pool by bins, and the bins by group. It never changes after `fill`."""

    __slots__ = ("_group", "_made_of", "groups", "shape")

    def __init__(self, ranking: Ranking, shape: int) -> None:
        """`shape` is the shape of the pool."""
        self._group = ranking.group
        self._made_of: dict[Group, list[Parted]] = {}
        self.groups: dict[Group, dict[Bins, Sequence[Part]]] = {}
        self.shape = shape

    def fill(self, made_of: dict[Group, list[Parted]], before: FineBins | None) -> None:
        """Combine the parts of buckets; groups that are unchanged since `before` are reused."""
        self._made_of = made_of
        for group, parts in made_of.items():
            known = before.taken_over(group, parts) if before is not None else None
            self.groups[group] = known if known is not None else _combined(parts)

    def taken_over(self, group: Group, parts: list[Parted]) -> dict[Bins, Sequence[Part]] | None:
        """Return a group if it was made of exactly these parts."""
        known = self._made_of.get(group, [])
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            return None
        return self.groups[group]

    def __getitem__(self, bins: Bins) -> Sequence[Part]:
        """Return the machines of some bins."""
        return self.groups[self._group(bins)][bins]

    def __contains__(self, bins: object) -> bool:
        """Return whether there are machines of these bins."""
        assert isinstance(bins, tuple)
        return bins in self.groups.get(self._group(bins), ())

    def __iter__(self) -> Iterator[Bins]:
        """Yield all bins, group by group."""
        for group in self.groups.values():
            yield from group

    def __len__(self) -> int:
        """Return how many bins there are."""
        return sum(map(len, self.groups.values()))


def fine_bins(pool: Pool, ranking: Ranking) -> Generator[None, None, FineBins]:
    """Return the machines of a pool by the bins of a ranking, made in steps of bounded time."""
    key = ranking.parting
    before = pool.fine.get(key)
    if before is not None and before.shape == pool.shape:
        assert isinstance(before, FineBins)
        return before
    found = FineBins(ranking, pool.shape)
    made_of: dict[Group, list[Parted]] = {}
    for bucket in list(pool.buckets.values()):
        if not bucket.size:
            continue
        memo = bucket.memo  # a new object after a machine came or went
        groups = memo.get(key)
        if groups is None:
            if len(memo) >= _KEPT:
                memo.clear()
            groups = memo[key] = _parted(bucket, ranking)
            yield
        for group, parted in groups.items():
            made_of.setdefault(group, []).append(parted)
    found.fill(made_of, before)
    if len(pool.fine) >= _KEPT:
        pool.fine = {}
    pool.fine[key] = found
    return found


def _parted(bucket: Bucket, ranking: Ranking) -> dict[Group, Parted]:
    alike: dict[Bins, list[Cell]] = {}
    for cell in bucket.cells(by_size=ranking.by_size):
        alike.setdefault(ranking.common_bins(cell), []).append(cell)
    groups: dict[Group, Parted] = {}
    for bins, cells in alike.items():
        groups.setdefault(ranking.group(bins), {})[bins] = Cell.of(bucket, cells)
    return groups


def _combined(parts: list[Parted]) -> dict[Bins, Sequence[Part]]:
    found: dict[Bins, list[Part]] = {}
    for parted in parts:
        for bins, part in parted.items():
            found.setdefault(bins, []).append(part)
    return dict(found)
