"""Types that report whether an agent is alive, and whether its host is a clone (docs/adr/0107)."""

from __future__ import annotations

from enum import StrEnum

from agent.api.ranges import Id, Reported, Words


class Liveness(Reported, frozen=True, kw_only=True):
    """Whether the agent is alive or ready, and why not."""

    ok: bool
    detail: Words = ""


class Presence(Reported, frozen=True, kw_only=True):
    """One process of an agent."""

    mark: Id = ""
    """Random text that this process made for its current check and keeps only in memory; empty:
    it has not checked yet."""
    boot_id: Id = ""


class Verdict(StrEnum):
    """Answer of the control plane to a host that checks whether it is a clone."""

    ALONE = "alone"
    """No other host with this identity is known."""
    AGAIN = "again"
    """Another process answers at the host's address. If the host still runs, it must repeat its
    request."""
    SECOND = "second"
    """Another host has this identity and keeps it: the caller is the clone."""


class PresenceAnswer(Reported, frozen=True, kw_only=True):
    """The verdict and its reason."""

    verdict: Verdict
    detail: Words = ""
