"""Waiting for what becomes of a task, also while its agent restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from agent import api
from agent.tasks.core.gate import is_asked
from wire.errors import Busy, NotFound, Unreachable

if TYPE_CHECKING:
    from agent.client import AgentClient

T = TypeVar("T")
PATIENCE_S = 60.0
"""How long an agent may be away in the midst of a wait: a restart takes seconds."""
AGAIN_S = 0.5
NEWS_S = 10.0
"""How long one question for news stays open."""
GO_BACK_S = 30.0
"""After the time of a gate is over: until the host has begun to bring the old version back."""
_ENDED = (api.TaskState.FAILED, api.TaskState.STOPPED)


class StatusWatch:
    """Polls one agent about its tasks; tries again where the agent is unreachable.

    It only reads, so nothing is done twice.
    """

    def __init__(self, client: AgentClient) -> None:
        """Follow events from the first request on."""
        self._client = client
        self._after = 0

    async def task(self, name: str) -> api.TaskStatus:
        """Return the state of a task, or raise `NotFound`."""
        return await _patiently(lambda: self._client.get_task(name))

    async def known(self, name: str) -> api.TaskStatus | None:
        """Return how a task is, None where there is none; what happens from now on is news."""
        self._after = (await self._client.get_events(0)).latest
        try:
            return await self.task(name)
        except NotFound:
            return None

    async def news(self, wait_s: float = NEWS_S) -> None:
        """Return once there is a new event, after `wait_s` at the latest."""
        asked = lambda: self._client.get_events(self._after, wait_s=wait_s)  # noqa: E731
        self._after = (await _patiently(asked)).latest

    async def verdict(self, name: str, before: api.TaskStatus | None = None) -> api.TaskStatus:
        """Return a task once it runs and its health is known, or it ended; `before`: once more."""
        while True:
            status = await self.task(name)
            if before is None or not _is_as(status, before):
                if status.state in (*_ENDED, api.TaskState.BACKOFF):
                    return status
                if status.state is api.TaskState.RUNNING and status.health != api.Health.UNKNOWN:
                    return status
            await self.news()

    async def through_gate(
        self, name: str, spec: api.TaskSpec, status: api.TaskStatus, *, first: bool
    ) -> tuple[api.TaskStatus, bool]:
        """Return a task once its health gate is decided, and whether it passed.

        Where it did not, its host has brought the old version back. A `first` version has none
        behind it: what it is when the time is over is the verdict.
        """
        began = status.invocation_id
        until = time.monotonic() + (spec.life.health_gate_s or 0.0)
        while status.generation == spec.generation:
            healthy = status.state is api.TaskState.RUNNING and status.health is api.Health.HEALTHY
            left = until - time.monotonic()
            if healthy and (is_asked(spec) or (left <= 0 and status.invocation_id == began)):
                return status, True
            if left <= (0 if first else -GO_BACK_S) or (first and status.state in _ENDED):
                return status, False
            await self.news(min(left, NEWS_S) if left > 0 else AGAIN_S)
            status = await self.task(name)
        return await self.verdict(name), False

    async def gone(self, name: str, generation: int) -> str:
        """Wait until nothing is left of a task that was stopped; return what became of it."""
        while True:
            try:
                now = await self.task(name)
            except NotFound:
                return "gone"
            if now.generation != generation:
                return f"stopped, and wanted again by its owner (generation {now.generation})"
            await self.news()


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    late = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask()
        except (Unreachable, Busy):
            if time.monotonic() >= late:
                raise
            await asyncio.sleep(AGAIN_S)


def _is_as(status: api.TaskStatus, before: api.TaskStatus) -> bool:
    """Return whether a restart that was asked for is still to come."""
    same = status.invocation_id == before.invocation_id
    return same and status.state in (before.state, api.TaskState.STOPPING)


def is_as_asked(status: api.TaskStatus) -> bool:
    """Return whether a task runs and is not broken, or has done what it was to do once."""
    if status.state is api.TaskState.STOPPED and status.last_exit is not None:
        return status.last_exit.result == "success"
    return status.state is api.TaskState.RUNNING and status.health is not api.Health.UNHEALTHY
