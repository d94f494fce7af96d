"""How well jobs are placed: by the allocator, by the baselines, and at best."""

from __future__ import annotations

import argparse
import time
from typing import Any

from msgspec.structs import replace

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.store.bulk import put_all
from control_plane.store.records import ENTITLEMENTS, MACHINES, encode
from control_plane.store.sqlite import SqliteStore
from tests.bench.placement_engines import ENGINES
from tests.bench.placement_floors import (
    BestFit,
    FullScan,
    Machines,
    Placed,
    optimum,
    quality,
    small_instance,
)
from tests.bench.placement_region import as_entry, entitlements_of, region_of
from tests.generated_jobs import make_jobs

Figures = dict[str, Any]


FLOOR_S = 1.0
"""Least time for which a baseline is measured."""


async def floors(options: argparse.Namespace) -> Figures:
    """Measure the simple allocators, each for at least a second, by repeating the same jobs."""
    entitlements = entitlements_of(options.machines, options.seed)
    jobs = [as_entry(job) for job in make_jobs(entitlements, options.seed)]
    kinds_of = {e.name: e.spec.machine_types for e in entitlements}
    machines = Machines(region_of(options.machines, options.seed))
    fresh = [job for job in jobs if 20 <= job[3] <= 60][:1000]
    found: Figures = {}
    for name, kind in (("scan", FullScan), ("best-fit", BestFit)):
        floor: Any = kind(machines)
        done, took, computing = 0, 0.0, 0.0
        while took < FLOOR_S:
            placed = []
            for _, entitlement, demand, tasks in fresh:
                kinds = [machines.kinds[k] for k in kinds_of[entitlement] if k in machines.kinds]
                owner = machines.owners.setdefault(entitlement, len(machines.owners))
                began, before = time.perf_counter(), time.process_time()
                placed.append((floor.place(owner, kinds, demand, tasks), demand))
                computing += time.process_time() - before
                took += time.perf_counter() - began
                if took >= FLOOR_S:
                    break
            done += len(placed)
            for numbers, demand in placed:
                floor.free(numbers, demand)
        found[name] = {
            "jobs_per_s": round(done / took),
            "jobs_per_cpu_s": round(done / computing),
            "s": round(took, 2),
        }
    return found


async def judged(options: argparse.Namespace) -> Figures:
    """Return the quality of all allocators on one region, each placing all its jobs."""
    entitlements = entitlements_of(options.machines, options.seed)
    jobs = [as_entry(job) for job in make_jobs(entitlements, options.seed)]
    kinds_of = {e.name: e.spec.machine_types for e in entitlements}
    machines = Machines(region_of(options.machines, options.seed))
    found: Figures = {}
    for name, kind in (("scan", FullScan), ("best-fit", BestFit)):
        floor: Any = kind(machines)
        placed = {}
        for job, entitlement, demand, tasks in jobs:
            kinds = [machines.kinds[k] for k in kinds_of[entitlement] if k in machines.kinds]
            numbers = floor.place(
                machines.owners.setdefault(entitlement, len(machines.owners)), kinds, demand, tasks
            )
            placed[job] = Placed(tasks, demand, [machines.names[n] for n in numbers])
        found[name] = quality(machines, placed)
    async with ENGINES[options.engine](options.dir) as engine:
        await engine.load()
        placed = {}
        for job in jobs:
            names = list((await engine.allocate(*job))[:])
            placed[job[0]] = Placed(job[3], job[2], names)
        found[options.engine] = quality(machines, placed)
    return found


async def small(options: argparse.Namespace) -> Figures:
    """Return all allocators and the optimum on an instance of 40 machines."""
    records, jobs = small_instance(options.seed)
    records = [replace(r, entitlement="web", assignment_generation=1) for r in records]
    for datacenter in {r.location.datacenter for r in records}:
        async with SqliteStore(options.dir / "brokers" / datacenter) as store:
            own = [r for r in records if r.location.datacenter == datacenter]
            await put_all(store, ((f"{MACHINES}{datacenter}/{r.machine}", encode(r)) for r in own))
    spec = EntitlementSpec(machines=len(records))
    async with SqliteStore(options.dir / "allocator") as store:
        entitlement = EntitlementRecord(name="web", spec=spec)
        await put_all(store, [(ENTITLEMENTS + "web", encode(entitlement))])
    machines = Machines(records)
    found: Figures = {}
    for name, kind in (("scan", FullScan), ("best-fit", BestFit)):
        floor: Any = kind(machines)
        placed = {}
        for number, (demand, tasks) in enumerate(jobs):
            at = floor.place(machines.owners["web"], range(len(machines.kinds)), demand, tasks)
            placed[str(number)] = Placed(tasks, demand, [machines.names[n] for n in at])
        found[name] = quality(machines, placed)
    async with ENGINES[options.engine](options.dir) as engine:
        await engine.load()
        placed = {}
        for number, (demand, tasks) in enumerate(jobs):
            names = list((await engine.allocate(f"j{number}", "web", demand, tasks))[:])
            placed[str(number)] = Placed(tasks, demand, names)
        found[options.engine] = quality(machines, placed)
    found["optimum"] = optimum(machines, jobs)
    return found
