"""The stored records of the allocator: one per job, not one per task."""

from __future__ import annotations

import msgspec

from control_plane.api.policy import Neighbour, Property


class StoredDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The claim of each task of a group on its machine."""

    memory_bytes: int = 0
    cpus: float = 0.0
    rru: float = 0.0
    gpus: float = 0
    network_mbps: int = 0
    disk_bytes: int = 0
    ports: tuple[str, ...] = ()
    requires: tuple[tuple[Property, tuple[str, ...]], ...] = ()
    where: tuple[str, ...] = ()
    """Further requirements, as `api.requirements` writes them."""


class AllocationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machines of one job's tasks."""

    schema: int
    job: str
    pool: str
    """The entitlement whose machines they are."""
    machines: list[str]
    """Machine of each task; empty: the task has none."""
    demands: list[StoredDemand]
    demand_of: list[int] = []
    """For each task, its position in `demands`; left out if there is only one demand."""
    ports: dict[int, dict[str, int]] = {}
    apart_from: tuple[Neighbour, ...] = ()
    """The job's neighbour rules, for programs without a scheduler, which have no job record."""
    together_with: tuple[Neighbour, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Commits a transaction over several brokers. It is stored before any broker is called.

    A transaction without a stored decision is aborted (presumed abort).
    """

    schema: int
    transaction: str
    job: str
    machines: list[str]
