"""The part of an agent's API that the control plane calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agent import api
from agent.api.notices import HostNotices
from agent.usage import Usages
from control_plane.api.machines import MachineRecord
from wire.duplex import Duplex


class EventStream(Protocol):
    """The events of one machine, as its agent reports them; each answer is a sign of life."""

    @property
    def last_contact_at(self) -> float:
        """Return `Runtime.now()` of the last sign of life; it may be computed when asked."""

    async def next(self) -> api.Events:
        """Return new events, a loss of events, or another boot.

        An answer without events is possible and means nothing. Raises `TwineError` when the stream
        has ended: open another one. `Unreachable`: there was no answer; any other: the host is
        alive, and its agent's answer was unusable.
        """

    async def close(self) -> None:
        """Stop listening."""


class AgentApi(Protocol):
    """The part of `agent.client.AgentClient` that the control plane uses."""

    async def get_machine(self) -> api.MachineFacts:
        """Return what the machine has."""

    async def list_images(self) -> api.Images:
        """Return all images that are complete."""

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        """Make the agent fetch an image; returns when it is published."""

    async def list_tasks(self) -> api.Tasks:
        """Return all tasks of the machine."""

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        """Set the desired state of a task."""

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and tear it down."""

    def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield what the task wrote."""

    async def get_task(self, task_id: str) -> api.TaskStatus:
        """Return the observed state of a task, or raise `NotFound`."""

    async def restart_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and start it again, now."""

    async def get_usage(self) -> Usages:
        """Return what each task uses."""

    def open_exec(self, task_id: str, asked: dict[str, str]) -> AbstractAsyncContextManager[Duplex]:
        """Run a command inside a task; `asked` are the route's parameters."""

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        """Ask for a host profile."""

    async def put_notices(self, notices: HostNotices) -> HostNotices:
        """Set the notices for the tasks of the machine."""

    async def get_profile(self) -> api.ProfileStatus:
        """Return the profile the machine runs."""

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        """Return events after a sequence number."""

    def follow(self, after: int) -> EventStream:
        """Return the events after a sequence number, as they come."""

    async def close(self) -> None:
        """Close all connections."""


AgentFactory = Callable[[MachineRecord], AgentApi]
"""Return a client of a machine's agent; called again when the machine's address changes."""
