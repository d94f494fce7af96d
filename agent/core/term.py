"""Whether a control plane's store is older than what a host was told before (docs/adr/0111).

A store only grows: a term that began below what a host was told by another term has lost writes
since. Its store was put back from a copy, and what it would stop or move may be newer than all that
it knows.
"""

from __future__ import annotations

from agent.api.term import Term


def is_older(told: Term, known: Term | None) -> bool:
    """Return whether who speaks began with a store that lacks what the host was told before.

    Two lives of one store: the later one began at or above all that the earlier one had on disk.
    """
    return known is not None and told.name != known.name and told.began < known.now


def newest(told: Term, known: Term | None) -> Term:
    """Return what is to be remembered once a request was taken."""
    if known is None or told.name != known.name:
        return told
    return told if told.now > known.now else known
