"""How long do pages of the web console take, and how long are the pauses that they cause?

    python -m tests.bench.web [--machines 50000] [--jobs 10000] [--tasks 10000] [--json]

The assembled control plane with machines in memory (`control_plane.py`), the front end and the
console on a unix socket; one job has many tasks, the others have none. Each page of `PAGES` is
requested `ROUNDS` times as HTML and as JSON. `*_first_cpu_ms` is the CPU time of this process for
the first answer and `*_cpu_ms` for the median one. `*_ms` is the median time until the last byte,
`*_kb` the transferred size. The client is in the same process, so these are upper bounds.

`pause_*_cpu_ms` is the longest CPU time of the loop's thread between two turns of a coroutine that
sleeps for 2 ms. `held_*_ms` is the same of the whole process minus those 2 ms: a call of C in
another thread may hold Python's lock, and the loop then waits for it. `idle` is the control plane
alone. `browsers_cpu_percent` is of one core, for `BROWSERS` open streams of changes of an idle
region, minus the same without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import aiohttp.web

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase
from control_plane.api.routes import ROUTES
from control_plane.api.stored_jobs import intent_of
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.identity.authority import open_authority
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.images.store import ImageStore
from control_plane.store.bulk import put_all
from control_plane.store.records import JOBS, encode
from control_plane.store.sqlite import SqliteStore
from control_plane.web.serving import Console
from control_plane.web.streams import TICK_S
from tests.bench.control_plane import HEARTBEAT_S, UNCOUNTED, Bench, ms
from tests.bench.hosts_in_memory import IMAGE

ROUNDS = 5
BROWSERS, WATCHED_S = 200, 20.0
BIG = "big"
PAGES = {
    "region": "/ui/",
    "region_by_load": "/ui/?colour=load",
    "jobs": "/ui/jobs",
    "jobs_by_health": "/ui/jobs?sort=health",
    "job": f"/ui/jobs/{BIG}",
    "operations": f"/ui/jobs/{BIG}/operations",
    "task": f"/ui/jobs/{BIG}/tasks/0",
    "machines": "/ui/machines",
    "machines_by_tasks": "/ui/machines?sort=tasks",
    "entitlements": "/ui/entitlements",
    "profiles": "/ui/profiles",
    "maintenance": "/ui/maintenance",
    "rebalance": "/ui/rebalance",
    "shards": "/ui/shards",
    "audit": "/ui/audit",
    "myself": "/ui/myself",
}
"""Name of a page → its path."""


class WebBench(Bench):
    """Opens pages of a region that is otherwise idle."""

    def __init__(self, machines: int, jobs: int, tasks: int) -> None:
        super().__init__(machines, 0.0, loaded=False)
        self.empty_jobs, self.big_tasks = jobs, tasks
        self.result = {"machines": machines, "jobs": jobs, "tasks": tasks}

    async def _fill(self, store: SqliteStore) -> None:
        await super()._fill(store)
        self.pauses.phase = UNCOUNTED
        records = (
            JobRecord(name=f"job{n:05}", spec=_spec(f"job{n:05}", 0), version=1)
            for n in range(self.empty_jobs)
        )
        await put_all(store, ((JOBS + one.name, encode(intent_of(one))) for one in records))
        self.pauses.phase = "start"

    async def _phases(self) -> None:
        self.unheard = list(self.hosts.by_name)
        async with self._phase("hear"):
            await self._until(self._all_reported)
        await self.cp.capacity.put_entitlement("e0", EntitlementSpec(machines=self.machines // 2))
        async with self._phase("deploy"):
            await self.cp.apply_job(_spec(BIG, self.big_tasks))
            await self._until(lambda: self.cp.counters.tasks[TaskPhase.RUNNING] >= self.big_tasks)
        self.pauses.phase = UNCOUNTED
        with tempfile.TemporaryDirectory(prefix="twine-web-") as folder:
            async with self._served(Path(folder)) as session:
                async with self._counted("idle"):
                    await asyncio.sleep(WATCHED_S / 2)
                for name, path in PAGES.items():
                    await self._measure(session, name, path)
                    joined = "&" if "?" in path else "?"
                    await self._measure(session, f"{name}_json", f"{path}{joined}format=json")
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

    @contextlib.asynccontextmanager
    async def _counted(self, name: str) -> AsyncIterator[None]:
        """Count only the pauses during the block."""
        await asyncio.sleep(10 * HEARTBEAT_S)
        self.pauses.phase = name
        yield
        await asyncio.sleep(10 * HEARTBEAT_S)
        self.pauses.phase = UNCOUNTED

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        async with self._counted("unwatched"):
            idle = await self._cpu_percent()

        async def browser() -> None:
            async with session.get("http://x/ui/changes") as answer:
                async for _ in answer.content:
                    pass

        browsers = []
        async with self._counted("browsers"):
            for _ in range(BROWSERS):
                browsers.append(asyncio.ensure_future(browser()))
                await asyncio.sleep(TICK_S / BROWSERS)
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
        async with self._counted(name):
            for _ in range(ROUNDS):
                await asyncio.sleep(0.1)
                began, cpu = time.perf_counter(), time.process_time()
                async with session.get(f"http://x{path}") as answer:
                    assert answer.status == 200, await answer.text()
                    body = await answer.read()
                took.append(time.perf_counter() - began)
                used.append(time.process_time() - cpu)
        self.result |= {
            f"{name}_first_cpu_ms": ms(used[0]),
            f"{name}_cpu_ms": ms(statistics.median(used)),
            f"{name}_ms": ms(statistics.median(took)),
            f"{name}_kb": round(len(body) / 1000),
        }


def _spec(name: str, tasks: int) -> JobSpec:
    return JobSpec(
        name=name,
        entitlement="e0",
        tasks=tasks,
        image=IMAGE,
        command=["/bin/serve"],
        environment={"RELEASE": "1"},
        limits=Limits(memory_max_bytes=6 << 30, cpu_max_cores=2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=50_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    result = asyncio.run(WebBench(options.machines, options.jobs, options.tasks).run())
    if options.json:
        print(json.dumps(result))
        return
    for name in sorted(result, key=lambda name: name.removeprefix("pause_").removeprefix("held_")):
        print(f"{name:36} {result[name]:g}")


if __name__ == "__main__":
    main()
