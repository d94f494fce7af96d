"""Keeps the garbage collector from what stays: the records, the index, the results.

A full pass over the objects of a million machines stops the process for more than 100 ms
(docs/adr/0014-one-index-for-the-region.md).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_THRESHOLDS = (500, 0, 600_000)
"""New objects are looked at after 500 more of them and once again after the next 500, which takes 3
to 8 ms: each refers to machines that are in no cache. With 1,000 and every fifth time the same work
came in passes of 10 to 27 ms, and these were nearly all of the long pauses. Old ones are looked
at practically never: what is old belongs to a job or a machine and goes with it, counted by
reference; it has no cycles. Neither has what is new: none of these passes found anything."""


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
