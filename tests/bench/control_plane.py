"""Which load can the assembled control plane carry, and how long are its pauses?

    python -m tests.bench.control_plane --machines 10000 [--json] [--idle-s 15]

All roles in one process on SQLite in a temporary folder, with agents in memory (`hosts_in_memory`).
Phases: start until every agent has reported, idle, deploy seven tasks for ten machines, change all
of them (a fifth at once), lose one MSB of twelve. Rate limits and brakes are raised, so that they
do not limit the measurement.

A pause is the time between two turns of a coroutine that sleeps for 2 ms; `max_pause_cpu_ms` is the
CPU time of the loop's thread in the worst of them, without the time that other processes got.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from agent.api import Limits, Location
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobProbe, JobSpec, UpdatePolicy
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.broker.keys import prefix_of
from control_plane.roles import ControlPlane
from control_plane.runtime.garbage import permanent_heap
from control_plane.runtime.runtime import Runtime
from control_plane.store.bulk import put_all
from control_plane.store.records import encode
from control_plane.store.sqlite import SqliteStore
from tests.bench.hosts_in_memory import IMAGE, Hosts, find_image

MSBS, DATACENTERS = 12, 4
JOB_TASKS = 500
SHARE = 0.7
"""Number of tasks per machine."""
HEARTBEAT_S = 0.002
PHASE_MAX_S = 1_200.0
UNCOUNTED = "uncounted"
"""The bench's own writes to the store, and its end."""
READS = 5_000
"""Number of machines that the bench itself examines in one turn: all of 50,000 take 39 ms."""


class Pauses:
    """The longest time without a turn for other coroutines, by phase."""

    def __init__(self) -> None:
        self.phase = "start"
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.held: dict[str, float] = {}
        """CPU time of the whole process, minus the allowance during the sleep."""

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = "between"

    async def watch(self) -> None:
        while True:
            began, used, all_used = time.perf_counter(), time.thread_time(), time.process_time()
            await asyncio.sleep(HEARTBEAT_S)
            passed = time.perf_counter() - began - HEARTBEAT_S
            computed = time.thread_time() - used
            held = time.process_time() - all_used - HEARTBEAT_S
            self.held[self.phase] = max(self.held.get(self.phase, 0.0), held)
            self.wall[self.phase] = max(self.wall.get(self.phase, 0.0), passed)
            self.cpu[self.phase] = max(self.cpu.get(self.phase, 0.0), computed)


