"""Keeps the garbage collector from what stays: the records, the index, the results.

A full pass over the objects of a million machines stops the process for more than 100 ms
(docs/adr/0014-one-index-for-the-region.md).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_THRESHOLDS = (1_000, 5, 100_000)
"""New objects are looked at after 1,000 more of them, those that stayed after 5 such passes,
which takes 2 ms (20 ms with 2,000 and 20: each refers to machines that are in no cache); old
ones practically never: what is old belongs to a job or a machine and goes with it, counted by
reference; it has no cycles."""


@contextlib.contextmanager
def heap_that_stays() -> Iterator[None]:
    """Take everything that is made meanwhile for permanent; call it once, at the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
