"""Whether a control plane may command: its store is not older, its ownership not passed on.

Stores (docs/adr/0111): a store only grows. A term that began below a position that another term
sent to the host has lost writes: its store was restored from a copy. What it would stop or move may
be newer than all that its store contains.

Owners (docs/adr/0150): each entitlement has one owner at a time, and the number of its term
rises whenever it gets another one. Numbers of different entitlements are not compared, so a machine
that passes from one to another keeps the numbers of both.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.api.term import OwnerTerm, Term

OWNERS_MAX = 1000
"""Entitlements whose owner a host remembers; a machine belongs to a few in its life."""


def is_older(told: Term, known: Term | None) -> bool:
    """Return whether the sender began with a store that lacks writes of a known term.

    Of two lives of one store the later began at or above all that the earlier had on disk.
    """
    return known is not None and told.name != known.name and told.began < known.now


def newest(told: Term, known: Term | None) -> Term:
    """Return the term to remember after a request was accepted."""
    if known is None or told.name != known.name:
        return told
    return told if told.now > known.now else known


def is_passed_on(told: OwnerTerm, known: Mapping[str, int]) -> bool:
    """Return whether the entitlement has got another owner since the sender's term."""
    return told.number < known.get(told.entitlement, 0)


def with_owner(told: OwnerTerm, known: Mapping[str, int]) -> Mapping[str, int]:
    """Return the owners to remember after a request; the same object if nothing is new.

    Beyond `OWNERS_MAX` the one that was raised longest ago is forgotten.
    """
    if told.number <= known.get(told.entitlement, -1):
        return known
    others = [(name, number) for name, number in known.items() if name != told.entitlement]
    return dict([*others[-(OWNERS_MAX - 1) :], (told.entitlement, told.number)])
