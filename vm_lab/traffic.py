"""Constant requests to a job, by a client that follows discovery or through a proxy that does.

`python -m vm_lab.traffic --endpoint unix:… --job web` runs inside the lab's network until its
standard input closes, then prints one JSON object with the outcome of the requests. With `--url`
it sends all of them to that URL.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter

import aiohttp
import click
import msgspec

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.client import ControlPlaneClient
from wire.errors import TwineError, Unreachable

REQUEST_TIMEOUT_S = 15.0
"""High, because a guest in software emulation can be slow without a failure."""
SHOWN_FAILURES = 10
TIMES_KEPT = 1000
ASKED_KEPT = 100_000


class TrafficOutcome(msgspec.Struct, kw_only=True):
    """The outcome of the requests so far."""

    requests: int = 0
    failed: int = 0
    failures: list[str] = []
    failed_at: list[tuple[float, str]] = []
    """Start of each failed request (s since 1970), and its target; the first 1000."""
    asked: list[tuple[float, str]] = []
    """Start of every request, and its target: a task, or `proxy`; the first 100,000."""
    lists: list[tuple[float, list[str]]] = []
    """Time and tasks of each list from discovery; the first of these times."""
    answers: dict[str, int] = {}
    """First line of the page → how often it was seen."""
    machines: dict[str, int] = {}
    revisions: int = 0
    """How often discovery changed meanwhile."""


class Traffic:
    """One client of one job."""

    def __init__(self, client: ControlPlaneClient, job: str, pause_s: float, url: str = "") -> None:
        self._client = client
        self._url = url
        self._job = job
        self._pause_s = pause_s
        self._listed: list[Endpoint] = []
        self._outcome = TrafficOutcome()
        self._answers: Counter[str] = Counter()
        self._machines: Counter[str] = Counter()

    async def run(self, until: asyncio.Event) -> TrafficOutcome:
        """Send requests until `until` is set, and return their outcome."""
        first = await self._read_first_list(until)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        ) as session:
            follower = asyncio.create_task(self._follow(first))
            turn = 0
            while not until.is_set():
                if self._url:
                    await self._request(session, self._url)
                elif self._listed:
                    listed = self._listed[turn % len(self._listed)]
                    url = f"http://{listed.host}:{listed.ports['http']}/"
                    await self._request(session, url, listed.task, listed.machine)
                turn += 1
                await asyncio.sleep(self._pause_s)
            follower.cancel()
        self._outcome.answers = dict(self._answers)
        self._outcome.machines = dict(self._machines)
        return self._outcome

    async def _read_first_list(self, until: asyncio.Event) -> int:
        """Read the endpoints from discovery, again until a control plane serves; return their
        revision.
        """
        while not until.is_set():
            try:
                endpoints = await self._client.endpoints(self._job)
            except Unreachable:
                await asyncio.sleep(0.5)
                continue
            self._store_list(endpoints)
            return endpoints.revision
        return 0

    def _store_list(self, endpoints: Endpoints) -> None:
        self._listed = endpoints.endpoints
        if len(self._outcome.lists) < TIMES_KEPT:
            self._outcome.lists.append((time.time(), sorted(e.task for e in self._listed)))

    async def _follow(self, revision: int) -> None:
        while True:
            try:
                endpoints = await self._client.endpoints(self._job, after=revision, wait_s=20)
            except TwineError:
                await asyncio.sleep(0.5)  # the last known list stays in use
                continue
            if endpoints.revision != revision:
                self._outcome.revisions += 1
            revision = endpoints.revision
            self._store_list(endpoints)

    async def _request(
        self, session: aiohttp.ClientSession, url: str, task: str = "proxy", machine: str = ""
    ) -> None:
        self._outcome.requests += 1
        began = time.time()
        if len(self._outcome.asked) < ASKED_KEPT:
            self._outcome.asked.append((began, task))
        try:
            async with session.get(url) as response:
                page = await response.text()
                if response.status != 200:
                    raise aiohttp.ClientError(f"HTTP {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            self._outcome.failed += 1
            if len(self._outcome.failures) < SHOWN_FAILURES:
                self._outcome.failures.append(f"{task} at {url}: {e!r}")
            if len(self._outcome.failed_at) < TIMES_KEPT:
                self._outcome.failed_at.append((began, task))
            return
        self._answers[page.partition("\n")[0]] += 1
        if machine:
            self._machines[machine] += 1


async def _until_stdin_closes(until: asyncio.Event) -> None:
    await asyncio.to_thread(sys.stdin.buffer.read)
    until.set()


@click.command()
@click.option("--endpoint", required=True)
@click.option("--job", required=True)
@click.option("--pause-s", default=0.05, show_default=True)
@click.option("--url", default="", help="A proxy's; without it, the tasks themselves are asked.")
def main(endpoint: str, job: str, pause_s: float, url: str) -> None:
    """Send requests to a job until standard input closes; print the outcome as JSON."""

    async def run() -> TrafficOutcome:
        until = asyncio.Event()
        async with ControlPlaneClient(endpoint) as client:
            waiter = asyncio.create_task(_until_stdin_closes(until))
            outcome = await Traffic(client, job, pause_s, url).run(until)
            await waiter
        return outcome

    click.echo(msgspec.json.encode(asyncio.run(run())))


if __name__ == "__main__":
    main()
