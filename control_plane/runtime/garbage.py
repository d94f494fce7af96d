"""Excludes permanent objects from garbage collection: records, the index, cached results.

A full pass over the objects of a million machines stops the process for more than 100 ms
(docs/adr/0014-one-index-of-the-whole-region-planned-on-without-a-lock.md). So loaded objects count
as permanent. Full passes over the rest continue: a closed connection can refer to itself, and would
stay in memory (docs/adr/0139-old-garbage-is-collected-in-short-passes.md).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

_THRESHOLDS = (500, 0, 5)
"""New objects are examined after 500 more of them and once again after the next 500, which takes 1
to 5 ms: each refers to machines that are in no cache. A full pass runs after 5 of these at the
earliest, and only when the old objects have grown by a quarter. After 50 of these (25,000 to 50,000
objects) it took 17 to 34 ms."""
MAX_PASS_S = 0.003
"""A full pass over some 8,000 objects, in CPU time: a busy host does not lengthen it. Objects that
survive a longer pass count as permanent, so that the next one is short again."""


class _PassMonitor:
    """Measures full passes, and freezes objects that survive one that took too long."""

    def __init__(self) -> None:
        self._began = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        """Called by the collector at the start and the end of each pass."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.thread_time()
        elif time.thread_time() - self._began > MAX_PASS_S:
            gc.freeze()


@contextlib.contextmanager
def permanent_heap() -> Iterator[None]:
    """Count everything made within the block as permanent; use it once, at the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    if not any(isinstance(known, _PassMonitor) for known in gc.callbacks):
        gc.callbacks.append(_PassMonitor())
