"""Decides whether a silent machine is down, or whether a verdict must wait.

One machine that does not answer is down. Many silent machines in one part of the region suggest
that the part, or this process, is cut off. Then no task of that part moves until its delay is over
or an operator confirms that the machines are down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.health.core.parts import Level, Part, seems_cut_off


@dataclass(frozen=True, slots=True)
class Brakes:
    """Which share of silent machines makes a part suspicious, and how long verdicts then wait."""

    share: float
    """A part may be cut off if more than this share of its machines is silent."""
    delays_s: Mapping[Level, float]
    """How long machines of a suspicious part must have been silent."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a silent machine is not declared down yet."""

    reason: str
    left_s: float
    """Seconds until it is declared down, if nothing changes."""
    part: str = ""
    """The part that seems cut off; empty if the reason concerns this machine alone."""


def verdict(rack: Part, silent_s: float, brakes: Brakes) -> Held | None:
    """Return why a machine that was silent for too long is held back; None if it is down.

    If several parts seem cut off, the largest counts: its delay is the longest.
    """
    held: Part | None = None
    for part in rack.path:
        if silent_s < brakes.delays_s[part.level] and seems_cut_off(part, brakes.share):
            held = part
    if held is None:
        return None
    delay_s = brakes.delays_s[held.level]
    whose = "this control plane" if held.level is Level.REGION else f"the {held.level.value}"
    return Held(
        f"{held.lost} of {held.machines} machines of {held.level.value} {held.name} are silent "
        f"together, more than {brakes.share:.0%}: perhaps {whose} is cut off; its tasks "
        f"stay until the machines have been silent for {delay_s:g} s",
        delay_s - silent_s,
        held.name,
    )


def is_restored(refusing: int, answered: int, followed: int, *, settled: bool) -> bool:
    """Return whether the store must be an old copy, because most hosts refuse it as too old.

    After a restore nearly all hosts have newer commands than the store. More than half must refuse:
    a few compromised hosts must not end a control plane. Before `settled`, that is half of all
    `followed` hosts; afterwards, half of the hosts that answered or refused.
    """
    return refusing * 2 > (refusing + answered if settled else followed)
