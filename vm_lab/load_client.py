"""An open-loop client: sends requests at a changing rate, and measures how long each takes.

`python -m vm_lab.load_client --url http://…` runs inside the lab's network. Each line of its
standard input is a new rate in requests per second. At the end of the input it waits for pending
requests and prints one JSON object. A request is sent at its time, even if earlier ones are
not answered, so a service that is too small shows as slow.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import defaultdict

import aiohttp
import click
import msgspec

REQUEST_TIMEOUT_S = 30.0
WINDOW_S = 10.0
SHOWN_FAILURES = 10
RATE_MIN, RATE_MAX = 0.1, 1000.0
"""Bounds of a rate in requests per second."""


def parse_rate(text: str) -> float:
    """Return a rate in requests per second; raise `click.BadParameter` if it cannot be used."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not RATE_MIN <= rate <= RATE_MAX:  # NaN is in no range
        bounds = f"from {RATE_MIN:g} to {RATE_MAX:g}"
        raise click.BadParameter(f"{text.strip()!r} is no rate {bounds} requests per second")
    return rate


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that were sent within ten seconds. Times in seconds."""

    at: float
    """Its begin, since 1970."""
    requests: int
    p50: float
    p95: float
    worst: float


class LoadOutcome(msgspec.Struct, kw_only=True):
    """The outcome of the requests."""

    requests: int = 0
    failed: int = 0
    failures: list[str] = []
    windows: list[LoadWindow] = []


class LoadClient:
    """One client; `rate` may change at any time."""

    def __init__(self, url: str, rate: float) -> None:
        self.rate = rate
        self._url = url
        self._outcome = LoadOutcome()
        self._durations = defaultdict[int, list[float]](list)

    async def run(self, until: asyncio.Event) -> LoadOutcome:
        """Send requests until `until` is set, and return their outcome."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            due = time.monotonic()
            while not until.is_set():
                group.create_task(self._request(session))
                due += 1 / self.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        return self._summary()

    async def _request(self, session: aiohttp.ClientSession) -> None:
        self._outcome.requests += 1
        began, clock = time.time(), time.monotonic()
        try:
            async with session.get(self._url) as response:
                await response.read()
                if response.status != 200:
                    raise aiohttp.ClientError(f"HTTP {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            self._outcome.failed += 1
            if len(self._outcome.failures) < SHOWN_FAILURES:
                self._outcome.failures.append(f"{began:.1f}: {e!r}")
            return
        self._durations[int(began // WINDOW_S)].append(time.monotonic() - clock)

    def _summary(self) -> LoadOutcome:
        for number, took in sorted(self._durations.items()):
            took.sort()
            self._outcome.windows.append(
                LoadWindow(
                    at=number * WINDOW_S,
                    requests=len(took),
                    p50=round(took[len(took) // 2], 3),
                    p95=round(took[int(0.95 * (len(took) - 1))], 3),
                    worst=round(took[-1], 3),
                )
            )
        return self._outcome


@click.command()
@click.option("--url", required=True)
@click.option("--rate", type=parse_rate, default="1", show_default=True)
def main(url: str, rate: float) -> None:
    """Send requests at the rate that standard input gave last; print the outcome as JSON."""

    async def run() -> LoadOutcome:
        until, load_client = asyncio.Event(), LoadClient(url, rate)

        async def follow() -> None:
            try:
                while line := await asyncio.to_thread(sys.stdin.readline):
                    load_client.rate = parse_rate(line)
            finally:
                until.set()

        waiter = asyncio.create_task(follow())
        outcome = await load_client.run(until)
        await waiter
        return outcome

    click.echo(msgspec.json.encode(asyncio.run(run())))


if __name__ == "__main__":
    main()
