"""Waits for the outcome of an operation on a task, also across a restart of the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from agent import api
from agent.tasks.core.gate import has_health_probe
from wire.errors import Busy, NotFound, Unreachable

if TYPE_CHECKING:
    from agent.client import AgentClient

T = TypeVar("T")
PATIENCE_S = 60.0
"""How long an agent may be unreachable during a wait; a restart takes seconds."""
RETRY_S = 0.5
EVENT_WAIT_S = 10.0
"""How long one request waits for a new event."""
ROLLBACK_S = 30.0
"""Time after a failed health gate until the host has begun to restore the old version."""
_ENDED = (api.TaskState.FAILED, api.TaskState.STOPPED)


class StatusWatch:
    """Polls one agent about its tasks; repeats requests while the agent is unreachable.

    All requests only read, so repeating them is safe.
    """

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self._after = 0

    async def task(self, name: str) -> api.TaskStatus:
        """Return the state of a task, or raise `NotFound`."""
        return await _with_retries(lambda: self._client.get_task(name))

    async def begin(self, name: str) -> api.TaskStatus | None:
        """Return the state of a task, None if there is none. Events from now on count as new."""
        self._after = (await self._client.get_events(0)).latest
        try:
            return await self.task(name)
        except NotFound:
            return None

    async def wait_for_event(self, wait_s: float = EVENT_WAIT_S) -> None:
        """Wait for a new event, at most `wait_s`."""
        asked = partial(self._client.get_events, self._after, wait_s=wait_s)
        self._after = (await _with_retries(asked)).latest

    async def wait_settled(self, name: str, before: api.TaskStatus | None = None) -> api.TaskStatus:
        """Return a task once it runs with known health, or has ended.

        With `before`, the state before a restart: not before the task has been restarted.
        """
        while True:
            status = await self.task(name)
            if before is None or not _is_unchanged(status, before):
                if status.state in (*_ENDED, api.TaskState.BACKOFF):
                    return status
                if status.state is api.TaskState.RUNNING and status.health != api.Health.UNKNOWN:
                    return status
            await self.wait_for_event()

    async def wait_for_gate(
        self, name: str, spec: api.TaskSpec, status: api.TaskStatus, *, first: bool
    ) -> tuple[api.TaskStatus, bool]:
        """Return a task once its health gate is decided, and whether it passed.

        If it failed, the host has restored the old version. A `first` version has no older one, so
        its state at the end of the time decides.
        """
        began = status.invocation_id
        until = time.monotonic() + (spec.life.health_gate_s or 0.0)
        while status.generation == spec.generation:
            healthy = status.state is api.TaskState.RUNNING and status.health is api.Health.HEALTHY
            left = until - time.monotonic()
            if healthy and (
                has_health_probe(spec) or (left <= 0 and status.invocation_id == began)
            ):
                return status, True
            if left <= (0 if first else -ROLLBACK_S) or (first and status.state in _ENDED):
                return status, False
            await self.wait_for_event(min(left, EVENT_WAIT_S) if left > 0 else RETRY_S)
            status = await self.task(name)
        return await self.wait_settled(name), False

    async def wait_removed(self, name: str, generation: int) -> str:
        """Wait until a stopped task is removed; return the outcome as text."""
        while True:
            try:
                now = await self.task(name)
            except NotFound:
                return "gone"
            if now.generation != generation:
                return (
                    f"stopped, and then requested again by its owner (generation {now.generation})"
                )
            await self.wait_for_event()


async def _with_retries(ask: Callable[[], Awaitable[T]]) -> T:
    late = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask()
        except (Unreachable, Busy):
            if time.monotonic() >= late:
                raise
            await asyncio.sleep(RETRY_S)


def _is_unchanged(status: api.TaskStatus, before: api.TaskStatus) -> bool:
    """Return whether a requested restart has not begun."""
    same = status.invocation_id == before.invocation_id
    return same and status.state in (before.state, api.TaskState.STOPPING)


def is_as_requested(status: api.TaskStatus) -> bool:
    """Return whether a task runs and is not unhealthy, or has ended with success."""
    if status.state is api.TaskState.STOPPED and status.last_exit is not None:
        return status.last_exit.result == "success"
    return status.state is api.TaskState.RUNNING and status.health is not api.Health.UNHEALTHY
