"""Judges the silence of a machine: it is down, or it is too early for that verdict.

One machine that does not answer is down. Many of one part of the region at once suggest that the
part, or this process, is cut off: nothing of it moves until its delay is over or an operator
confirms it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.health.core.parts import Level, Part, looks_cut


@dataclass(frozen=True, slots=True)
class Brakes:
    """When silence counts, in seconds, and how much of it at once is suspicious."""

    down_after_s: float
    share: float
    """More of a part than this is suspicious."""
    delays_s: Mapping[Level, float]
    """How long machines of a suspicious part must have been silent."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a silent machine is not declared down yet."""

    reason: str
    left_s: float
    """Until it is, if nothing changes."""
    part: str = ""
    """The part that seems cut off; empty: it is about this machine alone."""


def verdict(rack: Part, silent_s: float, brakes: Brakes) -> Held | None:
    """Return what holds back a machine that was silent for `down_after_s`; None: it is down.

    If several parts seem cut off, the largest counts: its delay is the longest.
    """
    held: Part | None = None
    for part in rack.path:
        if silent_s < brakes.delays_s[part.level] and looks_cut(part, brakes.share):
            held = part
    if held is None:
        return None
    delay_s = brakes.delays_s[held.level]
    whose = "this control plane" if held.level is Level.REGION else f"the {held.level.value}"
    return Held(
        f"{held.lost} of {held.machines} machines of {held.level.value} {held.name} are silent"
        f" together, more than {brakes.share:.0%}: perhaps {whose} is cut off; nothing of it"
        f" moves until they have been silent for {delay_s:g} s",
        delay_s - silent_s,
        held.name,
    )


def is_restored(refusing: int, answered: int, followed: int, *, settled: bool) -> bool:
    """Return whether so many hosts refuse us for an older store that the whole process is in doubt.

    After a restore nearly all hosts have newer commands than the store. More than half must refuse,
    because a few hosts in other hands must not end a control plane. It is half of all `followed`
    hosts; once `settled`, half of the hosts that answered or refused.
    """
    return refusing * 2 > (refusing + answered if settled else followed)
