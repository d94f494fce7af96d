"""Decides whether a control plane may command: its store is current and it still is the owner.

Stores (docs/adr/0111): a store only grows. If a term began below a position that another term sent
to the host, its store has lost writes: it was restored from a copy. Tasks that such a control plane
would stop or move may be newer than its store.

Owners (docs/adr/0150): each entitlement has one owner at a time. The number of its term rises with
each new owner. Numbers of different entitlements are not compared, so a machine that moves from one
entitlement to another keeps the numbers of both.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.api.term import OwnerTerm, Term

OWNERS_MAX = 1000
"""Number of entitlements whose owner a host remembers. A machine belongs to a few in its life."""


def is_older(sent: Term, known: Term | None) -> bool:
    """Return whether the sender began with a store that lacks writes of a known term.

    Of two terms of one store the later began at or above every position that the earlier stored.
    """
    return known is not None and sent.name != known.name and sent.began < known.now


def newest(sent: Term, known: Term | None) -> Term:
    """Return the term to remember after a request was accepted."""
    if known is None or sent.name != known.name:
        return sent
    return sent if sent.now > known.now else known


def has_later_owner(sent: OwnerTerm, known: Mapping[str, int]) -> bool:
    """Return whether the entitlement has a later owner than the sender."""
    return sent.number < known.get(sent.entitlement, 0)


def with_owner(sent: OwnerTerm, known: Mapping[str, int]) -> Mapping[str, int]:
    """Return the owners to remember after a request; `known` itself if nothing is new.

    Beyond `OWNERS_MAX` the entry that has not changed for the longest time is dropped.
    """
    if sent.number <= known.get(sent.entitlement, -1):
        return known
    others = [(name, number) for name, number in known.items() if name != sent.entitlement]
    return dict([*others[-(OWNERS_MAX - 1) :], (sent.entitlement, sent.number)])
