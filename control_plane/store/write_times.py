"""How long the store takes for a transaction, as the processes of a region report it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_KEPT = 1000


class WriteTimes:
    """The times of the last transactions of an engine, refused ones included."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[float] = deque(maxlen=_KEPT)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Take the time of one transaction; one that raises was answered, or given up."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.count += 1
            self._last.append(time.perf_counter() - began)

    def percentile(self, share: float) -> float:
        """Return the time in seconds that a share (0 to 1) of them does not exceed; 0: none."""
        ordered = sorted(self._last)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
