"""Probes the health of tasks: over HTTP or TCP, or by a command inside the task."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

from agent.api import Health, Probe, ProbeKind
from agent.tasks.core.health import Streak, after_answer
from wire.error_text import why

Report = Callable[[Health, str], Awaitable[None]]
RunInTask = Callable[[list[str], float], Awaitable[str]]
"""Runs a command inside the task, with a timeout in s; returns why it failed, empty if not."""
LOOPBACK = "127.0.0.1"
MIN_PAUSE_S = {ProbeKind.HTTP: 0.1, ProbeKind.TCP: 0.1, ProbeKind.EXEC: 0.5}
"""Shortest pauses between two probes. The agent serves all tasks of the host, and systemd starts a
unit for each command."""


class Prober:
    """Runs probes; each call of `watch` runs one, and many may run at the same time."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self.answers: Counter[tuple[str, bool]] = Counter()
        """Number of good (True) and bad answers per kind of probe, since the agent's start."""

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def watch(
        self,
        probe: Probe,
        health: Health,
        report: Report,
        inside: RunInTask,
        *,
        starting_s: float = 0.0,
        at: str = LOOPBACK,
    ) -> None:
        """Probe until cancelled, and report each change of health.

        `health` is the health that is known at the beginning, `starting_s` the remaining time of
        the task's start period, `at` the address of the task.
        """
        loop = asyncio.get_running_loop()
        started = loop.time() + starting_s
        streak = Streak(health)
        while True:
            problem = await self._probe_once(probe, inside, at)
            self.answers[str(probe.kind), not problem] += 1
            new = after_answer(streak, not problem, probe, starting=loop.time() < started)
            if new.health is not streak.health:
                await report(new.health, problem if new.health is Health.UNHEALTHY else "")
            streak = new
            is_undecided = streak.health is Health.UNKNOWN
            pause_s = min(0.5, probe.interval_s) if is_undecided else probe.interval_s
            await asyncio.sleep(max(pause_s, MIN_PAUSE_S[probe.kind]))

    async def _probe_once(self, probe: Probe, inside: RunInTask, at: str) -> str:
        """Return why the probe failed, empty if it succeeded."""
        if probe.kind is ProbeKind.EXEC:
            return await inside(probe.command, probe.timeout_s)
        try:
            async with asyncio.timeout(probe.timeout_s):
                if probe.kind is ProbeKind.TCP:
                    return await self._tcp(probe, at)
                return await self._http(probe, at)
        except TimeoutError:
            return f"probe of port {probe.port}: no answer within {probe.timeout_s:g} s"
        except (OSError, aiohttp.ClientError) as e:
            return f"probe of port {probe.port}: {why(e)}"

    async def _tcp(self, probe: Probe, at: str) -> str:
        _, writer = await asyncio.open_connection(at, probe.port)
        writer.close()
        return ""

    async def _http(self, probe: Probe, at: str) -> str:
        if self._session is None:
            # No limit for all tasks together: servers that hang must not delay other probes.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        url = f"http://{at}:{probe.port}{probe.path}"
        async with self._session.get(url, allow_redirects=False) as response:
            if 200 <= response.status < 400:
                return ""
            return f"probe of {probe.path} on port {probe.port}: HTTP {response.status}"
