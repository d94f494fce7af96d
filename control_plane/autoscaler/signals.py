"""Measures the load of jobs from the usage of their tasks at the front end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from agent.usage import TaskUsage
from control_plane.api.autoscale import Autoscale, LoadSignal
from control_plane.api.jobs import JobStatus
from control_plane.api.tasks import TaskDescription
from control_plane.autoscaler.core.observing import LoadReading, capacity_of, tasks_to_read
from control_plane.runtime.runtime import Runtime
from wire.errors import TwineError

AT_ONCE = 16
"""Concurrent calls to the front end."""
RATE_MIN_S, RATE_MAX_S = 10.0, 600.0
"""Shortest and longest time between the two readings that give a rate."""
_ABOVE_LIMIT = 1.25
"""A rate above this multiple of a task's CPU limit is ignored as wrong."""


class LoadSource(Protocol):
    """Measures the load of jobs."""

    async def measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        """Return the present load of a job. A `TwineError` becomes the reason in `missing`."""
        ...

    async def past(self, status: JobStatus, policy: Autoscale) -> list[tuple[float, float]] | None:
        """Return the load of the last weeks, in order, for a new history; None: no answer."""
        ...

    def forget(self, jobs: set[str]) -> None:
        """Forget all jobs but these."""
        ...


@dataclass(slots=True)
class _Counter:
    """The last reading of a task's CPU time or network bytes, which only rise."""

    value: float
    at: float


@dataclass(slots=True)
class TaskUsageSource:
    """Reads CPU, memory and network of tasks from their agents, through the front end.

    In a job with many tasks only `SAMPLE` are read; their mean counts for all healthy tasks.
    """

    runtime: Runtime
    describe: Callable[[str, int], Awaitable[TaskDescription]]
    """`ControlPlaneClient.describe_task`."""
    _counters: dict[str, tuple[LoadSignal, dict[int, _Counter]]] = field(default_factory=dict)
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def past(self, status: JobStatus, policy: Autoscale) -> list[tuple[float, float]]:
        """Return nothing: agents keep no history."""
        del status, policy
        return []

    def forget(self, jobs: set[str]) -> None:
        """Forget the readings of all jobs but these."""
        self._counters = {job: read for job, read in self._counters.items() if job in jobs}

    async def measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        """Return the load of a job by the usage of its tasks."""
        record, at = status.record, self.runtime.date()
        signal, counters = self._counters.get(record.name, (policy.signal, {}))
        if signal is not policy.signal:
            counters = {}
        chosen = tasks_to_read(record, counters)
        if not chosen:
            return LoadReading(missing="no task runs")
        read = await asyncio.gather(*(self._read(record.name, index) for index in chosen))
        rates, failed, fresh = list[float](), "", dict[int, _Counter]()
        largest_rate = math.inf
        if policy.signal is LoadSignal.CPU:
            largest_rate = capacity_of(record.spec, LoadSignal.CPU) * _ABOVE_LIMIT or math.inf
        for index, (described, now) in zip(chosen, read, strict=True):
            if isinstance(described, str):
                failed = described
            elif policy.signal is LoadSignal.MEMORY:
                rates += [float(described.usage.memory_bytes)] if described.usage else []
            elif (value := _counter_of(described.usage, policy.signal)) is not None:
                newer = _Counter(value, now)
                rate, fresh[index] = _rate(counters.get(index), newer)
                rates += [rate] if rate is not None and rate <= largest_rate else []
        self._counters[record.name] = policy.signal, fresh
        if 2 * len(rates) <= len(chosen) - 1 or not rates:
            why = failed or "rates need two readings"
            return LoadReading(missing=f"{len(rates)} of {len(chosen)} tasks were read: {why}")
        healthy = max(status.healthy, 1)
        return LoadReading(load=sum(rates) / len(rates) * healthy, at=at)

    async def _read(self, job: str, index: int) -> tuple[TaskDescription | str, float]:
        async with self._gate:
            try:
                return await self.describe(job, index), self.runtime.now()
            except TwineError as e:
                return str(e), 0.0


def _counter_of(usage: TaskUsage | None, signal: LoadSignal) -> float | None:
    """Return the counter whose rate is the signal; None: it was not read."""
    if usage is None:
        return None
    if signal is LoadSignal.NETWORK:
        return None if usage.network_bytes is None else float(usage.network_bytes)
    return usage.cpu_s


def _rate(before: _Counter | None, newer: _Counter) -> tuple[float | None, _Counter]:
    """Return the rate between two readings, and the reading to compare the next one with.

    There is no rate for a first reading, for a first one after a restart (the counter begins
    again), and for readings that are too far apart. Of two readings that are too close, the earlier
    one is compared with the next.
    """
    if before is None or newer.value < before.value or newer.at - before.at > RATE_MAX_S:
        return None, newer
    if newer.at - before.at < RATE_MIN_S:
        return None, before
    return (newer.value - before.value) / (newer.at - before.at), newer
