"""Whether an agent is alive, and the only one that has its identity (docs/adr/0107)."""

from __future__ import annotations

from enum import StrEnum

from agent.api.ranges import Id, Reported, Words


class Liveness(Reported, frozen=True, kw_only=True):
    """Whether the agent is alive or ready, with a word on why not."""

    ok: bool
    detail: Words = ""


class Presence(Reported, frozen=True, kw_only=True):
    """One process of an agent, as it names itself."""

    mark: Id = ""
    """A random word, made by this process for this round of asking and kept in its memory alone;
    empty: it has not asked yet."""
    boot_id: Id = ""


class Verdict(StrEnum):
    """What the control plane makes of a host that asks whether it is the only one."""

    ALONE = "alone"
    """No other host with this identity is known."""
    AGAIN = "again"
    """Another process answers at its address: a host that still runs must repeat its request."""
    SECOND = "second"
    """Another host has this identity, and is the one that keeps it."""


class PresenceAnswer(Reported, frozen=True, kw_only=True):
    """The verdict, and a sentence on it."""

    verdict: Verdict
    detail: Words = ""
