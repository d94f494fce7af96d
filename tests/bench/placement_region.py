"""The seeded region that `placement.py` measures, and the jobs that it places there."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from control_plane.api.capacity import EntitlementRecord
from control_plane.api.machines import MachineRecord
from tests.bench.placement_floors import Demand
from tests.generated_jobs import GeneratedJob, assigned, make_entitlements
from vm_lab.region.generator import make_racks, make_region

TASKS = 36
ASSIGNED = 0.7
Entry = tuple[str, str, Demand, int]
"""Job, entitlement, demand, tasks."""


def entitlements_of(machines: int, seed: int) -> list[EntitlementRecord]:
    count = max(30, 3000 * machines // 1_000_000)
    return make_entitlements(count, round(machines * ASSIGNED), seed)


def region_of(machines: int, seed: int) -> Iterator[MachineRecord]:
    racks = make_racks(machines, seed=seed)
    return assigned(make_region(machines, seed=seed), racks, entitlements_of(machines, seed), seed)


def as_entry(job: GeneratedJob) -> Entry:
    return job.name, job.entitlement, Demand(job.rru, job.memory_bytes, gpus=job.gpus), job.tasks


def new_jobs(machines: int, seed: int, count: int, jobs: Sequence[GeneratedJob]) -> list[Entry]:
    """Return jobs of 36 tasks, shaped as those that run, in proportion to entitlements."""
    chance = random.Random(f"{seed} new {machines}")
    shapes = defaultdict(list)
    for job in jobs:
        shapes[job.entitlement].append(as_entry(job)[2])
    rooms = [e for e in entitlements_of(machines, seed) if e.name in shapes]
    rooms = [e for e in rooms if (e.spec.machines or 0) >= 4 * TASKS]
    weights = list(accumulate(e.spec.machines or 0 for e in rooms))
    return [
        (f"new-{number}", e.name, chance.choice(shapes[e.name]), TASKS)
        for number, e in enumerate(chance.choices(rooms, cum_weights=weights, k=count))
    ]
