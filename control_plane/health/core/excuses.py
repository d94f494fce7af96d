"""Why silence of one machine is expected, or is not the machine's: it is not down yet."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.health.core.verdict import Held


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of a silent machine. Moments are those of `Runtime.now()`."""

    silent_s: float
    joined_until: float = 0.0
    """Until then its agent may still be starting: it has just joined."""
    away_until: float = 0.0
    """Until then it may be away: it was told to reboot."""
    is_switching: bool = False
    """It may reboot for its host profile before anyone reads that it is going to."""
    alive_at: float | None = None
    """When its host gave a sign of life last while its agent was of no use."""
    is_leaving: bool = False
    """Its host said that it was about to go down."""


@dataclass(frozen=True, slots=True)
class Graces:
    """How long silence is excused, in seconds."""

    reboot_s: float
    agent_s: float
    alive_s: float
    """For how long a host lives after it was seen to."""


def excuse(signs: Signs, now: float, graces: Graces) -> Held | None:
    """Return why a machine that does not answer is not taken for down, and for how long.

    An agent that is killed, upgraded, restarted or without computing time leaves its tasks
    running; moving them would be the only harm done (P1). A host that said it goes down ended them:
    an agent that refuses connections after that is no sign that they run.
    """
    if now < signs.joined_until:
        return Held("it has just joined, its agent may be starting", signs.joined_until - now)
    if now < signs.away_until:
        return Held("it was told to reboot", signs.away_until - now)
    if signs.is_switching and signs.silent_s < graces.reboot_s:
        left_s = graces.reboot_s - signs.silent_s
        return Held("it may be rebooting for its host profile", left_s)
    is_alive = signs.alive_at is not None and now - signs.alive_at < graces.alive_s
    if is_alive and not signs.is_leaving and signs.silent_s < graces.agent_s:
        return Held(
            "its host lives, only its agent is of no use: its tasks most likely run",
            graces.agent_s - signs.silent_s,
        )
    return None
