"""Long polls for the events of an agent, which distinguish a slow agent from a dead host."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from agent import api
from agent.client import AgentClient
from control_plane.runtime.runtime import Runtime
from wire.errors import Busy, Unreachable

MIN_POLL_S = 0.1
"""Pause between polls that brought nothing: no busy loop with an agent that does not wait."""
CONNECT_S = 2.0
"""How long a host may take to accept a connection: two attempts of TCP (RFC 6298: 1 s)."""
AcceptsConnections = Callable[[], Awaitable[bool]]
"""Returns whether the host's kernel accepts a connection."""
T = TypeVar("T")
GetEvents = Callable[[int, float], Awaitable[api.Events]]


@dataclass(frozen=True, slots=True)
class PollPatience:
    """How long an agent may take to answer, in seconds."""

    wait_s: float
    """It may hold a request for events for this long."""
    give_up_s: float
    """After this there will be no answer."""


class PolledEvents:
    """Implements `EventStream` with one long poll after the other."""

    def __init__(
        self,
        ask: GetEvents,
        accepts: AcceptsConnections,
        runtime: Runtime,
        after: int,
        patience: PollPatience,
    ) -> None:
        self.last_contact_at = float("-inf")
        self._get_events, self._accepts, self._runtime = ask, accepts, runtime
        self._after, self._patience = after, patience
        self._boot_id: str | None = None

    async def next(self) -> api.Events:
        """Return the first answer, then each that brings something; see `EventStream`."""
        while True:
            call = self._runtime.now()
            events = await self._poll()
            self.last_contact_at = self._runtime.now()
            boots, self._boot_id = (self._boot_id, events.boot_id), events.boot_id
            if events.lost or events.events or boots[0] != boots[1]:
                self._after = events.latest
                return events
            if self.last_contact_at - call < MIN_POLL_S:
                await self._runtime.sleep(MIN_POLL_S)

    async def close(self) -> None:
        """Do nothing: a poll that is cancelled ends its own connection."""

    async def _poll(self) -> api.Events:
        call = self._get_events(self._after, self._patience.wait_s)
        return await answer_within(
            call, "a request for events", self._patience.give_up_s, self._accepts
        )


async def answer_within(
    call: Awaitable[T], what: str, patience_s: float, accepts: AcceptsConnections
) -> T:
    """Return the answer of a call; without one raise `Busy` if the host is alive.

    Then its agent is starved of CPU or stuck, and its tasks most likely run.
    """
    try:
        async with asyncio.timeout(patience_s):
            return await call
    except TimeoutError:
        why = f"{what} is not answered within {patience_s:g} s"
        if await accepts():
            raise Busy(f"the host accepts connections, but {why}") from None
        raise Unreachable(why) from None


class PolledAgent(AgentClient):
    """Implements `AgentApi` by calls to an agent over the network."""

    def __init__(
        self, endpoint: str, tls: ssl.SSLContext | None, runtime: Runtime, patience: PollPatience
    ) -> None:
        super().__init__(endpoint, tls)
        self._runtime, self._patience = runtime, patience

    def follow(self, after: int) -> PolledEvents:
        """Return the agent's events after a sequence number, as they come."""
        accepts = self._accepts_connections
        return PolledEvents(self.get_events, accepts, self._runtime, after, self._patience)

    async def get_machine(self) -> api.MachineFacts:
        """Return what the machine has, or raise `Busy` for an agent that only is slow."""
        call, patience_s = super().get_machine(), self._patience.give_up_s
        return await answer_within(
            call, "a request for facts", patience_s, self._accepts_connections
        )

    async def _accepts_connections(self) -> bool:
        """Return whether the host's kernel accepts a connection for the agent."""
        place = urlsplit(self.endpoint)
        if place.hostname is None or place.port is None:
            return False  # a unix socket
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(place.hostname, place.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
