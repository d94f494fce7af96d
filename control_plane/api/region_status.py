"""The state of a region's processes, and its troubles."""

from __future__ import annotations

import msgspec

from control_plane.api.ownership import ShardLoad


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a control plane process, as it reports it."""

    role: str
    """`all`, `core`, or `shard-N`."""
    ok: bool = True
    """Whether it is ready; false also where it does not answer."""
    detail: str = ""
    """Why it is not ready, or what it holds back."""
    host: str = ""
    since: float | None = None
    """Since when it leads its role, in seconds since 1970; None: it never led."""
    term: int = 0
    """Epoch of its election."""
    revision: int = 0
    """Revision of the store up to which it has read everything."""
    lag: int = 0
    """Revisions of other writers that this process had not read yet, when it was asked."""
    writes: int = 0
    """Transactions that the store answered since it started."""
    write_p50_s: float = 0.0
    """Of the last 1,000 transactions: median time until the store had it on disk."""
    write_p99_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time since it started."""
    memory_bytes: int = 0
    """Resident memory (proc(5))."""
    machines: int = 0
    """Machines that it follows; free ones are the core's."""
    jobs: int = 0
    """Jobs of its shards."""
    tasks: int = 0
    """Tasks that the records of these jobs have."""


class RegionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The region on one page."""

    ok: bool
    """Nothing is in `troubles`."""
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
