"""Runs the sandboxed units that fetch and unpack images, and stops them if the disk fills up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.images.core.unpack import (
    FETCH_IDLE_S,
    UNPACK_TIMEOUT_S,
    logged_message,
    until_next_check_s,
)
from agent.machine import Btrfs, Processes, UnitState
from agent.runtime.disk import FREE_RESERVE_BYTES
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from wire.errors import SystemdError, TwineError, Unprocessable, Unreachable

CLEAR_TIMEOUT_S = 30.0
"""How long a unit of an earlier agent may take to stop."""
PATTERNS = ("twine-unpack-*.service", "twine-fetch-*.service")
"""The units that this module starts."""


class Sandbox:
    """Runs a unit to its end, or raises the reason of its failure."""

    def __init__(
        self, folder: Path, btrfs: Btrfs, units: Units, processes: Processes, lanes: Lanes
    ) -> None:
        """The free space of the file system of `folder` is watched."""
        self._folder = folder
        self._btrfs = btrfs
        self._units = units
        self._processes = processes
        self._lanes = lanes
        self.idle_s = FETCH_IDLE_S

    async def clear(self) -> None:
        """Stop all units of an earlier agent."""
        for pattern in PATTERNS:
            for unit in await self._units.all(pattern):
                await self._units.clear(unit.unit, timeout_s=CLEAR_TIMEOUT_S)

    async def run(
        self,
        unit: str,
        properties: Mapping[str, object],
        what: str | Callable[[], str],
        received: Callable[[], int] | None = None,
        *,
        timeout_s: float = UNPACK_TIMEOUT_S,
    ) -> None:
        """Run a unit to its end. `what` is, or returns, the beginning of a failure message.

        `received` returns the bytes received so far; the unit is stopped when no more arrive.
        Raises `Unprocessable` if it failed or left too little space, `Unreachable` if it was
        stopped because nothing arrived, `SystemdError` if it could not be run. Cancelling stops
        the unit.
        """
        # A unit of an earlier agent would work on a folder that was removed.
        await self._units.clear(unit, timeout_s=CLEAR_TIMEOUT_S)
        short: list[int] = []
        idle: list[float] = []
        end = None
        watches = [asyncio.create_task(self._watch_room(unit, short.append))]
        if received is not None:
            watches.append(asyncio.create_task(self._watch_import(unit, received, idle.append)))
        try:
            end = await self._units.run(unit, properties, timeout_s=timeout_s + 60)
        except asyncio.CancelledError:
            await self._units.stop(unit)
            raise
        except SystemdError:
            if not short and not idle:
                raise
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        what = what if isinstance(what, str) else what()
        if short:
            raise _too_large(what, short[0])
        if idle:
            raise _stalled(what, idle[0])
        if end is not None and (end.active == "failed" or end.exit_code):
            why = await asyncio.to_thread(self._failure_text, end)
            raise Unprocessable(f"{what}: {why}")

    async def _watch_room(self, unit: str, report: Callable[[int], None]) -> None:
        """Stop a unit that fills the disk; call `report` with the free bytes.

        A small stream may expand to many bytes. On a full disk not even a task could be stopped.
        """
        while True:
            _, free = await self._lanes.run("files", self._btrfs.free_bytes, self._folder)
            if free < FREE_RESERVE_BYTES:
                report(free)
                await self._units.stop(unit)
                return
            await asyncio.sleep(until_next_check_s(free, FREE_RESERVE_BYTES))

    async def _watch_import(
        self, unit: str, received: Callable[[], int], report: Callable[[float], None]
    ) -> None:
        """Stop a unit that receives nothing; call `report` with the idle seconds.

        Checks are counted, not the time between them: after the host was suspended, a late check
        counts once.
        """
        check_s = min(self.idle_s / 4, 5.0)
        quiet, before = 0.0, -1
        while quiet < self.idle_s:
            await asyncio.sleep(check_s)
            now = await self._lanes.run("files", received)
            quiet = quiet + check_s if now == before else 0.0
            before = now
        report(self.idle_s)
        await self._units.stop(unit)

    def _failure_text(self, end: UnitState) -> str:
        """Return the last lines that a failed unit logged, or else its result."""
        invocation = f"_SYSTEMD_INVOCATION_ID={end.invocation_id}"
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=3", invocation]
        try:
            lines = self._processes.run(command, timeout_s=10.0).stdout
        except TwineError:
            lines = ""
        return "; ".join(map(logged_message, lines.strip().splitlines())) or end.result


def _too_large(what: str, free: int) -> Unprocessable:
    return Unprocessable(
        f"{what}: it does not fit: unpacking it left {free >> 20} MiB, and "
        f"{FREE_RESERVE_BYTES >> 20} MiB are reserved",
        hint="delete images that no task uses",
    )


def _stalled(what: str, idle_s: float) -> Unreachable:
    return Unreachable(
        f"{what}: it stalled, no data for {idle_s:g} s",
        hint="is the registry healthy? nothing was stored; try again",
    )
