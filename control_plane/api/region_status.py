"""The state of a region's processes, and its problems."""

from __future__ import annotations

import msgspec

from control_plane.api.ownership import ShardLoad


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a control plane process, as it reports it."""

    role: str
    """`all`, `core`, or `shard-N`."""
    ok: bool = True
    """Whether it is ready; false also if it does not answer."""
    detail: str = ""
    """Why it is not ready, or what it holds back."""
    host: str = ""
    since: float | None = None
    """Since when it leads its role, in seconds since 1970; None: it never led."""
    term: int = 0
    """Number of its election (epoch)."""
    revision: int = 0
    """Revision of the store up to which it has read all changes."""
    lag: int = 0
    """Revisions of other writers that it had not read at the time of the request."""
    writes: int = 0
    """Transactions of the store since its start."""
    write_p50_s: float = 0.0
    """Median time until a transaction was on disk, over the last 1,000."""
    write_p99_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time since its start."""
    memory_bytes: int = 0
    """Resident memory (proc(5))."""
    machines: int = 0
    """Machines that it follows; the core follows free machines."""
    jobs: int = 0
    """Jobs of its shards."""
    tasks: int = 0
    """Tasks in the records of these jobs."""


class RegionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the region."""

    ok: bool
    """Whether `troubles` is empty."""
    troubles: list[str] = []
    """Problems, the most important first."""
    machines: dict[str, int] = {}
    """By state."""
    tasks: dict[str, int] = {}
    """By phase."""
    entitlements: int = 0
    processes: list[ProcessStatus] = []
    """The leader of each role, with its present or last known state."""
    shards: list[ShardLoad] = []
