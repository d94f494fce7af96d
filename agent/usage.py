"""Resource usage of tasks, as types of the agent's API. Seconds and bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from agent.api import Bytes, Count, Id, Moment, Share


class TaskUsage(Struct, frozen=True, kw_only=True):
    """Resource usage of a task. Counters begin at the start of its unit."""

    task_id: Id
    cpu_s: Moment = 0.0
    """CPU time in seconds."""
    throttled_s: Moment = 0.0
    """Time in which its CPU limit prevented it from running."""
    memory_bytes: Bytes = 0
    memory_peak_bytes: Bytes = 0
    oom_kills: Count = 0
    read_bytes: Bytes = 0
    written_bytes: Bytes = 0
    network_bytes: Bytes | None = None
    """Bytes sent and received over its private network; None: it uses the host's network."""
    processes: Count = 0
    """Processes and threads."""
    cpu_pressure: Share = 0.0
    """Share of the last 10 s (0 to 1) in which at least one of its threads waited for CPU."""
    memory_pressure: Share = 0.0
    io_pressure: Share = 0.0


class Usages(Struct, frozen=True, kw_only=True):
    """Resource usage of all tasks of a machine that have processes."""

    at_boot_s: Moment
    """When the usage was read, in seconds since boot; two readings give rates."""
    tasks: Annotated[list[TaskUsage], Meta(max_length=100_000)]
    energy_j: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    """Energy used by the processors in joules, from counters of RAPL that wrap around. Two readings
    give watts. None: the host does not report it (virtual machines do not)."""
