"""The cost to a control plane of an autoscaler that writes the size of 10,000 jobs each minute.

    python -m tests.bench.intent_load [--json] [--jobs 10000] [--seconds 60]

A control plane with 10,000 jobs of one task and 1,000 hosts in memory. An autoscaler writes the
size of each once a minute, 100 in a request. Each write has its entry in the audit log, and a tenth
of them change the size. Once a minute the autoscaler also lists all jobs in brief. In addition, one
job gets a push each second. Goals: 25 % of a core, and a delay of at most 5 s for each job.

- `cpu_percent` is of one core, the writers and the hosts in memory included; `idle_cpu_percent` is
  the same without any writes.
- `behind_s` is the longest from the answer to a write until the job's tasks were composed for it,
  and `late_s` how late the autoscaler itself was at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT)]

from agent.api import Limits, Location  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.intent_changes import PushChange, SizeChange, SizeChanges, SizesWritten  # noqa: E402
from control_plane.api.jobs import JobSpec, UpdatePolicy  # noqa: E402
from control_plane.api.routes import ROUTES  # noqa: E402
from control_plane.api.settings import PortalSettings, SchedulerSettings  # noqa: E402
from control_plane.broker.keys import prefix_of  # noqa: E402
from control_plane.front_end.access import Access  # noqa: E402
from control_plane.front_end.frontend import FrontEnd  # noqa: E402
from control_plane.front_end.trail import Trail  # noqa: E402
from control_plane.identity.authority import open_authority  # noqa: E402
from control_plane.identity.people import People  # noqa: E402
from control_plane.identity.registrar import Registrar  # noqa: E402
from control_plane.images.store import ImageStore  # noqa: E402
from control_plane.job_control.core.intents import is_composed  # noqa: E402
from control_plane.roles import ControlPlane  # noqa: E402
from control_plane.runtime.garbage import permanent_heap  # noqa: E402
from control_plane.runtime.runtime import Runtime  # noqa: E402
from control_plane.store.bulk import put_all  # noqa: E402
from control_plane.store.records import encode  # noqa: E402
from control_plane.store.sqlite import SqliteStore  # noqa: E402
from tests.bench.hosts_in_memory import IMAGE as RUNS  # noqa: E402
from tests.bench.hosts_in_memory import Hosts, find_image  # noqa: E402
from wire.fairness import Peer  # noqa: E402
from wire.server import Call  # noqa: E402

AT_ONCE = 100
MACHINES_PER_JOB = 0.1
CHANGES = 10
"""One of this number of writes changes the size."""
READY_S = 1_800.0
SETTLES_S, IDLE_S = 65.0, 15.0
"""Wait after the last task started: the scheduler checks quiet jobs once after a minute."""
SCALER = Peer(name="spiffe://twine/component/autoscaler", role="component", is_trusted=True)
_PUT_SIZES = next(route for route in ROUTES if route.name == "put_sizes")


class ManyJobs:
    """Jobs of one task, their autoscaler, and pushes."""

    def __init__(self, jobs: int, seconds: float) -> None:
        self.jobs, self.seconds = jobs, seconds
        self.machines = max(10, round(jobs * MACHINES_PER_JOB))
        self.hosts, self.runtime = Hosts(), Runtime(seed=1)
        self.cp: ControlPlane
        self.front_end: FrontEnd
        self.waiting: dict[str, float] = {}
        """Job → when its write was answered, until its tasks are composed for it."""
        self.behind_s, self.late_s, self.writes = 0.0, 0.0, 0

    async def run(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="twine-bench-") as folder:
            async with SqliteStore(Path(folder)) as store:
                await self._fill(store)
                settings = SchedulerSettings(
                    **dict.fromkeys(("destructive_per_s", "profile_switches_per_s"), 1e6),
                    **dict.fromkeys(("destructive_burst", "profile_switches_burst"), 1_000_000),
                    join_grace_s=0,
                )
                with permanent_heap():
                    self.cp = ControlPlane(
                        store,
                        self.hosts.agent,
                        self.runtime,
                        settings,
                        find_image,
                        PortalSettings(),
                    )
                    await self.cp.__aenter__()
                try:
                    self.front_end = await self._front_end(store, Path(folder))
                    return await self._measured()
                finally:
                    await self.cp.__aexit__(None, None, None)

    async def _front_end(self, store: SqliteStore, folder: Path) -> FrontEnd:
        """Return a front end that is called without HTTP."""
        authority = open_authority(folder / "authority.pem", "twine")
        registrar = Registrar(store, authority, self.cp, "https://x", self.runtime)
        images = ImageStore(folder / "images", time.time)
        people, trail = People(store, self.runtime), Trail(store, self.runtime)
        await trail.load()
        front_end = FrontEnd(self.cp, registrar, images, people, trail)
        front_end.app(Access(os.getuid()), "0")
        return front_end

    async def _fill(self, store: SqliteStore) -> None:
        records = []
        for number in range(self.machines):
            msb = number % 12
            where = Location(datacenter=f"dc{msb % 4}", msb=f"msb{msb}", rack=f"r{msb}")
            record = self.hosts.add(f"m{number:06}", where)
            records.append((prefix_of(where.datacenter) + record.machine, encode(record)))
        await put_all(store, iter(records))

    async def _measured(self) -> dict[str, float]:
        await self.cp.capacity.put_entitlement("e0", EntitlementSpec(machines=self.machines))
        for first in range(0, self.jobs, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, self.jobs))
            await asyncio.gather(*(self.cp.apply_job(self._spec(n, "1")) for n in numbers))
        async with asyncio.timeout(READY_S):
            while self.hosts.running.get("1", 0) < self.jobs:
                await asyncio.sleep(1.0)
        await asyncio.sleep(SETTLES_S)
        idle = await self._cpu(asyncio.sleep(IDLE_S))
        loaded = await self._cpu(self._load())
        return {
            "jobs": self.jobs,
            "writes_per_s": round(self.writes / self.seconds, 1),
            "idle_cpu_percent": idle,
            "cpu_percent": loaded,
            "behind_s": round(self.behind_s, 2),
            "late_s": round(self.late_s, 2),
            "load": round(os.getloadavg()[0], 1),
        }

    def _spec(self, number: int, release: str) -> JobSpec:
        return JobSpec(
            name=f"job{number}",
            entitlement="e0",
            tasks=1,
            image=RUNS,
            command=["/bin/serve"],
            environment={"RELEASE": release},
            limits=Limits(memory_max_bytes=256 << 20, cpu_max_cores=0.2),
            update=UpdatePolicy(drain_s=0.0),
        )

    async def _cpu(self, work: Awaitable[object]) -> float:
        """Return the percent of a core that this process uses during an action."""
        began, used = time.perf_counter(), time.process_time()
        await work
        return round(100 * (time.process_time() - used) / (time.perf_counter() - began), 1)

    async def _load(self) -> None:
        until = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._autoscaler(until))
            group.create_task(self._pushes(until))
            group.create_task(self._watch(until))

    async def _autoscaler(self, until: float) -> None:
        sizes, number = [1] * self.jobs, 0
        due, gap = time.monotonic(), 60.0 / self.jobs * AT_ONCE
        await self.cp.intents.briefs()
        while time.monotonic() < until:
            sizes_now = dict[str, SizeChange]()
            for _ in range(AT_ONCE):
                job = number % self.jobs
                if number % CHANGES == 0:
                    sizes[job] = 3 - sizes[job]
                sizes_now[f"job{job}"] = SizeChange(tasks=sizes[job], reason=f"load {number}")
                number += 1
            await self._resize(sizes_now)
            if number % self.jobs == 0:
                await self.cp.intents.briefs()
            due += gap
            self.late_s = max(self.late_s, time.monotonic() - due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _resize(self, sizes: dict[str, SizeChange]) -> None:
        call = Call(_PUT_SIZES, SCALER, SizeChanges(sizes=sizes), request_id=f"r{self.writes}")
        answer: SizesWritten = await self.front_end.handlers[_PUT_SIZES.name](call)
        assert not answer.refused, answer.refused
        for name in answer.versions:
            self.waiting.setdefault(name, time.monotonic())
        self.writes += len(answer.versions)

    async def _pushes(self, until: float) -> None:
        number = 7
        while time.monotonic() < until:
            name = f"job{number % self.jobs}"
            spec = self._spec(number % self.jobs, "2")
            await self.cp.intents.push(name, PushChange(spec=spec), "user:conveyor")
            self.waiting.setdefault(name, time.monotonic())
            number += 97
            await asyncio.sleep(1.0)

    async def _watch(self, until: float) -> None:
        """Measure how long jobs wait until they are composed, to a tenth of a second."""
        while time.monotonic() < until or self.waiting:
            now = time.monotonic()
            for name, since in list(self.waiting.items()):
                record = self.cp._jobs.get(name)
                self.behind_s = max(self.behind_s, now - since)
                going = sum(1 for t in record.tasks if t.operation and t.operation.kind == "remove")
                if is_composed(record) and len(record.tasks) - going == record.spec.tasks:
                    del self.waiting[name]
            await asyncio.sleep(0.1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = asyncio.run(ManyJobs(options.jobs, options.seconds).run())
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:10}")


if __name__ == "__main__":
    main()
