"""Handlers of the rows about a store that was put back from a copy."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.restored import Restored, RestoredView
from control_plane.scheduler.restored import RestoredStore
from wire.peers import principal
from wire.server import Call


class RestoredHandlers:
    """Part of the front end."""

    def __init__(self, restored: RestoredStore) -> None:
        """Take who knows."""
        self._restored = restored

    async def show_restored(self, _: Call) -> RestoredView:
        """Show how machines and copy differ."""
        return await self._restored.view()

    async def release_restored(self, call: Call) -> Restored:
        """Begin to command."""
        return await self._restored.release(principal(call.peer))

    async def let_task_go(self, call: Call) -> Ack:
        """Let a task be stopped."""
        self._restored.let_go(call.path["machine"], call.path["unknown"])
        return Ack(detail="it is stopped once the limit on stops lets it pass")
