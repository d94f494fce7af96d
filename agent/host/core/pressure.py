"""Decides under pressure how many tasks may start, and which is evicted (docs/resources.md).

Pure. Pressure is the kernel's measure (PSI): the share of the last ten seconds in which a process
waited. `host/pressure.py` reads it and carries out the decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from wire.units import about_size

SHORT = 0.4
"""Memory is short when no task could run for lack of memory for this share of time."""
CHECKS_TO_EVICT = 3
"""Number of checks in a row that must find memory short before a task is evicted."""
LOW_PRESSURE = 0.05
"""Below this pressure a host is calm. From there the ten-second average needs 4.6 s without
progress to reach `SHORT`."""
PAUSE_S = 30.0
"""Seconds between two evictions: an end takes time, and PSI averages the last ten seconds."""


FULL = 0.95
"""A task is at its memory limit if it uses this share: the kernel reclaims before it uses all."""
WAITING = 0.1
"""A task waits for memory if its memory pressure is at least this."""
FULL_S = 20.0
"""A task that was at its limit counts as such for this time. The OOM killer frees memory at once,
but PSI averages the last ten seconds."""


@dataclass(frozen=True, slots=True)
class HostPressure:
    """Pressure on a host, as shares of time from 0 to 1."""

    agent: float = 0.0
    """Share of time in which some process of the agent's slice waited for a CPU."""
    tasks: float = 0.0
    """Share of time in which all processes of tasks waited for memory."""


def is_low(waits: HostPressure) -> bool:
    """Return whether this host needs no decision for some seconds."""
    return waits.agent < LOW_PRESSURE and waits.tasks < LOW_PRESSURE


def starts_at_once(cpus: int, waits: HostPressure) -> int:
    """Return how many tasks may start at the same time; at least 1.

    Only the waiting of the agent counts, not the load of tasks: a fully loaded host must still
    start its tasks.
    """
    if waits.agent >= 0.5 or waits.tasks >= 0.2:
        return 1
    if waits.agent >= 0.2:
        return 2
    return max(4, 2 * cpus)


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """The memory of a running task."""

    task_id: str
    entitlement: str
    memory_bytes: int
    protected_bytes: int = 0
    """Its memory promise (`memory_min_bytes`, `memory_low_bytes`)."""
    started_at: float = 0.0
    limit_bytes: int = 0
    """Its limit (`memory_max_bytes`, `memory_high_bytes`); 0: unknown."""
    waits: float = 0.0
    """Share of time in which some process of it waited for memory."""

    @property
    def is_full(self) -> bool:
        """Return whether it is at its limit."""
        return 0 < self.limit_bytes * FULL <= self.memory_bytes

    @property
    def over_bytes(self) -> int:
        """Return its memory beyond its promise."""
        return max(0, self.memory_bytes - self.protected_bytes)


@dataclass(frozen=True, slots=True)
class ShortageWatch:
    """State of an observed shortage."""

    checks: int = 0
    evicted_s: float | None = None
    """When a task was last evicted, in seconds since boot."""


def watched(watch: ShortageWatch, waits: HostPressure, now_s: float) -> tuple[ShortageWatch, bool]:
    """Return the state after one more check, and whether a task must be evicted now."""
    pauses = watch.evicted_s is not None and now_s - watch.evicted_s < PAUSE_S
    if waits.tasks < SHORT or pauses:
        return ShortageWatch(0, watch.evicted_s), False
    if watch.checks + 1 >= CHECKS_TO_EVICT:
        return ShortageWatch(0, now_s), True
    return ShortageWatch(watch.checks + 1, watch.evicted_s), False


def recently_full(
    full: Mapping[str, float], loads: Iterable[TaskMemory], now_s: float
) -> dict[str, float]:
    """Return when tasks were last at their limits, in seconds since boot, after one more check."""
    lately = {name: at for name, at in full.items() if now_s - at < FULL_S}
    return lately | {load.task_id: now_s for load in loads if load.is_full}


def at_own_limits(loads: Iterable[TaskMemory], full: Collection[str]) -> list[str]:
    """Return the waiting tasks if all of them are at their own limits; empty: the host is short.

    The kernel counts a slice as waiting if its tasks wait. More free memory on the host does not
    help tasks that wait at their own limits.
    """
    waiting = [load.task_id for load in loads if load.waits >= WAITING]
    return sorted(waiting) if all(name in full for name in waiting) else []


def victim(loads: Iterable[TaskMemory]) -> TaskMemory | None:
    """Return the task to evict, None if all tasks are within their promises.

    In the entitlement with most memory beyond its promises it is the task with most. Of equal
    tasks the one that started last is chosen, because it loses the least work.
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


def why_evicted(load: TaskMemory, waits: HostPressure) -> str:
    """Return the reason of an eviction, for the task's owner."""
    kept = f" ({about_size(load.protected_bytes)} of it promised)" if load.protected_bytes else ""
    return (
        f"it was evicted: for {waits.tasks:.0%} of the last 10 s all tasks of the host "
        "were stalled by lack of memory, and it used the most, "
        f"{about_size(load.memory_bytes)}{kept}, in the entitlement that used the most "
        f"({load.entitlement})"
    )
