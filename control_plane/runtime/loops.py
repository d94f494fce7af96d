"""The loops of a process, by name: a failed loop ends the process or is restarted.

No loop fails silently: readiness names it, and the process logs why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from control_plane.runtime.runtime import Runtime
from wire.errors import TwineError

log = logging.getLogger(__name__)
Loop = Callable[[], Coroutine[Any, Any, None]]
_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0
_RESET_S = 600.0
"""A loop that has run for this long since it failed begins with short pauses again."""


class AfterFailure(StrEnum):
    """What happens to a loop that failed."""

    ENDS = "ends"
    """Other loops rely on its state, which may be wrong now. So the process ends, and the next one
    reads everything again."""
    RESTARTS = "restarts"
    """It derives its state from that of other loops, so it is restarted while they run."""


class Loops:
    """Loops that were started together and end together."""

    def __init__(self, runtime: Runtime) -> None:
        self.down: dict[str, str] = {}
        """Loop → why it does not run now."""
        self._runtime = runtime
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end_listening = runtime.on_failure(self._record_failure)

    def start(
        self,
        name: str,
        work: Loop,
        on_failure: AfterFailure = AfterFailure.ENDS,
    ) -> None:
        """Run a loop until `close`, or until it fails."""
        if on_failure is AfterFailure.ENDS:
            self._tasks[name] = self._runtime.spawn(name, work())
        else:
            self._tasks[name] = self._runtime.spawn(name, self._run_with_restarts(name, work))

    async def wait_failed(self) -> None:
        """Never return; raise the error of a failed loop that ends the process."""
        await asyncio.shield(self._failure)

    def failures(self) -> str:
        """Return the failed loops and their errors as text; empty: all run."""
        return "; ".join(f"{name} failed: {why}" for name, why in sorted(self.down.items()))

    async def close(self) -> None:
        """End all loops."""
        self._end_listening()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._failure.done():
            self._failure.exception()  # callers wait with wait_failed
        else:
            self._failure.cancel()

    def _record_failure(self, name: str, error: BaseException) -> None:
        """Record that spawned work failed, which ends the process."""
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        self.down[name] = _reason(error)
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _run_with_restarts(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        pause_s = _PAUSE_S
        while True:
            began = self._runtime.now()
            try:
                await work()
                return
            except Exception as e:
                self.down[name] = _reason(e)
                log.exception("loop failed and is restarted", extra={"actor": name})
            pause_s = _PAUSE_S if self._runtime.now() - began > _RESET_S else pause_s
            await self._runtime.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            del self.down[name]


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, TwineError) else f"{type(error).__name__}: {error}"
