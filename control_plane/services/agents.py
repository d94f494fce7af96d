"""What the control plane asks of an agent, and how it comes by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from agent import api
from control_plane.api.machines import MachineRecord

Clock = Callable[[], float]
"""Seconds since 1970; `time.time`, or a virtual clock."""
FindImage = Callable[[str], Awaitable[api.ImageInfo | None]]
"""Return what the image store knows of a digest, None if it has no such image."""


class AgentApi(Protocol):
    """The part of `agent.client.AgentClient` that the control plane uses."""

    async def get_machine(self) -> api.MachineFacts:
        """Return what the machine has."""
        ...

    async def list_images(self) -> api.Images:
        """Return all images that are complete."""
        ...

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        """Let the agent fetch an image; returns when it is published."""
        ...

    async def list_tasks(self) -> api.Tasks:
        """Return all tasks of the machine."""
        ...

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        """Set the desired state of a task."""
        ...

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and tear it down."""
        ...

    def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield what the task wrote."""
        ...

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        """Ask for a host profile."""
        ...

    async def get_profile(self) -> api.ProfileStatus:
        """Return the profile the machine runs."""
        ...

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        """Return events after a sequence number."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


AgentFactory = Callable[[MachineRecord], AgentApi]
"""Return a client of a machine's agent; called again when the machine's address changes."""


class AgentPool:
    """One open client per machine."""

    def __init__(self, factory: AgentFactory) -> None:
        """Open nothing yet."""
        self._factory = factory
        self._clients: dict[str, tuple[str, AgentApi]] = {}

    async def get(self, record: MachineRecord) -> AgentApi:
        """Return the client of a machine, a new one if its address changed."""
        known = self._clients.get(record.machine)
        if known is not None and known[0] == record.address:
            return known[1]
        client = self._factory(record)
        self._clients[record.machine] = (record.address, client)
        if known is not None:
            await known[1].close()
        return client

    async def close(self) -> None:
        """Close all connections."""
        clients, self._clients = self._clients, {}
        for _, client in clients.values():
            await client.close()
