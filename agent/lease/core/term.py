"""Whether a control plane may command: its store is not older, its ownership not passed on.

Of stores (docs/adr/0111): a store only grows. A term that began below what a host was told by
another term has lost writes since: its store was restored from a copy, and what it would stop or
move may be newer than all that it knows.

Of owners (docs/adr/0150): each entitlement has one owner at a time, and the number of its term
rises whenever it gets another one. Numbers of different entitlements are not compared, so a machine
that passes from one to another keeps what it was told of both.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.api.term import OwnerTerm, Term

OWNERS_MAX = 1000
"""Entitlements whose owner a host remembers; a machine belongs to a few in its life."""


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


def is_passed_on(told: OwnerTerm, known: Mapping[str, int]) -> bool:
    """Return whether the entitlement has another owner since the term of who speaks."""
    return told.number < known.get(told.entitlement, 0)


def with_owner(told: OwnerTerm, known: Mapping[str, int]) -> Mapping[str, int]:
    """Return what is to be remembered once a request was heard; the same object: nothing new.

    Of more than `OWNERS_MAX` the one that was raised longest ago is forgotten.
    """
    if told.number <= known.get(told.entitlement, -1):
        return known
    others = [(name, number) for name, number in known.items() if name != told.entitlement]
    return dict([*others[-(OWNERS_MAX - 1) :], (told.entitlement, told.number)])
