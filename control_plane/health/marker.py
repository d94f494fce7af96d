"""Writes that machines are down or up again, in a task that may wait for the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from wire.errors import NotFound, TwineError

log = logging.getLogger(__name__)
StillHolds = Callable[[str], bool]


class HealthMarks(Protocol):
    """Records the health checker's verdicts: the broker."""

    async def down(self, reasons: Mapping[str, str], still: StillHolds) -> None:
        """Record the failures of those machines for which `still` returns true at the write."""

    async def up(self, names: Sequence[str], still: StillHolds) -> None:
        """Record that those machines are up for which `still` returns true at the write."""


class Marker:
    """Queues verdicts and writes them, so that a slow store delays no verdict."""

    def __init__(self, marks: HealthMarks, trouble: Callable[[str], None]) -> None:
        """`trouble(why)` is called when the store refuses a mark."""
        self._marks, self._trouble = marks, trouble
        self._down: dict[str, str] = {}
        self._up: list[str] = []
        self._wanted = asyncio.Event()

    def down(self, machine: str, reason: str) -> None:
        """Queue a machine to be marked down."""
        self._down[machine] = reason
        self._wanted.set()

    def up(self, machine: str) -> None:
        """Queue a machine to be marked up."""
        self._up.append(machine)
        self._wanted.set()

    async def run(
        self, is_silent: StillHolds, is_back: StillHolds, written: Callable[[list[str]], None]
    ) -> None:
        """Write queued verdicts until cancelled.

        `is_silent` and `is_back` are called at the write, to check that a verdict is still right.
        `written(machines)` is called after each attempt, whether it succeeded or not.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            down, self._down = self._down, {}
            up, self._up = self._up, []
            if up:
                await self._write(self._marks.up(up, is_back))
                written(up)
            if down:
                await self._write(self._marks.down(down, is_silent))
                written(list(down))

    async def _write(self, work: Awaitable[None]) -> None:
        try:
            await work
        except NotFound as e:
            log.info("a machine was removed while it was marked", extra={"reason": str(e)})
        except TwineError as e:
            log.warning(
                "the store did not accept a change of machine states", extra={"reason": str(e)}
            )
            self._trouble(str(e))
        except Exception as e:
            log.exception("machine states were not written")
            self._trouble(str(e))
