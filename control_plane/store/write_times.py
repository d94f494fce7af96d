"""Durations of the store's transactions, as reported by the processes of a region."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_KEPT = 1000


class WriteTimes:
    """The durations of an engine's last transactions, including refused ones."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[float] = deque(maxlen=_KEPT)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure one transaction, including one that raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.count += 1
            self._last.append(time.perf_counter() - began)

    def percentile(self, share: float) -> float:
        """Return the percentile `share` (0 to 1) of the durations in seconds; 0: there are none."""
        ordered = sorted(self._last)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
