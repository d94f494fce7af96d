"""Reads from a job's status what an evaluation needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from control_plane.api.autoscale import Autoscale, LoadSignal
from control_plane.api.jobs import JobRecord, JobSpec, JobStatus, TaskPhase

SAMPLE = 16
"""Tasks of a job whose usage is read. The standard error of the mean of 16 is a quarter of their
standard deviation."""


class LoadReading(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a job, or why it is unknown."""

    load: float | None = None
    at: float = 0.0
    """In seconds since 1970."""
    missing: str = ""
    latency: LoadReading | None = None
    """The latency of the job in seconds, in the same form; None: its policy has no latency."""


class JobObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The observation of a job at one time."""

    at: float
    """In seconds since 1970."""
    tasks: int
    """Its size: the wanted number of tasks."""
    healthy: int
    capacity: float
    """Load of one task at target 1: its cores, its bytes, or 1 for a query."""
    load: float | None = None
    """Of the whole job; None: not measured."""
    measured_at: float = 0.0
    missing: str = ""
    """Why there is no load."""
    latency: float | None = None
    """In seconds; None: not measured, or not asked for."""
    latency_at: float = 0.0
    latency_missing: str = ""
    push_reason: str = ""
    """Why its tasks are replaced now or soon; empty: none is."""
    msbs: int = 0
    """MSBs that its tasks are spread over; 0: not known."""


def policy_of(status: JobStatus) -> Autoscale | None:
    """Return the policy of a job; None: it has none, or the job is stopping."""
    return None if status.record.stopping else status.record.spec.autoscale


def capacity_of(spec: JobSpec, signal: LoadSignal) -> float:
    """Return the load of one task at target 1; 0 if the job has no such limit."""
    match signal:
        case LoadSignal.CPU:
            cores = spec.resources.exclusive_cpus or spec.limits.cpu_max_cores or spec.cpus
            return float(cores or 0.0)
        case LoadSignal.MEMORY:
            return float(spec.limits.memory_max_bytes or 0)
    return 1.0


def push_reason(record: JobRecord) -> str:
    """Return why tasks of a job are replaced now or soon; empty: none is."""
    rollout = record.rollout
    if rollout is not None and not rollout.done and rollout.version == record.version:
        if rollout.halted:
            return f"the update to version {record.version} failed"
        if rollout.returns_from:
            return f"the job is rolled back from version {rollout.returns_from}"
    if all(task.version == record.version for task in record.tasks):
        return ""
    if record.paused:
        return f"the update to version {record.version} is paused"
    return f"the update to version {record.version} is in progress"


def tasks_to_read(record: JobRecord, before: Iterable[int]) -> list[int]:
    """Return the indexes of the running tasks whose usage is read, at most `SAMPLE`.

    Tasks that were read `before` come first: a new one has no earlier reading, and so no rate.
    """
    running = [t.index for t in record.tasks if t.phase is TaskPhase.RUNNING and not t.operation]
    kept = sorted(set(before) & set(running))[:SAMPLE]
    others = [index for index in running if index not in kept]
    step = max(1, len(others) // SAMPLE)
    return sorted([*kept, *others[::step][: SAMPLE - len(kept)]])


def observation_of(
    status: JobStatus, policy: Autoscale, at: float, reading: LoadReading, msbs: int
) -> JobObservation:
    """Return the observation of a job."""
    record, latency = status.record, reading.latency or LoadReading()
    return JobObservation(
        at=at,
        tasks=record.spec.tasks,
        healthy=min(status.healthy, record.spec.tasks),
        capacity=capacity_of(record.spec, policy.signal),
        load=reading.load,
        measured_at=reading.at,
        missing=reading.missing,
        latency=latency.load,
        latency_at=latency.at,
        latency_missing=latency.missing,
        push_reason=push_reason(record),
        msbs=msbs,
    )


def msbs_of(record: JobRecord, places: Mapping[str, str]) -> int:
    """Return the number of MSBs that a job's tasks are assumed to be spread over; 0: unknown.

    `places` is machine → MSB of its entitlement. Counts the MSBs of the tasks, or all MSBs while no
    task is placed.
    """
    used = set[str]()
    for task in record.tasks:
        if task.placement is not None and task.placement.machine in places:
            used.add(places[task.placement.machine])
    return len(used) or len(set(places.values()))
