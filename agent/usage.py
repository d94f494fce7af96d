"""What tasks use, as it crosses the agent's wire. Seconds and bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from agent.api import Bytes, Count, Id, Moment, Share


class TaskUsage(Struct, frozen=True, kw_only=True):
    """What a task uses. Counters run since its unit was started."""

    task_id: Id
    cpu_s: Moment = 0.0
    """CPU time in seconds."""
    throttled_s: Moment = 0.0
    """For how long its CPU limit kept it from running."""
    memory_bytes: Bytes = 0
    memory_peak_bytes: Bytes = 0
    oom_kills: Count = 0
    read_bytes: Bytes = 0
    written_bytes: Bytes = 0
    network_bytes: Bytes | None = None
    """Sent and received over its private network; None: it has the host's."""
    processes: Count = 0
    """Processes and threads."""
    cpu_pressure: Share = 0.0
    """Share of the last 10 s (0 to 1) in which some of it waited for CPU."""
    memory_pressure: Share = 0.0
    io_pressure: Share = 0.0


class Usages(Struct, frozen=True, kw_only=True):
    """What all tasks of a machine use that have processes."""

    at_boot_s: Moment
    """When this was read, in seconds since boot; two readings give rates."""
    tasks: Annotated[list[TaskUsage], Meta(max_length=100_000)]
    energy_j: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    """Joules that the processors drew, by RAPL's counters, which begin again at some value; two
    readings give watts. None: the host does not say (guests do not)."""
