"""A host that is short: how many starts at once, and which task goes (docs/resources.md).

Pure. Pressure is the kernel's own (PSI): the share of the last ten seconds in which something
waited. `host/pressure.py` reads it and does what is decided here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from wire.units import about_size

SHORT = 0.4
"""Share of time in which no task at all got on for want of memory: the host mostly waits."""
LOOKS = 3
"""Checks in a row that find memory short before a task is evicted; a peak passes by itself."""
CALM = 0.05
"""Below this pressure a host is calm. From there 4.6 s without progress raise the average over ten
seconds to `SHORT`."""
PAUSE_S = 30.0
"""Seconds between two evictions: an end takes time, and PSI averages the last ten seconds."""


FULL = 0.95
"""A task with so much of what it may have is at its limit: the kernel reclaims below that, too."""
WAITING = 0.1
"""Share of time from which on a task counts among those that wait for memory."""
FULL_S = 20.0
"""Seconds that a task counts as at its limit after it was: the kernel's OOM killer frees memory at
once, while PSI averages the last ten seconds."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Pressure of a host, 0 to 1."""

    agent: float = 0.0
    """Share of time in which something of the agent's slice waited for a CPU."""
    tasks: float = 0.0
    """Share of time in which all that tasks run waited for memory, and nothing got on."""


def is_calm(waits: Waits) -> bool:
    """Return whether nothing is to be decided on this host for some seconds."""
    return waits.agent < CALM and waits.tasks < CALM


def starts_at_once(cpus: int, waits: Waits) -> int:
    """Return how many tasks may be starting at the same time; never none.

    What counts is the agent's own waiting, not how busy tasks are: a fully loaded host must still
    start the tasks that it is given.
    """
    if waits.agent >= 0.5 or waits.tasks >= 0.2:
        return 1
    if waits.agent >= 0.2:
        return 2
    return max(4, 2 * cpus)


@dataclass(frozen=True, slots=True)
class Load:
    """What a running task has of its host's memory."""

    task_id: str
    entitlement: str
    memory_bytes: int
    kept_bytes: int = 0
    """What it was promised to keep (`memory_min_bytes`, `memory_low_bytes`)."""
    started_at: float = 0.0
    limit_bytes: int = 0
    """What it may have (`memory_max_bytes`, `memory_high_bytes`); 0: not known."""
    waits: float = 0.0
    """Share of time in which something of it waited for memory."""

    @property
    def is_full(self) -> bool:
        """Return whether it has what it may have."""
        return 0 < self.limit_bytes * FULL <= self.memory_bytes

    @property
    def over_bytes(self) -> int:
        """Return what it has beyond what it was promised."""
        return max(0, self.memory_bytes - self.kept_bytes)


@dataclass(frozen=True, slots=True)
class ShortageWatch:
    """What was seen of a shortage so far."""

    looks: int = 0
    evicted_s: float | None = None
    """When a task last had to go, in seconds since boot."""


def watched(watch: ShortageWatch, waits: Waits, now_s: float) -> tuple[ShortageWatch, bool]:
    """Return the watch after one more look, and whether a task has to go now."""
    if waits.tasks < SHORT:
        return ShortageWatch(0, watch.evicted_s), False
    if watch.evicted_s is not None and now_s - watch.evicted_s < PAUSE_S:
        return ShortageWatch(0, watch.evicted_s), False
    looks = watch.looks + 1
    return (
        (ShortageWatch(0, now_s), True)
        if looks >= LOOKS
        else (ShortageWatch(looks, watch.evicted_s), False)
    )


def seen_full(full: Mapping[str, float], loads: Iterable[Load], now_s: float) -> dict[str, float]:
    """Return when tasks were last at their limits, in seconds since boot, after one more look."""
    lately = {name: at for name, at in full.items() if now_s - at < FULL_S}
    return lately | {load.task_id: now_s for load in loads if load.is_full}


def at_own_limits(loads: Iterable[Load], full: Collection[str]) -> list[str]:
    """Return the tasks that alone wait for memory, each at its own limit; empty: the host is short.

    To the kernel a slice waits whose tasks do. Where only tasks at their own limits wait,
    room on the host would help none of them.
    """
    waiting = [load.task_id for load in loads if load.waits >= WAITING]
    return sorted(waiting) if all(name in full for name in waiting) else []


def victim(loads: Iterable[Load]) -> Load | None:
    """Return the task that goes: of the slice that has most beyond its promises, the task that has.

    Between equals the one that started last: it loses the least. None: all are within what they
    were promised, and it is not for this to break promises.
    """
    over: dict[str, int] = {}
    listed = [load for load in loads if load.over_bytes > 0]
    for load in listed:
        over[load.entitlement] = over.get(load.entitlement, 0) + load.over_bytes
    return max(
        listed,
        key=lambda load: (
            over[load.entitlement],
            load.entitlement,
            load.over_bytes,
            load.started_at,
            load.task_id,
        ),
        default=None,
    )


def why_evicted(load: Load, waits: Waits) -> str:
    """Return the reason of an eviction, for the task's owner."""
    kept = f" ({about_size(load.kept_bytes)} of it promised)" if load.kept_bytes else ""
    return (
        f"it was evicted: for {waits.tasks:.0%} of the last 10 s no task of the host got on for"
        f" want of memory, and it had the most, {about_size(load.memory_bytes)}{kept}, of the"
        f" entitlement that has the most ({load.entitlement})"
    )