class Bench:
    """One run of the bench."""

    def __init__(self, machines: int, idle_s: float, *, loaded: bool = True) -> None:
        self.machines, self.idle_s, self.loaded = machines, idle_s, loaded
        self.hosts, self.pauses, self.runtime = Hosts(), Pauses(), Runtime(seed=1)
        self.entitlements = max(1, machines // 5_000)
        self.jobs = max(1, round(machines * SHARE / JOB_TASKS))
        self.tasks = round(machines * SHARE) // self.jobs * self.jobs
        self.result: dict[str, float] = {"machines": machines, "tasks": self.tasks}
        self.unheard: list[str] = []
        self.cp: ControlPlane

    async def run(self) -> dict[str, float]:
        watching = asyncio.create_task(self.pauses.watch())
        with tempfile.TemporaryDirectory(prefix="twine-bench-") as folder:
            async with SqliteStore(Path(folder)) as store:
                await self._fill(store)
                with permanent_heap():
                    self.cp = self._control_plane(store)
                    await self.cp.__aenter__()
                try:
                    await self._phases()
                finally:
                    self.pauses.phase = UNCOUNTED  # clients are no longer served
                    await self.cp.__aexit__(None, None, None)
        watching.cancel()
        for seen in (self.pauses.wall, self.pauses.cpu, self.pauses.held):
            seen.pop(UNCOUNTED)
        self.result["max_pause_ms"] = ms(max(self.pauses.wall.values()))
        self.result["max_pause_cpu_ms"] = ms(max(self.pauses.cpu.values()))
        self.result |= {f"pause_{phase}_ms": ms(s) for phase, s in self.pauses.wall.items()}
        self.result |= {f"pause_{phase}_cpu_ms": ms(s) for phase, s in self.pauses.cpu.items()}
        self.result |= {f"held_{phase}_ms": ms(s) for phase, s in self.pauses.held.items()}
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.result["rss_mb"] = round(rss)
        return self.result

    async def _fill(self, store: SqliteStore) -> None:
        """Write the machines as if they had joined long ago; no client is served yet."""
        self.pauses.phase = UNCOUNTED
        records = []
        for number in range(self.machines):
            msb = number % MSBS
            location = Location(
                datacenter=f"dc{msb % DATACENTERS}", msb=f"msb{msb}", rack=f"r{msb}-{number // 480}"
            )
            record = self.hosts.add(f"m{number:06}", location)
            records.append((record, encode(record)))
        await put_all(
            store, ((prefix_of(r.location.datacenter) + r.machine, v) for r, v in records)
        )
        await asyncio.sleep(10 * HEARTBEAT_S)
        self.pauses.phase = "start"

    def _control_plane(self, store: SqliteStore) -> ControlPlane:
        settings = SchedulerSettings(
            destructive_per_s=1e6,
            destructive_burst=1_000_000,
            profile_switches_per_s=1e6,
            profile_switches_burst=1_000_000,
            mark_down_per_s=1e6,
            mark_down_burst=1_000_000,
            take_away_per_s=1e6,
            take_away_burst=1_000_000,
            capacity_loss_share=1.0,
            brake_share=1.0,
            join_grace_s=0,
        )
        return ControlPlane(
            store, self.hosts.agent, self.runtime, settings, find_image, PortalSettings()
        )

    async def _phases(self) -> None:
        self.unheard = list(self.hosts.by_name)
        async with self._phase("hear") as took:
            await self._until(self._all_reported)
        self.result["hear_all_s"] = took()
        async with self._phase("idle"):
            await asyncio.sleep(3.0)
            used = time.process_time()
            await asyncio.sleep(self.idle_s)
            idle = (time.process_time() - used) / self.idle_s * 100
        self.result["idle_cpu_percent"] = round(idle, 1)
        if not self.loaded:
            return
        for number in range(self.entitlements):
            share = self.machines // self.entitlements
            await self.cp.capacity.put_entitlement(f"e{number}", EntitlementSpec(machines=share))
        async with self._phase("deploy") as took:
            await self._apply("1")
            await self._until(lambda: self.hosts.running.get("1", 0) >= self.tasks)
        self.result["deploy_tasks_per_s"] = round(self.tasks / took(), 1)
        async with self._phase("update") as took:
            await self._apply("2")
            await self._until(lambda: self.hosts.running.get("2", 0) >= self.tasks)
        self.result["update_tasks_per_s"] = round(self.tasks / took(), 1)
        async with self._phase("msb_lost") as took:
            for number, host in enumerate(self.hosts.by_name.values()):
                if number % MSBS == 0:
                    host.power_off()
                if number % READS == 0:
                    await asyncio.sleep(0)
            await self._until(lambda: self.hosts.running.get("2", 0) >= self.tasks)
        self.result["msb_lost_recover_s"] = took()

    async def _apply(self, release: str) -> None:
        for number in range(self.jobs):
            tasks = self.tasks // self.jobs
            spec = JobSpec(
                name=f"job{number}",
                entitlement=f"e{number % self.entitlements}",
                tasks=tasks,
                image=IMAGE,
                command=["/bin/serve"],
                environment={"RELEASE": release},
                ports=["http"],
                probe=JobProbe(port="http"),
                limits=Limits(memory_max_bytes=6 << 30, cpu_max_cores=2),
                update=UpdatePolicy(max_unavailable=max(1, tasks // 5), drain_s=1),
            )
            await self.cp.apply_job(spec)

    def _all_reported(self) -> bool:
        observations = self.cp._observations
        for _ in range(READS):
            if not self.unheard or not observations.observation(self.unheard[-1]).answering:
                break
            self.unheard.pop()
        return not self.unheard

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PHASE_MAX_S):
            while not holds():
                await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[Callable[[], float]]:
        self.pauses.phase = name
        self.runtime.meter.reset()
        began, used, calls = time.perf_counter(), time.process_time(), self.hosts.calls
        try:
            yield lambda: round(time.perf_counter() - began, 1)
        finally:
            self._report(name, time.perf_counter() - began, time.process_time() - used, calls)

    def _report(self, name: str, took: float, used: float, calls: int) -> None:
        meter = self.runtime.meter
        actors = sorted(meter.busy_s.items(), key=lambda item: -item[1])
        steps = ", ".join(
            f"{actor} {busy:.1f} s (≤ {ms(meter.longest_s[actor])} ms)" for actor, busy in actors
        )
        print(
            f"{name}: {took:.1f} s, {used:.1f} s of CPU, {self.hosts.calls - calls} calls,"
            f" pause {ms(self.pauses.wall.get(name, 0))} ms"
            f" ({ms(self.pauses.cpu.get(name, 0))} computed): {steps}",
            file=sys.stderr,
            flush=True,
        )


def ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=1_000)
    parser.add_argument("--idle-s", type=float, default=15.0)
    parser.add_argument("--only-idle", action="store_true", help="Deploy nothing.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", metavar="FILE", help="Write what cProfile saw.")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    bench = Bench(options.machines, options.idle_s, loaded=not options.only_idle)
    if options.profile:
        import cProfile

        with cProfile.Profile() as profile:
            result = asyncio.run(bench.run())
        profile.dump_stats(options.profile)
    else:
        result = asyncio.run(bench.run())
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value:g}")


if __name__ == "__main__":
    main()
