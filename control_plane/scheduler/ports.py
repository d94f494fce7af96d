"""Protocols of the services that the scheduler calls.

`roles.py` hands the services in. A service has these methods, in this process or in another.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allocation, Allowance, Request
from control_plane.allocator.core.spread import Repair, Targets
from control_plane.allocator.task_directory import PlacedTask
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.runtime.table import Table

T = TypeVar("T")


class Entitlements(Protocol):
    """Entitlements and their quotas: the portal."""

    @property
    def table(self) -> Table[EntitlementRecord]:
        """Return the records of all entitlements."""

    def specs(self) -> Mapping[str, EntitlementSpec]:
        """Return the specification of every entitlement."""

    def applying(self, name: str) -> AbstractContextManager[None]:
        """Keep an entitlement from being deleted while a job in it is written."""


class Directory(Protocol):
    """Which tasks are on which machine, by the jobs' records."""

    def tasks(self, machine: str) -> Mapping[str, PlacedTask]:
        """Return the tasks of a machine, including those that are leaving it."""

    def jobs(self, machine: str) -> set[str]:
        """Return the jobs of the tasks of a machine."""


class Queue(Protocol):
    """Jobs whose tasks found no room."""

    def is_due(self) -> bool:
        """Return whether there may be room for some of them now."""

    def take_due(self) -> Collection[str]:
        """Return the jobs for which there may be room, each once."""

    def is_outdated(self, job: str, gain: int) -> bool:
        """Return whether room may have appeared since a job's last answer."""

    def drop(self, job: str) -> None:
        """Forget a job."""


class Quotas(Protocol):
    """What pools may take from the free machines."""

    def allowance(self, request: Request) -> Allowance:
        """Return what the pool of a request may take for it."""


class Plans(Protocol):
    """The planning of allocations."""

    async def in_steps(self, work: Generator[None, None, T]) -> T:
        """Return the result of a plan; other actors run between its steps."""


class Places(Protocol):
    """Where tasks go: the allocator."""

    @property
    def index(self) -> RegionIndex:
        """Return the machines of the region and the claims on them."""

    @property
    def directory(self) -> Directory:
        """Return which tasks are where."""

    @property
    def waiting(self) -> Queue:
        """Return the jobs that wait for room."""

    @property
    def quotas(self) -> Quotas:
        """Return what pools may take."""

    @property
    def allocations(self) -> Plans:
        """Return the planning of allocations."""

    def pool_of(self, spec: JobSpec) -> str:
        """Return the entitlement on whose machines a job's tasks run."""

    def entitlement_of(self, spec: JobSpec) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""

    async def allocate(self, request: Request) -> Allocation:
        """Carry out a request; durable when this returns."""

    def known(self, request: Request) -> Allocation | None:
        """Return the last answer, if the request is the same and the answer still holds."""

    async def targets(self, request: Request) -> Targets:
        """Return where each task of a request would be; changes nothing."""

    async def repairs(self, request: Request, most: int = 1) -> tuple[Repair, ...]:
        """Return moves that make a job's spread more even; changes nothing."""

    async def take(self, machine: str, pool: str) -> bool:
        """Take a free machine for a pool ahead of its tasks; return whether that was done."""

    async def forget(self, job: str) -> None:
        """Give back everything that a job claims."""

    def unexpected_tasks(self, machine: str) -> list[str]:
        """Return this shard's tasks that run on a machine although no record places them there."""
