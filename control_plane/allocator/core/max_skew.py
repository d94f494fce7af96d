"""A hard bound on skew: no bin may be further ahead of the emptiest one than a job allows.

Kubernetes calls it `topologySpreadConstraints` with `DoNotSchedule`. A bin counts if one of its
machines takes tasks, meets every requirement and is large enough, full or not. So bins do not wait
for a bin whose machines are all down, drained, excluded or too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class EmptiestBin:
    """The number of tasks in the emptiest bin, while tasks are added one by one."""

    __slots__ = ("_bins", "_counts", "_emptiest", "tasks")

    def __init__(self, counts: Mapping[str, int]) -> None:
        """`counts` has the tasks by bin and changes while they are placed."""
        self._counts = counts
        self._bins: set[str] = set()
        self._emptiest = 0
        """How many bins have the fewest tasks."""
        self.tasks: int | None = None
        """The tasks of the emptiest bin; None if no bin counts."""

    def set_bins(self, bins: Iterable[str]) -> None:
        """Set the bins that count; each group of tasks has its own."""
        self._bins = set(bins)
        self._find_fewest()

    def count_task(self, bin_: str) -> None:
        """Record one more task in a bin."""
        if bin_ in self._bins and self._counts[bin_] - 1 == self.tasks:
            self._emptiest -= 1
            if not self._emptiest:
                self._find_fewest()

    def is_ahead(self, bin_: str, most: int) -> bool:
        """Return whether one more task would put a bin more than `most` tasks ahead."""
        return self.tasks is not None and self._counts[bin_] + 1 - self.tasks > most

    def _find_fewest(self) -> None:
        tasks = [self._counts[bin_] for bin_ in self._bins]
        self.tasks = min(tasks, default=None)
        self._emptiest = tasks.count(self.tasks) if self.tasks is not None else 0
