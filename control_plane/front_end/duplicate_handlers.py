"""Handlers of the rows about hosts that have the identity of another one."""

from __future__ import annotations

from agent.api import Ack
from agent.api.presence import PresenceAnswer
from control_plane.api.duplicates import Duplicates
from control_plane.identity.duplicates import DuplicateHosts
from wire.peers import principal
from wire.server import Call


class DuplicateHandlers:
    """Part of the front end."""

    def __init__(self, duplicates: DuplicateHosts) -> None:
        """Take who finds them."""
        self._duplicates = duplicates

    async def show_presence(self, call: Call) -> PresenceAnswer:
        """Say whether another host has the identity of the one that asks."""
        return await self._duplicates.check(principal(call.peer), call.body, call.peer.address)

    async def list_duplicates(self, _: Call) -> Duplicates:
        """Return the clones that were found."""
        return self._duplicates.all()

    async def forget_duplicate(self, call: Call) -> Ack:
        """Have a machine's hosts checked again."""
        await self._duplicates.forget(call.path["machine"])
        return Ack(detail="they are checked again")
