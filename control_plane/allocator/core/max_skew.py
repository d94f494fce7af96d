"""A hard bound on skew: no bin may be further ahead of the emptiest one than a job allows.

Kube-scheduler calls it `topologySpreadConstraints` with `DoNotSchedule`. The bins that count are
those in which a machine takes tasks, meets every requirement and is large enough, full or not. So
bins do not wait for one in which all machines are down, drained, excluded or too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Floor:
    """The fewest tasks that any bin has, while tasks are added one by one."""

    __slots__ = ("_bins", "_counts", "_there", "tasks")

    def __init__(self, counts: Mapping[str, int]) -> None:
        """Follow these counts of tasks by bin; no bin counts yet."""
        self._counts = counts
        self._bins: set[str] = set()
        self._there = 0
        """How many bins have the fewest tasks."""
        self.tasks: int | None = None
        """The tasks of the emptiest bin; None: there is none."""

    def among(self, bins: Iterable[str]) -> None:
        """Count these bins, and no others: each group of tasks has its own."""
        self._bins = set(bins)
        self._look()

    def added(self, bin_: str) -> None:
        """Record one more task in a bin."""
        if bin_ in self._bins and self._counts[bin_] - 1 == self.tasks:
            self._there -= 1
            if not self._there:
                self._look()

    def is_ahead(self, bin_: str, most: int) -> bool:
        """Return whether one more task would make a bin further ahead than `most`."""
        return self.tasks is not None and self._counts[bin_] + 1 - self.tasks > most

    def _look(self) -> None:
        tasks = [self._counts[bin_] for bin_ in self._bins]
        self.tasks = min(tasks, default=None)
        self._there = tasks.count(self.tasks) if self.tasks is not None else 0
