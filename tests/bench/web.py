"""How long the web console's pages take, and how long they keep others waiting.

    python -m tests.bench.web [--machines 50000] [--json]

The assembled control plane with machines in memory (`control_plane.py`), the front end and the
console on a unix socket. `region_ms` is from the request to the last byte (the median; viewers
share answers, and `region_first_ms` is that of the first, of which `region_first_cpu_ms` was
computing), `region_kb` what goes over the wire.
`pause_*_cpu_ms` is the longest computation between two turns of the loop while the page was made.
The Gantt chart is computed of 24 h of generated operations. `browsers_cpu_percent` is of one core,
for `BROWSERS` open streams of changes of an idle region less the same without them; the clients run
in the same process, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import aiohttp.web

from control_plane.api.operations import Cause, JobEvent, OperationKind, OperationState
from control_plane.api.routes import ROUTES
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.identity.authority import open_authority
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.images.store import ImageStore
from control_plane.web.core.gantt import chart
from control_plane.web.serving import Console
from tests.bench.control_plane import Bench, ms

ROUNDS = 7
BROWSERS, WATCHED_S = 200, 20.0
DAY_S = 86_400.0


class WebBench(Bench):
    """Opens pages of a region that is otherwise idle."""

    async def _phases(self) -> None:
        self.unheard = list(self.hosts.by_name)
        async with self._phase("hear"):
            await self._until(self._all_heard)
        with tempfile.TemporaryDirectory(prefix="twine-web-") as folder:
            async with self._served(Path(folder)) as session:
                for name, path in (("region", "/ui/"), ("machines", "/ui/machines")):
                    await self._measure(session, name, path)
                await self._watch(session)

    @contextlib.asynccontextmanager
    async def _served(self, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
        store = self.cp._store
        authority = open_authority(folder / "authority.pem", "twine")
        registrar = Registrar(store, authority, self.cp, "https://x", self.runtime)
        images = ImageStore(folder / "images", time.time, 1 << 20)
        people, trail = People(store, self.runtime), Trail(store, self.runtime)
        front_end = FrontEnd(self.cp, registrar, images, people, trail)
        app = front_end.app(Access(os.getuid()), "0")
        Console(front_end, ROUTES, store.revision).add_to(app)
        path = folder / "socket"
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.UnixSite(runner, str(path)).start()
        connector = aiohttp.UnixConnector(path=str(path), limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            yield session
        await runner.cleanup()

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        idle = await self._cpu_percent()

        async def browser() -> None:
            async with session.get("http://x/ui/changes") as answer:
                async for _ in answer.content:
                    pass

        browsers = [asyncio.ensure_future(browser()) for _ in range(BROWSERS)]
        await asyncio.sleep(2.0)  # all are connected
        watched = await self._cpu_percent()
        assert not any(one.done() for one in browsers)
        for one in browsers:
            one.cancel()
        await asyncio.wait(browsers)
        self.result |= {"browsers": BROWSERS, "browsers_cpu_percent": round(watched - idle, 1)}

    async def _cpu_percent(self) -> float:
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(WATCHED_S)
        return 100 * (time.process_time() - cpu) / (time.perf_counter() - began)

    async def _measure(self, session: aiohttp.ClientSession, name: str, path: str) -> None:
        took, used = [], []
        async with self._phase(name):
            for _ in range(ROUNDS):
                await asyncio.sleep(0.1)
                began, cpu = time.perf_counter(), time.process_time()
                async with session.get(f"http://x{path}") as answer:
                    assert answer.status == 200, await answer.text()
                    body = await answer.read()
                took.append(time.perf_counter() - began)
                used.append(time.process_time() - cpu)
        self.result |= {
            f"{name}_first_ms": ms(took[0]),
            f"{name}_first_cpu_ms": ms(used[0]),
            f"{name}_ms": ms(statistics.median(took)),
            f"{name}_kb": round(len(body) / 1000),
        }


def gantt_ms(tasks: int) -> float:
    """Return how long the chart of one day of a job takes to compute."""
    chance = random.Random(1)
    events = [
        JobEvent(
            seq=number,
            task=chance.randrange(tasks),
            operation=str(number),
            kind=OperationKind.RESTART,
            cause=Cause.OWNER,
            outcome=OperationState.DONE,
            start=(start := chance.uniform(0, DAY_S)),
            end=start + 30,
        )
        for number in range(10 * tasks)
    ]
    began = time.perf_counter()
    chart(events, [], (0.0, DAY_S), 0)
    return ms(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=50_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    result = asyncio.run(WebBench(options.machines, 0.0, loaded=False).run())
    result["gantt_10000_tasks_ms"] = gantt_ms(10_000)
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:24} {v}" for k, v in result.items())
    )


if __name__ == "__main__":
    main()
