"""Notifications of unsuccessful runs: each is sent again until its URL answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from control_plane.runtime.runtime import Runtime
from conveyor.runs import PipelineRun
from wire.errors import TwineError, Unreachable

log = logging.getLogger(__name__)
RETRY_S = 60.0
"""Interval between two attempts to send a notification."""
DROP_AFTER_S = 86_400.0
"""A notification is dropped after this many seconds without delivery."""
Notify = Callable[[str, object], Awaitable[None]]


async def notify(url: str, message: object, timeout_s: float = 10.0) -> None:
    """POST a message as JSON; `Unreachable` unless the answer is 2xx."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                url, data=msgspec.json.encode(message), headers=headers, allow_redirects=False
            ) as response,
        ):
            if not 200 <= response.status < 300:
                raise Unreachable(f"{url} answered {response.status} to a notification")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        raise Unreachable(f"cannot notify {url}: {str(e) or type(e).__name__}") from e


class Notifications:
    """Sends notifications. After a restart of the process a URL may get one a second time."""

    def __init__(self, runtime: Runtime, send: Notify = notify) -> None:
        self._runtime, self.send = runtime, send
        self._sent_at: dict[tuple[str, int], float] = {}
        """Pipeline and run → when its notifications were last sent."""
        self._answered: dict[tuple[str, int], set[str]] = {}
        """Pipeline and run → URLs that have answered."""

    async def deliver(self, pipeline: str, run: PipelineRun) -> bool:
        """Send the notifications of a run; return whether none is left to send."""
        key, now = (pipeline, run.number), self._runtime.date()
        if 0 <= now - self._sent_at.get(key, float("-inf")) < RETRY_S:
            return False
        self._sent_at[key] = now
        answered = self._answered.setdefault(key, set())
        for url in run.spec.on_failure.notify:
            if url in answered:
                continue
            try:
                await self.send(url, run)
            except TwineError as e:
                log.warning("notification failed", extra={"pipeline": pipeline, "reason": str(e)})
            else:
                answered.add(url)
        is_late = now - (run.ended or now) >= DROP_AFTER_S
        if not is_late and not answered >= set(run.spec.on_failure.notify):
            return False
        del self._sent_at[key], self._answered[key]
        return True

    def forget(self, pipeline: str) -> None:
        """Drop what is remembered of a removed pipeline: another one may get its name."""
        for key in [key for key in self._sent_at if key[0] == pipeline]:
            del self._sent_at[key], self._answered[key]
