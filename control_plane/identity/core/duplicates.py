"""Whether two hosts have one identity, by their own reports (docs/adr/0107)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.api.presence import Presence
from control_plane.api.duplicates import Duplicate


class CloneFinding(StrEnum):
    """The finding of a round."""

    NOTHING = "nothing"
    """Nothing answers at the machine's address: it proves nothing."""
    ALONE = "alone"
    """The caller is the process that answers."""
    DOUBT = "doubt"
    """Another process answers; the caller may have ended meanwhile."""
    CALLER_SECOND = "caller-second"
    CALLER_FIRST = "caller-first"


@dataclass(frozen=True, slots=True)
class Round:
    """One request of a host."""

    caller: Presence
    there: Presence | None
    """What answered at the machine's address after the caller had asked; None: nothing."""
    doubted: str
    """The mark of a caller that was in doubt in the round before; empty: none."""
    boots: Sequence[str]
    """The boots that were seen alone at this address, the earliest first."""


def found(one: Round) -> CloneFinding:
    """Return the finding of a round.

    A mark is in the memory of one process only. A caller that repeats its mark after another
    process answered was running all the while, so there are two hosts. A reboot, a restart of the
    agent or a restored disk never repeats a mark. The clone is the caller, unless its boot was
    known before that of the other one.
    """
    caller, there = one.caller, one.there
    if there is None:
        return CloneFinding.NOTHING
    if there.mark == caller.mark:
        return CloneFinding.ALONE
    if not caller.mark or one.doubted != caller.mark:
        return CloneFinding.DOUBT
    boots = list(one.boots)
    if caller.boot_id not in boots or there.boot_id == caller.boot_id:
        return CloneFinding.CALLER_SECOND
    later = there.boot_id not in boots or boots.index(there.boot_id) > boots.index(caller.boot_id)
    return CloneFinding.CALLER_FIRST if later else CloneFinding.CALLER_SECOND


def is_second(known: Duplicate | None, boot_id: str) -> bool:
    """Return whether a host is the clone by its boot; copies of one memory image have the same."""
    return known is not None and known.boot_id == boot_id != known.other_boot_id


def stays_second(known: Duplicate | None, boot_id: str) -> bool:
    """Return whether a host counts as the clone while nothing answers at the address.

    It may be the clone after a reboot, and the other one may only be cut off.
    """
    return known is not None and boot_id != known.other_boot_id


def words(known: Duplicate) -> str:
    """Return why a host is the clone, for its operators."""
    return (
        f"another host has the identity of {known.machine} and keeps it"
        f" (boot {known.other_boot_id[:8] or '?'}); this one (boot {known.boot_id[:8] or '?'},"
        f" {known.address or 'unknown address'}) starts no tasks"
    )
