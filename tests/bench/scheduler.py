"""Can one scheduler shard carry 50,000 machines, 500,000 tasks, and a stream of events?

    python -m tests.bench.scheduler [--machines 50000] [--tasks 500000] [--jobs 20000] [--json]

`decide_1000_ms` and `decide_15000_ms` are the decision about one job with this number of tasks, the
worse of a health change and a round of a release (goals: 20 and 300 ms). The other figures are of
the assembled control plane on SQLite, with agents in memory, whose jobs have run for a long time.
`start_s` is the time until every machine has reported. `start_cpu_s` is the CPU time until every
job has had a round, too. `events_per_s` is the number of task events received, decided and stored
per second of CPU time without the idle part. `idle_percent` is the idle share of a core, `rss_mb`
the memory. `other_jobs_factor` is the cost of an event with all other jobs over the cost in a
region with the measured jobs alone (goal: 1.2).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from agent import api
from agent.api import Health, Limits, Location, ProfileState, TaskState
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.jobs import (
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
    UpdatePolicy,
    task_id,
)
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.api.stored_jobs import chunks_of, intent_of
from control_plane.broker.keys import prefix_of
from control_plane.roles import ControlPlane
from control_plane.runtime.garbage import permanent_heap
from control_plane.runtime.runtime import Runtime
from control_plane.store.bulk import put_all
from control_plane.store.records import ENTITLEMENTS, JOBS, encode, task_chunk_key
from control_plane.store.sqlite import SqliteStore
from tests.bench.decide import measured
from tests.bench.hosts_in_memory import IMAGE, Host, Hosts, find_image, image_of

MSBS, DATACENTERS = 12, 4
QUERIED_JOBS, QUERIED_TASKS = 1000, 5
"""Jobs that get events, in one task each: the same ones with and without others."""
EVENTS, IDLE_ROUNDS, WAIT_MAX_S = 20_000, 3, 3600.0
"""The number of events is so large that their cost exceeds the idle cost by far."""
IDLE_S = SchedulerSettings().resync_s + 1.0
"""The idle period includes the resync of all jobs, often at once."""
TASK = Limits(memory_max_bytes=1 << 30, cpu_max_cores=0.5)


class Region:
    """Machines and jobs that have existed for a long time."""

    def __init__(self, machines: int, tasks: int, jobs: int) -> None:
        """The `jobs` in addition to those with events share the tasks evenly."""
        self.hosts, self.names = Hosts(), [f"m{n:06}" for n in range(machines)]
        queried = QUERIED_JOBS * QUERIED_TASKS
        each = max(1, (tasks - queried) // jobs) if jobs else 0
        sizes = [QUERIED_TASKS] * QUERIED_JOBS + [each] * jobs
        self.sizes = {f"job{number}": size for number, size in enumerate(sizes)}
        self.tasks = sum(sizes)

    def rows(self) -> Iterator[tuple[str, bytes]]:
        """Yield all records for the store, and have the hosts run the tasks."""
        for number, name in enumerate(self.names):
            yield self._machine(number, name)
        spec = EntitlementSpec(machines=len(self.names), host_profile="web")
        yield ENTITLEMENTS + "e0", encode(EntitlementRecord(name="e0", spec=spec))
        at = 0
        for name, size in self.sizes.items():
            record = self._job(name, size, at)
            at += size
            yield JOBS + name, encode(intent_of(record))
            for number, chunk in chunks_of(record).items():
                yield task_chunk_key(name, number), encode(chunk)

    def _machine(self, number: int, name: str) -> tuple[str, bytes]:
        msb = number % MSBS
        dc, rack = f"dc{msb % DATACENTERS}", f"r{msb}-{number // 480}"
        place = Location(datacenter=dc, msb=f"msb{msb}", rack=rack)
        record: MachineRecord = replace(
            self.hosts.add(name, place),
            entitlement="e0",
            assignment_generation=1,
            profile_wanted="web",
            profile="web",
            profile_state=ProfileState.VERIFIED,
        )
        host = self.hosts.by_name[name]
        host.images.append(image_of(IMAGE))
        host.profile = api.ProfileStatus(name="web", generation=1, state=ProfileState.VERIFIED)
        return prefix_of(place.datacenter) + name, encode(record)

    def _job(self, name: str, size: int, first: int) -> JobRecord:
        spec = JobSpec(
            name=name,
            entitlement="e0",
            tasks=size,
            image=IMAGE,
            command=["/bin/serve"],
            environment={"RELEASE": "1"},
            limits=TASK,
            update=UpdatePolicy(max_unavailable=max(1, size // 5), drain_s=1),
        )
        tasks = []
        for index in range(size):
            host = self.hosts.by_name[self.names[(first + index) % len(self.names)]]
            tasks.append(
                TaskRecord(
                    index=index,
                    version=1,
                    generation=index + 1,
                    phase=TaskPhase.RUNNING,
                    placement=Placement(machine=host.name),
                    listed=True,
                )
            )
            self._run(host, name, index)
        return JobRecord(
            name=name, spec=spec, version=1, specs={1: spec}, tasks=tasks, generation=size
        )

    @staticmethod
    def _run(host: Host, job: str, index: int) -> None:
        name = task_id(job, index)
        status = api.TaskStatus(
            task_id=name,
            generation=index + 1,
            epoch=1,
            state=TaskState.RUNNING,
            health=Health.HEALTHY,
            image=IMAGE,
            entitlement="e0",
            job=job,
        )
        host.tasks[name] = (status, "1")

    def hosts_of(self, job: int) -> Iterator[tuple[Host, str]]:
        """Yield the hosts of the tasks of the jobs with events."""
        for index in range(QUERIED_TASKS):
            at = job * QUERIED_TASKS + index
            yield self.hosts.by_name[self.names[at % len(self.names)]], task_id(f"job{job}", index)


async def run(machines: int, tasks: int, jobs: int) -> dict[str, float]:
    """Return the cost of events in such a region."""
    region = Region(machines, tasks, jobs)
    settings = SchedulerSettings(
        brake_share=1.0, join_grace_s=0, down_after_s=600, poll_wait_s=60, repair_after_s=1e9
    )
    with tempfile.TemporaryDirectory(prefix="twine-bench-") as folder:
        async with SqliteStore(Path(folder)) as store:
            await put_all(store, region.rows())
            began, used = time.perf_counter(), time.process_time()
            with permanent_heap():
                agents, runtime = region.hosts.agent, Runtime(seed=1)
                cp = ControlPlane(store, agents, runtime, settings, find_image, PortalSettings())
                await cp.__aenter__()
            try:
                silent = list(region.names)
                await _until(lambda: _all_reported(cp, silent))
                start_s = time.perf_counter() - began
                _report(f"{machines} machines reported", began, used)
                await _until(cp.shards.all[0].scheduler._workers.is_idle)
                _report(f"{len(region.sizes)} jobs looked at", began, used)
                start_cpu_s = time.process_time() - used
                idle, cost_s = await _events(cp, region)
            finally:
                await cp.__aexit__(None, None, None)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "machines": machines,
        "tasks": region.tasks,
        "start_s": round(start_s, 1),
        "start_cpu_s": round(start_cpu_s, 1),
        "event_ms": round(cost_s * 1e3, 3),
        "idle_percent": round(100 * idle, 2),
        "rss_mb": round(rss),
    }


def _report(what: str, began: float, used: float) -> None:
    took, computed = time.perf_counter() - began, time.process_time() - used
    print(f"{what} after {took:.1f} s, {computed:.1f} s of CPU", file=sys.stderr, flush=True)


def _all_reported(cp: ControlPlane, silent: list[str]) -> bool:
    """Return whether every machine has reported; `silent` keeps only those that have not."""
    while silent and cp._observations.observation(silent[-1]).answering:
        silent.pop()
    return not silent


async def _events(cp: ControlPlane, region: Region) -> tuple[float, float]:
    """Return the share of a core without events, and the CPU time of one event, in seconds.

    Each task with events fails and is healthy again.
    """
    idle = await _standing_still()
    began, used, events = time.perf_counter(), time.process_time(), 0
    for health in (Health.UNHEALTHY, Health.HEALTHY) * (EVENTS // (2 * QUERIED_JOBS)):
        for job in range(QUERIED_JOBS):
            host, task = next(region.hosts_of(job))
            status, release = host.tasks[task]
            changed = replace(status, health=health)
            host.tasks[task] = (changed, release)
            host.send_event("task", task, changed)
            events += 1
        await _until(lambda wanted=health: _all_show(cp, wanted))
    took = time.perf_counter() - began
    computed = time.process_time() - used
    _report(f"{events} events, {idle:.1%} of a core without any,", began, used)
    return idle, max(1e-6, (computed - idle * took) / events)


async def _standing_still() -> float:
    """Return the share of a core that an idle region costs, once all work is done."""
    least = float("inf")
    for _ in range(IDLE_ROUNDS):
        began, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(IDLE_S)
        share = (time.process_time() - used) / (time.perf_counter() - began)
        if share > 0.9 * least:
            return min(share, least)
        least = share
    return least


def _all_show(cp: ControlPlane, health: Health) -> bool:
    """Return whether the records of all jobs with events show the change."""
    records = (cp._jobs.get(f"job{job}") for job in range(QUERIED_JOBS))
    return all(record.tasks[0].health is health for record in records)


async def _until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(WAIT_MAX_S):
        while not holds():
            await asyncio.sleep(0.05)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=50_000)
    parser.add_argument("--tasks", type=int, default=500_000)
    parser.add_argument("--jobs", type=int, default=20_000, help="besides those that are asked")
    parser.add_argument("--one", action="store_true", help="only that region, no comparison")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = asyncio.run(run(options.machines, options.tasks, options.jobs))
    if not options.one:
        small = ["--machines", str(options.machines), "--tasks", "0", "--jobs", "0"]
        line = [sys.executable, "-m", "tests.bench.scheduler", "--one", "--json", *small]
        answer = subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True)
        alone = json.loads(answer.stdout.splitlines()[-1])
        figures["alone_event_ms"] = alone["event_ms"]
        figures["other_jobs_factor"] = round(figures["event_ms"] / alone["event_ms"], 2)
        figures["events_per_s"] = round(1e3 / figures["event_ms"])
        for tasks in (1_000, 15_000):
            found = measured(tasks)
            worst = max(found[f"health_ms_{tasks}"], found[f"release_ms_{tasks}"])
            figures[f"decide_{tasks}_ms"] = worst
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:g}")


if __name__ == "__main__":
    main()
