"""Reasons not to declare a silent machine down yet: its silence is expected, or its host is up."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.health.core.verdict import Held


@dataclass(frozen=True, slots=True)
class SilenceSigns:
    """The observations of a silent machine. Moments are those of `Runtime.now()`."""

    silent_s: float
    joined_until: float = 0.0
    """The machine has just joined; its agent may still be starting until then."""
    away_until: float = 0.0
    """The machine was ordered to reboot and may be away until then."""
    is_switching: bool = False
    """The machine may reboot for its host profile before the reboot is recorded."""
    alive_at: float | None = None
    """When its host last gave a sign of life although its agent gave no usable answer."""
    is_leaving: bool = False
    """The host reported that it was about to shut down."""


@dataclass(frozen=True, slots=True)
class GracePeriods:
    """How long silence is excused, in seconds."""

    reboot_s: float
    agent_s: float
    alive_s: float
    """How long a host counts as alive after a sign of life."""


def excuse(signs: SilenceSigns, now: float, graces: GracePeriods) -> Held | None:
    """Return why a machine that does not answer is not marked down, and for how long.

    An agent that is killed, upgraded, restarted or short of CPU time leaves its tasks running, so
    moving them would do harm (P1). A host that reported its shutdown has ended its tasks. If it
    refuses connections after that report, this does not show that its tasks run.
    """
    if now < signs.joined_until:
        return Held("it has just joined; its agent may be starting", signs.joined_until - now)
    if now < signs.away_until:
        return Held("it was ordered to reboot", signs.away_until - now)
    if signs.is_switching and signs.silent_s < graces.reboot_s:
        left_s = graces.reboot_s - signs.silent_s
        return Held("it may be rebooting for its host profile", left_s)
    is_alive = signs.alive_at is not None and now - signs.alive_at < graces.alive_s
    if is_alive and not signs.is_leaving and signs.silent_s < graces.agent_s:
        return Held(
            "its host is up, and only its agent does not work: its tasks most likely run",
            graces.agent_s - signs.silent_s,
        )
    return None
