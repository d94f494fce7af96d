"""Whether two hosts have one identity, by their own reports (docs/adr/0107)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.api.presence import Presence
from control_plane.api.duplicates import Duplicate


class CloneFinding(StrEnum):
    """Which of two hosts with one identity is the clone, by one round."""

    NOTHING = "nothing"
    """No process answers at the machine's address: that proves nothing."""
    ALONE = "alone"
    """The process that answers is the caller."""
    DOUBT = "doubt"
    """Another process answers; the caller may have ended meanwhile."""
    CALLER_IS_CLONE = "caller-is-clone"
    OTHER_IS_CLONE = "other-is-clone"


@dataclass(frozen=True, slots=True)
class Round:
    """One request of a host, and the answer at the machine's address."""

    caller: Presence
    answered: Presence | None
    """The process that then answered at the machine's address; None: no process did."""
    doubted: str
    """The mark of the caller that the round before left in doubt; empty: none."""
    boots: Sequence[str]
    """The boots that were found alone at this address, the earliest first."""


def finding_of(check: Round) -> CloneFinding:
    """Return the finding of a round.

    A mark is in the memory of one process only. A caller that repeats its mark after another
    process answered was running all the time, so there are two hosts. A reboot, a restart of the
    agent or a restored disk never repeats a mark. The clone is the caller, unless its boot was
    known before that of the other host.
    """
    caller, answered = check.caller, check.answered
    if answered is None:
        return CloneFinding.NOTHING
    if answered.mark == caller.mark:
        return CloneFinding.ALONE
    if not caller.mark or check.doubted != caller.mark:
        return CloneFinding.DOUBT
    boots = list(check.boots)
    if caller.boot_id not in boots or answered.boot_id == caller.boot_id:
        return CloneFinding.CALLER_IS_CLONE
    other = answered.boot_id
    is_later = other not in boots or boots.index(other) > boots.index(caller.boot_id)
    return CloneFinding.OTHER_IS_CLONE if is_later else CloneFinding.CALLER_IS_CLONE


def is_clone(known: Duplicate | None, boot_id: str) -> bool:
    """Return whether a host is the clone by its boot; copies of one memory image have the same."""
    return known is not None and known.boot_id == boot_id != known.other_boot_id


def is_still_clone(known: Duplicate | None, boot_id: str) -> bool:
    """Return whether a host counts as the clone while no process answers at the address.

    It may be the clone after a reboot, and the original may only be cut off.
    """
    return known is not None and boot_id != known.other_boot_id


def describe_clone(known: Duplicate) -> str:
    """Return why a host is the clone, as text for operators."""
    return (
        f"another host has the identity of {known.machine} and keeps it"
        f" (boot {known.other_boot_id[:8] or '?'}); this one (boot {known.boot_id[:8] or '?'},"
        f" {known.address or 'unknown address'}) starts no tasks"
    )
