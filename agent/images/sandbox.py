"""Runs the sandboxed units that take images in, and keeps them from filling the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.images.core.unpack import FETCH_IDLE_S, UNPACK_TIMEOUT_S, complaint, until_next_look_s
from agent.machine import Btrfs, Processes, UnitState
from agent.runtime.disk import FREE_RESERVE_BYTES
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from wire.errors import SystemdError, TwineError, Unprocessable, Unreachable

CLEAR_TIMEOUT_S = 30.0
"""How long a unit from before may take to end once it was stopped."""
PATTERNS = ("twine-unpack-*.service", "twine-fetch-*.service")
"""The units that this module starts."""


class Sandbox:
    """Runs one unit to its end, or raises why it could not."""

    def __init__(
        self, folder: Path, btrfs: Btrfs, units: Units, processes: Processes, lanes: Lanes
    ) -> None:
        """Watch the room on the file system of `folder`."""
        self._folder = folder
        self._btrfs = btrfs
        self._units = units
        self._processes = processes
        self._lanes = lanes
        self.idle_s = FETCH_IDLE_S

    async def clear(self) -> None:
        """End what an agent from before was about to do."""
        for pattern in PATTERNS:
            for unit in await self._units.all(pattern):
                await self._units.clear(unit.unit, timeout_s=CLEAR_TIMEOUT_S)

    async def run(
        self,
        unit: str,
        properties: Mapping[str, object],
        what: str | Callable[[], str],
        came: Callable[[], int] | None = None,
        *,
        timeout_s: float = UNPACK_TIMEOUT_S,
    ) -> None:
        """Run a unit to its end. `what` begins the sentence about its failure, or returns it.

        `came` returns the bytes received so far; the unit is given up when no more arrive. Raises
        `Unprocessable` where it failed or left too little room, `Unreachable` where it was given
        up, `SystemdError` where it could not be run. Cancelling stops the unit.
        """
        # One from before would have worked on a folder that is gone by now.
        await self._units.clear(unit, timeout_s=CLEAR_TIMEOUT_S)
        short: list[int] = []
        idle: list[float] = []
        watches = [asyncio.create_task(self._watch_room(unit, short.append))]
        if came is not None:
            watches.append(asyncio.create_task(self._watch_arrival(unit, came, idle.append)))
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
            raise Unprocessable(
                f"{what}: it does not fit: unpacking it left {short[0] >> 20} MiB, and "
                f"{FREE_RESERVE_BYTES >> 20} MiB must stay free",
                hint="delete images that no task uses",
            )
        if idle:
            raise Unreachable(
                f"{what}: it stalled, nothing came for {idle[0]:g} s",
                hint="is the registry well? nothing of it was kept; ask again",
            )
        if end.active == "failed" or end.exit_code:
            why = await asyncio.to_thread(self._said, end)
            raise Unprocessable(f"{what}: {why}")

    async def _watch_room(self, unit: str, tell: Callable[[int], None]) -> None:
        """Stop an unpacking that fills the disk, and tell how many bytes it left.

        A few bytes of a stream may become many; with no room left, not even a task could be
        stopped.
        """
        while True:
            _, free = await self._lanes.run("files", self._btrfs.free_bytes, self._folder)
            if free < FREE_RESERVE_BYTES:
                tell(free)
                await self._units.stop(unit)
                return
            await asyncio.sleep(until_next_look_s(free, FREE_RESERVE_BYTES))

    async def _watch_arrival(
        self, unit: str, came: Callable[[], int], tell: Callable[[float], None]
    ) -> None:
        """Stop a unit that sends nothing, and say for how many seconds nothing came.

        What counts are looks and not the time between two: one that is late, because this host
        stood still, is one look.
        """
        look_s = min(self.idle_s / 4, 5.0)
        quiet, before = 0.0, -1
        while quiet < self.idle_s:
            await asyncio.sleep(look_s)
            now = await self._lanes.run("files", came)
            quiet = quiet + look_s if now == before else 0.0
            before = now
        tell(self.idle_s)
        await self._units.stop(unit)

    def _said(self, end: UnitState) -> str:
        """Return the last words of a failed unit."""
        invocation = f"_SYSTEMD_INVOCATION_ID={end.invocation_id}"
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=3", invocation]
        try:
            words = self._processes.run(command, timeout_s=10.0).stdout
        except TwineError:
            words = ""
        return "; ".join(map(complaint, words.strip().splitlines())) or end.result
