"""Asks tasks whether they are healthy: over HTTP or TCP, or by a command inside of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

from agent.api import Health, Probe, ProbeKind
from agent.tasks.core.health import Streak, after_answer
from wire.error_text import why

Report = Callable[[Health, str], Awaitable[None]]
Ask = Callable[[list[str], float], Awaitable[str]]
"""Runs a command inside the task, with a time-out in s; returns an error text, or an empty one."""
LOOPBACK = "127.0.0.1"


class Prober:
    """Runs the probe of one task at a time in `watch`; many may run side by side."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self.answers: Counter[tuple[str, bool]] = Counter()
        """How many answers of each kind of probe were good (True) and bad, since the start."""

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def watch(
        self,
        probe: Probe,
        health: Health,
        report: Report,
        inside: Ask,
        *,
        starting_s: float = 0.0,
        at: str = LOOPBACK,
    ) -> None:
        """Probe until cancelled, from a known health on, and report each change of verdict.

        `starting_s` is what is left of the task's start period.
        """
        loop = asyncio.get_running_loop()
        started = loop.time() + starting_s
        streak = Streak(health)
        while True:
            problem = await self._ask(probe, inside, at)
            self.answers[str(probe.kind), not problem] += 1
            new = after_answer(streak, not problem, probe, starting=loop.time() < started)
            if new.health is not streak.health:
                await report(new.health, problem if new.health is Health.UNHEALTHY else "")
            streak = new
            eager = streak.health is Health.UNKNOWN
            await asyncio.sleep(min(0.5, probe.interval_s) if eager else probe.interval_s)

    async def _ask(self, probe: Probe, inside: Ask, at: str) -> str:
        """Return what is wrong with the answer, empty when it is good."""
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
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        url = f"http://{at}:{probe.port}{probe.path}"
        async with self._session.get(url, allow_redirects=False) as response:
            if 200 <= response.status < 400:
                return ""
            return f"probe of {probe.path} on port {probe.port}: HTTP {response.status}"
