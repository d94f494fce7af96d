"""The front end's handlers about single tasks."""

from __future__ import annotations

from control_plane.api.tasks import HostDescription, TaskDescription
from control_plane.front_end.handlers import PlaneHandlers
from wire.duplex import Talk
from wire.errors import InvalidInput
from wire.server import Call


class TaskHandlers(PlaneHandlers):
    """A handler for each row of `api.task_routes`."""

    async def describe_task(self, call: Call) -> TaskDescription:
        """Show a task."""
        return await self._plane.task_service.describe(call.path["job"], index_of(call))

    async def describe_host(self, call: Call) -> HostDescription:
        """Show an agent's report of its host."""
        return await self._plane.task_service.describe_host(call.path["machine"])

    async def exec_task(self, call: Call) -> Talk:
        """Run a command inside a task."""
        return await self._plane.task_service.inside(call.path["job"], index_of(call), call.query)


def index_of(call: Call) -> int:
    """Return the index of a task in a path, or refuse an invalid one."""
    text = call.path["index"]
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise InvalidInput(f"{text!r} is not an index of a task", hint="0, 1, 2, …")
    return int(text)
