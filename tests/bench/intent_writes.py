"""How many writes of intents a control plane takes, and what many writers cost it.

    python -m tests.bench.intent_writes [--json] [--jobs 10000] [--seconds 60] [--only writes|load]

- `writes_per_s`: sizes of 500 jobs written through the front end of a control plane of its own
  process, over TLS, each answered once it is on disk (goal: 1,000): one job a request by 48 writers
  (`single_…`), and 100 jobs a request by 4, as the autoscaler does it (`together_…`).
  `…_cpu_ms` is what that process computes for one. `store_per_s` is what the store alone takes
  in the same run of the same kind of transactions, three of them for each write, 300 in flight,
  and `together_ratio` the part of it that the front end reaches.
- `load_…`: a control plane with 10,000 jobs of one task and 1,000 hosts in memory. An autoscaler
  writes the size of each once a minute, 100 together, and lists all jobs in brief once a minute; a
  tenth of the writes change the size. Beside that a job is pushed to each second.
  `load_cpu_percent` is of one core, the writers and the hosts in memory included, and
  `load_idle_cpu_percent` the same without any writes; `load_behind_s` is the longest from the
  answer to a write until the job's tasks were composed for it (goals: 25 % and 5 s).
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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests/integration")]

from attack.face import Face, running  # noqa: E402

from agent.api import ImageFormat, Limits, Location  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.intent_wishes import PushWish, SizeWish  # noqa: E402
from control_plane.api.intents import Dimension  # noqa: E402
from control_plane.api.jobs import JobSpec, UpdatePolicy  # noqa: E402
from control_plane.api.settings import PortalSettings, SchedulerSettings  # noqa: E402
from control_plane.broker.keys import prefix_of  # noqa: E402
from control_plane.client import ControlPlaneClient  # noqa: E402
from control_plane.job_control.core.intents import is_composed  # noqa: E402
from control_plane.roles import ControlPlane  # noqa: E402
from control_plane.runtime.garbage import heap_that_stays  # noqa: E402
from control_plane.runtime.runtime import Runtime  # noqa: E402
from control_plane.store import Put  # noqa: E402
from control_plane.store.bulk import put_all  # noqa: E402
from control_plane.store.records import encode  # noqa: E402
from control_plane.store.sqlite import SqliteStore  # noqa: E402
from tests.bench.front_end import DIGEST, IMAGE, _url  # noqa: E402
from tests.bench.hosts_in_memory import IMAGE as RUNS  # noqa: E402
from tests.bench.hosts_in_memory import Hosts, find_image  # noqa: E402

WRITERS, TOGETHER, AT_ONCE, WRITTEN = 48, 4, 100, 500
MACHINES_PER_JOB = 0.1
CHANGES = 10
"""Of so many writes one changes the size."""
READY_S = 1_800.0


# -- through the front end


PutSizes = Callable[[ControlPlaneClient, int, int], Awaitable[int]]
"""Write sizes: with a client, as writer N, for the Nth time; returns how many were written."""


async def _one(client: ControlPlaneClient, number: int, count: int) -> int:
    job = f"job{(number + count * WRITERS) % WRITTEN}"
    wish = SizeWish(tasks=count % 3, reason=f"write {count} of writer {number}")
    await client.put_intent(job, Dimension.SIZE, wish)
    return 1


async def _many(client: ControlPlaneClient, number: int, count: int) -> int:
    wish = SizeWish(tasks=count % 3, reason=f"write {count} of writer {number}")
    first = number * AT_ONCE
    names = [f"job{(first + n) % WRITTEN}" for n in range(AT_ONCE)]
    answer = await client.put_sizes(dict.fromkeys(names, wish))
    assert not answer.refused, answer.refused
    return len(answer.versions)


async def writes_per_s(face: Face, seconds: float, writers: int, put: PutSizes) -> dict[str, float]:
    """Return the acknowledged writes in a second, and what one costs the control plane."""
    context = face.context("user", "root")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ControlPlaneClient(_url(face), context))
            for _ in range(writers)
        ]
        began, used = time.monotonic(), _cpu_s(face.process.pid)
        until = began + seconds

        async def writer(number: int) -> int:
            made = count = 0
            while time.monotonic() < until:
                made += await put(clients[number], number, count)
                count += 1
            return made

        made = sum(await asyncio.gather(*map(writer, range(writers))))
        took, used = time.monotonic() - began, _cpu_s(face.process.pid) - used
    name = put.__name__
    name = {"_one": "single", "_many": "together"}[name]
    return {
        f"{name}_writes_per_s": round(made / took, 1),
        f"{name}_cpu_ms": round(1e3 * used / made, 2),
    }


async def store_per_s(seconds: float) -> float:
    """Return how many writes a second the store alone takes: three transactions in turn."""
    with tempfile.TemporaryDirectory(prefix="twine-bench-") as folder:
        async with SqliteStore(Path(folder)) as store:
            until = time.monotonic() + seconds

            async def lane(number: int) -> int:
                made = revision = 0
                while time.monotonic() < until:
                    entry = f"audit/{number:08d}-{made}"
                    await store.txn({}, [Put(entry, b"a" * 300), Put("audit-head", b"1")])
                    key = f"jobs/job{number}"
                    revision = await store.txn({key: revision}, [Put(key, b"j" * 1500)])
                    await store.txn({}, [Put(entry, b"a" * 300)])
                    made += 1
                return made

            made = sum(await asyncio.gather(*map(lane, range(TOGETHER * AT_ONCE))))
            return made / seconds


async def _prepare(client: ControlPlaneClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield IMAGE

    await client.put_entitlement("front", EntitlementSpec(machines=3))
    await client.push_image(DIGEST, ImageFormat.TAR, chunks())
    for number in range(WRITTEN):
        command = ["/bin/true"]
        spec = JobSpec(
            name=f"job{number}", entitlement="front", tasks=0, image=DIGEST, command=command
        )
        await client.apply_job(spec)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_front_end(seconds: float) -> dict[str, float]:
    """Measure the writes through the front end."""
    with tempfile.TemporaryDirectory() as folder, running("control plane", Path(folder)) as face:

        async def granted() -> None:
            async with ControlPlaneClient(f"unix:{face.socket}") as client:
                await client.grant_operator("user:root")
                await _prepare(client)

        asyncio.run(granted())
        figures = asyncio.run(writes_per_s(face, seconds, WRITERS, _one))
        figures |= asyncio.run(writes_per_s(face, seconds, TOGETHER, _many))
    alone = asyncio.run(store_per_s(min(5.0, seconds)))
    ratio = figures["together_writes_per_s"] / alone
    return figures | {"store_per_s": round(alone, 1), "together_ratio": round(ratio, 3)}


# -- many jobs


class ManyJobs:
    """Jobs of one task, their autoscaler, and pushes."""

    def __init__(self, jobs: int, seconds: float) -> None:
        self.jobs, self.seconds = jobs, seconds
        self.machines = max(10, round(jobs * MACHINES_PER_JOB))
        self.hosts, self.runtime = Hosts(), Runtime(seed=1)
        self.cp: ControlPlane
        self.waiting: dict[str, float] = {}
        """Job → when its write was answered, until its tasks are composed for it."""
        self.behind_s, self.writes = 0.0, 0

    async def run(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="twine-bench-") as folder:
            async with SqliteStore(Path(folder)) as store:
                await self._fill(store)
                settings = SchedulerSettings(
                    **dict.fromkeys(("destructive_per_s", "profile_switches_per_s"), 1e6),
                    **dict.fromkeys(("destructive_burst", "profile_switches_burst"), 1_000_000),
                    join_grace_s=0,
                )
                with heap_that_stays():
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
                    return await self._measured()
                finally:
                    await self.cp.__aexit__(None, None, None)

    async def _fill(self, store: SqliteStore) -> None:
        records = []
        for number in range(self.machines):
            msb = number % 12
            where = Location(datacenter=f"dc{msb % 4}", msb=f"msb{msb}", rack=f"r{msb}")
            record = self.hosts.add(f"m{number:06}", where)
            records.append((prefix_of(where.datacenter) + record.machine, encode(record)))
        await put_all(store, iter(records))

    async def _measured(self) -> dict[str, float]:
        await self.cp.put_entitlement("e0", EntitlementSpec(machines=self.machines))
        for number in range(self.jobs):
            await self.cp.apply_job(self._spec(number, "1"))
        async with asyncio.timeout(READY_S):
            while self.hosts.running.get("1", 0) < self.jobs:
                await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        idle = await self._cpu(asyncio.sleep(self.seconds / 2))
        loaded = await self._cpu(self._load())
        return {
            "load_jobs": self.jobs,
            "load_writes_per_s": round(self.writes / self.seconds, 1),
            "load_idle_cpu_percent": idle,
            "load_cpu_percent": loaded,
            "load_behind_s": round(self.behind_s, 2),
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

    async def _cpu(self, work) -> float:  # type: ignore[no-untyped-def]
        began, used = time.perf_counter(), time.process_time()
        await work
        return round(100 * (time.process_time() - used) / (time.perf_counter() - began), 1)

    async def _load(self) -> None:
        until = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._autoscaler(until))
            group.create_task(self._pushes(until))
            group.create_task(self._look(until))

    async def _autoscaler(self, until: float) -> None:
        sizes, number = [1] * self.jobs, 0
        due, gap = time.monotonic(), 60.0 / self.jobs * AT_ONCE
        await self.cp.intents.briefs()
        while time.monotonic() < until:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    job = number % self.jobs
                    if number % CHANGES == 0:
                        sizes[job] = 3 - sizes[job]
                    wish = SizeWish(tasks=sizes[job], reason=f"load {number}")
                    group.create_task(self._resize(f"job{job}", wish))
                    number += 1
            if number % self.jobs == 0:
                await self.cp.intents.briefs()
            due += gap
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _resize(self, name: str, wish: SizeWish) -> None:
        await self.cp.intents.size(name, wish, "user:scaler")
        self.waiting.setdefault(name, time.monotonic())
        self.writes += 1

    async def _pushes(self, until: float) -> None:
        number = 7
        while time.monotonic() < until:
            name = f"job{number % self.jobs}"
            spec = self._spec(number % self.jobs, "2")
            await self.cp.intents.push(name, PushWish(spec=spec), "user:conveyor")
            self.waiting.setdefault(name, time.monotonic())
            number += 97
            await asyncio.sleep(1.0)

    async def _look(self, until: float) -> None:
        """Find out how long jobs wait until they are composed, to a tenth of a second."""
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
    parser.add_argument("--only", choices=("writes", "load"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: dict[str, float] = {}
    if options.only != "load":
        figures |= of_front_end(min(20.0, options.seconds))
    if options.only != "writes":
        figures |= asyncio.run(ManyJobs(options.jobs, options.seconds).run())
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:10}")


if __name__ == "__main__":
    main()
