"""Whether the store of this control plane was put back from an old copy, as hosts tell it."""

from __future__ import annotations


def is_restored(refusing: int, answered: int, followed: int, *, settled: bool) -> bool:
    """Return whether so many hosts refuse us for an older store that all of us is in doubt.

    Of a store that was put back nearly all hosts were told more than it knows. More than half are
    needed, for a host may lie: a few that are in other hands must not end a control plane. Half of
    all that are `followed`; once that is `settled` who is there, of those that said anything.
    """
    return refusing * 2 > (refusing + answered if settled else followed)
