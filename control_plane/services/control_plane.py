"""The whole control plane in one process: what the front end calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from agent.api import JoinRequest, Liveness
from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.api.jobs import Endpoints, Jobs, JobSpec, JobStatus
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.settings import SchedulerSettings
from control_plane.services.agents import AgentFactory, Clock, FindImage
from control_plane.store import Store


class ControlPlane:
    """Broker, portal, allocator, scheduler and the services around them.

    `async with` loads everything from an open store and runs the loops until it is left;
    leaving it touches no task. Methods raise `agent.errors` and `control_plane.errors`.
    """

    def __init__(
        self,
        store: Store,
        agents: AgentFactory,
        clock: Clock,
        settings: SchedulerSettings,
        find_image: FindImage,
    ) -> None:
        """Start nothing yet."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Load from the store and start the loops."""
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the loops; tasks on the machines run on."""
        raise NotImplementedError

    async def wait_failed(self) -> None:
        """Return never, or raise what broke a loop (then the process must end)."""
        raise NotImplementedError

    async def apply_job(self, spec: JobSpec, *, dry_run: bool = False) -> JobStatus:
        """Create a job or change what is wanted of it; all errors at once, or none applied."""
        raise NotImplementedError

    async def get_job(self, name: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        raise NotImplementedError

    async def list_jobs(self) -> Jobs:
        """Return all jobs, by name."""
        raise NotImplementedError

    async def stop_job(self, name: str) -> JobStatus:
        """Stop all tasks of a job; it disappears once they are gone."""
        raise NotImplementedError

    def job_logs(
        self,
        name: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now.

        `NotFound` is raised by the first `__anext__`, not by the call.
        """
        raise NotImplementedError

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the listed tasks of a job; waits up to `wait_s` for a revision > `after`."""
        raise NotImplementedError

    async def list_machines(self) -> Machines:
        """Return all machines, by name."""
        raise NotImplementedError

    async def get_machine(self, name: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        raise NotImplementedError

    async def joined(self, request: JoinRequest) -> MachineRecord:
        """Record a host whose identity was proved; again for one that is known."""
        raise NotImplementedError

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements, by name."""
        raise NotImplementedError

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it."""
        raise NotImplementedError

    async def delete_entitlement(self, name: str) -> None:
        """Remove an entitlement; `Conflict` while it has jobs."""
        raise NotImplementedError

    async def ready(self) -> Liveness:
        """Return whether everything is loaded and every loop runs."""
        raise NotImplementedError
