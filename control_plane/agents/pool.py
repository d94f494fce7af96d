"""Keeps one open client of an agent per machine."""

from __future__ import annotations

from control_plane.agents.protocol import AgentApi, AgentFactory
from control_plane.api.machines import MachineRecord


class AgentPool:
    """One open client per machine."""

    def __init__(self, factory: AgentFactory) -> None:
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

    async def drop(self, machine: str) -> None:
        """Close the connections to a machine that is gone or no longer trusted."""
        known = self._clients.pop(machine, None)
        if known is not None:
            await known[1].close()

    async def close(self) -> None:
        """Close all connections."""
        clients, self._clients = self._clients, {}
        for _, client in clients.values():
            await client.close()
