"""Transient units for the event loop: start and stop them, read them, wait for changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from agent.machine import Systemd, UnitState
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import pause
from wire.errors import Conflict, SystemdError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_LANE = "systemd"
READ_S = 30.0
"""Seconds between two reads of all units' states, in case a change sent no signal."""
_GONE = ("", "")


class Units:
    """The units of this host, through one lane to systemd."""

    def __init__(self, systemd: Systemd, lanes: Lanes) -> None:
        """Receive no signals until `listen` is called."""
        self._systemd = systemd
        self._lanes = lanes
        self._wakers: dict[str, set[asyncio.Event]] = {}
        self._known: dict[str, tuple[str, str]] = {}
        """Followed unit → its active and sub state when it was read last."""

    def listen(self) -> Callable[[], None]:
        """Start waking the waiters of `changes`; return a function that stops it."""
        loop = asyncio.get_running_loop()

        def on_change(unit: str) -> None:
            # Each start changes other units, too. Only followed units matter here.
            if (not unit or unit in self._wakers) and not loop.is_closed():
                loop.call_soon_threadsafe(self._wake, unit)

        return self._systemd.listen(on_change)

    def _wake(self, unit: str) -> None:
        wakers = self._wakers.get(unit, set()) if unit else set().union(*self._wakers.values())
        for waker in wakers:
            waker.set()

    def wake_all(self) -> None:
        """Wake every task that waits in `changes`."""
        self._wake("")

    @contextmanager
    def changes(self, unit: str, waker: asyncio.Event) -> Iterator[None]:
        """Set `waker` whenever the unit may have changed, until the block ends."""
        self._wakers.setdefault(unit, set()).add(waker)
        try:
            yield
        finally:
            self._wakers[unit].discard(waker)
            if not self._wakers[unit]:
                del self._wakers[unit]
                self._known.pop(unit, None)

    async def watch(self, pattern: str) -> None:
        """Wake followers of units that changed without a signal, until cancelled.

        `pattern` is a glob of units. One call reads the states of all units.
        """
        while True:
            await pause(READ_S)
            try:
                seen = await self._lanes.run(_LANE, self._systemd.unit_states, pattern)
            except SystemdError as e:
                log.warning("cannot read the states of all units", extra={"why": str(e)})
                continue
            for unit, known in list(self._known.items()):
                if fnmatchcase(unit, pattern) and seen.get(unit, _GONE) != known:
                    self._wake(unit)

    async def start(self, unit: str, properties: Mapping[str, object]) -> None:
        """Queue the start of a transient unit. Raises `Conflict` if it exists."""
        await self._lanes.run(_LANE, self._systemd.start_transient, unit, properties)

    async def stop(self, unit: str) -> None:
        """Queue the stop of a unit, or reset a failed unit so that systemd unloads it."""

        def stop() -> None:
            state = self._systemd.find(unit)
            if state is None:
                return
            if state.active != "failed":
                self._systemd.stop(unit)
            else:
                self._systemd.reset_failed(unit)

        await self._lanes.run(_LANE, stop)

    async def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit."""
        await self._lanes.run(_LANE, self._systemd.kill, unit, signal)

    async def forget_restarts(self, unit: str) -> None:
        """Reset a unit's failures: systemd then restarts it with the shortest pause again."""
        await self._lanes.run(_LANE, self._systemd.reset_failed, unit)

    async def until_end(
        self, unit: str, running: Callable[[], None], *, start_s: float
    ) -> UnitState | None:
        """Wait for the end of a unit that was just started; return its state, None if it is gone.

        `running` is called once systemd has executed its command. Raises `SystemdError` if that
        takes longer than `start_s`.
        """
        waker, reported = asyncio.Event(), False
        loop = asyncio.get_running_loop()
        late = loop.time() + start_s
        with self.changes(unit, waker):
            while True:
                waker.clear()
                state = await self.find(unit)
                if state is None or state.active == "failed" or state.sub == "exited":
                    return state
                if state.sub == "dead" and _has_ended(state):  # else its start is still queued
                    return state
                if state.sub == "running" and not reported:
                    running()
                    reported = True
                if not reported and loop.time() > late:
                    raise SystemdError(f"{unit} did not start within {start_s:g} s")
                await wait_woken(waker, 2.0)

    async def limit(self, unit: str, properties: Mapping[str, object]) -> None:
        """Change properties of a running unit."""
        await self._lanes.run(_LANE, self._systemd.set_properties, unit, properties)

    async def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None if it is not loaded."""
        state = await self._lanes.run(_LANE, self._systemd.find, unit)
        if unit in self._wakers:
            self._known[unit] = (state.active, state.sub) if state is not None else _GONE
        return state

    async def all(self, pattern: str) -> list[UnitState]:
        """Return all loaded units that match a glob."""
        return await self._lanes.run(_LANE, self._systemd.units, pattern)

    async def run(
        self, unit: str, properties: Mapping[str, object], *, timeout_s: float
    ) -> UnitState:
        """Run a unit until it ends, remove it, and return how it ended.

        If an earlier agent started a unit of the same name, that one ends first. A cancelled call
        leaves the unit running.
        """
        waker = asyncio.Event()
        with self.changes(unit, waker):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._start_after_earlier(unit, properties, waker)
                    end = await self._wait_ended(unit, waker)
            except TimeoutError as e:
                await self.stop(unit)
                raise SystemdError(f"{unit} did not end within {timeout_s:g} s") from e
            await self.stop(unit)
        if end is None:
            raise SystemdError(f"{unit} disappeared while it ran", hint=f"see journalctl -u {unit}")
        return end

    async def finish(self, unit: str, *, timeout_s: float) -> None:
        """Wait for the end of a unit that an earlier agent started, then remove it."""
        waker = asyncio.Event()
        with self.changes(unit, waker):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait_ended(unit, waker)
            except TimeoutError as e:
                raise SystemdError(f"{unit} did not end within {timeout_s:g} s") from e
        await self.stop(unit)

    async def clear(self, unit: str, *, timeout_s: float) -> None:
        """Stop a leftover unit and wait until systemd has unloaded it."""
        waker = asyncio.Event()
        with self.changes(unit, waker):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait_cleared(unit, waker)
            except TimeoutError as e:
                raise SystemdError(f"{unit} still exists after {timeout_s:g} s") from e

    async def _start_after_earlier(
        self, unit: str, properties: Mapping[str, object], waker: asyncio.Event
    ) -> None:
        while True:
            try:
                return await self.start(unit, properties)
            except Conflict:
                await self._wait_ended(unit, waker)
                await self._wait_cleared(unit, waker)

    async def _wait_cleared(self, unit: str, waker: asyncio.Event) -> None:
        while True:
            waker.clear()
            if await self.find(unit) is None:
                return
            await self.stop(unit)
            await wait_woken(waker, 0.5)

    async def _wait_ended(self, unit: str, waker: asyncio.Event) -> UnitState | None:
        """Wait for the end of a unit; return how it ended, None if it is gone."""
        while True:
            waker.clear()
            state = await self.find(unit)
            if state is None or state.active == "failed" or state.sub == "exited":
                return state
            await wait_woken(waker, 2.0)


def _has_ended(state: UnitState) -> bool:
    """Return whether the command of a unit has ended.

    Its invocation id does not show that: it is read after the state, and the unit may have been
    started in between.
    """
    return state.exit_code is not None or state.exit_signal is not None


async def wait_woken(waker: asyncio.Event, timeout_s: float) -> None:
    """Return when `waker` is set, after `timeout_s` at the latest."""
    try:
        async with asyncio.timeout(timeout_s):
            await waker.wait()
    except TimeoutError:
        pass
