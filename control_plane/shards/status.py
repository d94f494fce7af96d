"""Reports the status of each process of a region, and the problems of the region."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from agent.api import Liveness
from control_plane.api.limits import LimitView
from control_plane.api.machines import MachineState
from control_plane.api.ownership import RoleProcess, ShardLoad
from control_plane.api.region_status import ProcessStatus
from control_plane.shards.processes import OwnRole, RoleLeaders
from control_plane.store import Store

_SLOW_WRITE_S = 0.5
"""A store with a slower P50 of writes is reported: some ten times what etcd's own
documentation calls slow for a disk (`wal_fsync` above 10 ms, P99), with round trips."""
_BEHIND = 1000
"""A process that is more revisions behind is reported."""
_STATM = Path("/proc/self/statm")


def own_status(
    role: OwnRole,
    state: Liveness,
    store: Store,
    processes: RoleLeaders | None,
    loads: Sequence[ShardLoad],
    followed: int,
) -> ProcessStatus:
    """Return the report of this process; `followed` is the number of machines that it follows."""
    leads = processes.own_record() if processes is not None else None
    following = processes.following if processes is not None else None
    newest = store.revision()
    at = following.at if following is not None else newest
    own = [load for load in loads if role.runs(load.shard)]
    return ProcessStatus(
        role=role.name,
        ok=state.ok,
        detail=state.detail,
        host=leads.host if leads is not None else os.uname().nodename,
        since=leads.since if leads is not None else None,
        term=store.epoch(),
        revision=at,
        lag=max(0, newest - at),
        writes=store.times.count,
        write_p50_s=store.times.percentile(0.5),
        write_p99_s=store.times.percentile(0.99),
        cpu_s=time.process_time(),
        memory_bytes=_resident_bytes(),
        machines=followed,
        jobs=sum(load.jobs for load in own),
        tasks=sum(load.tasks for load in own),
    )


def unavailable_status(
    shard: int, why: str, known: RoleProcess | None, load: ShardLoad
) -> ProcessStatus:
    """Return the status of a shard's process that does not answer."""
    status = ProcessStatus(
        role=f"shard-{shard}", ok=False, detail=why, jobs=load.jobs, tasks=load.tasks
    )
    if known is None:
        return status
    return replace(status, host=known.host, since=known.since, term=known.epoch)


def with_lag(statuses: Sequence[ProcessStatus], newest: int) -> list[ProcessStatus]:
    """Return the statuses with each lag measured against the newest revision of any process."""
    newest = max([newest, *(status.revision for status in statuses)])
    return [
        replace(status, lag=max(status.lag, newest - status.revision)) if status.ok else status
        for status in statuses
    ]


def problems_of(
    processes: Sequence[ProcessStatus],
    shards: Sequence[ShardLoad],
    machines: Mapping[str, int],
    limits: Sequence[LimitView],
    held_back: int,
) -> list[str]:
    """Return the problems of a region as sentences, the most important first.

    A silent shard without entitlements is not a problem: it was drained, and ended.
    """
    empty = {f"shard-{load.shard}" for load in shards if not (load.entitlements or load.moving)}
    problems = []
    for process in processes:
        if not process.ok and process.role not in empty:
            problems.append(f"{process.role}: {process.detail}")
    problems += [
        f"{process.role}: {process.detail}"
        for process in processes
        if process.ok and process.detail
    ]
    for process in processes:
        if process.ok and process.write_p50_s > _SLOW_WRITE_S:
            problems.append(
                f"{process.role}: the store takes {process.write_p50_s:.1f} s for a write (P50)"
            )
        if process.ok and process.lag > _BEHIND:
            problems.append(f"{process.role}: is {process.lag} revisions behind the store")
    moving = sorted({name for load in shards for name in load.moving})
    problems += [f"entitlement {name} is moving to another shard" for name in moving]
    not_up = {state: n for state, n in machines.items() if n and state != MachineState.UP.value}
    problems += [f"{n} machines are {state}" for state, n in sorted(not_up.items())]
    if held_back:
        problems.append(f"{held_back} machines are silent and their state is not decided yet")
    problems += [f"limit {view.name.value}: {view.reason}" for view in limits if view.reason]
    return problems


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
