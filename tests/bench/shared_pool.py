"""Can 20 shards share one free pool of a million machines, and what would a federation do?

    python -m tests.bench.shared_pool [--machines 1000000] [--shards 20] [--tasks 4800] [--json]

The allocator's production cores, one shard after the other, in memory. Brokers know the owner of
each machine and change it by compare-and-set. The knowledge of a shard is one shard old. It does
not see which machines the previous shard took, plans for the same best machines, is refused, and
reads the rest. At the end every machine that a task holds has one owner, which is its shard's
entitlement.

Figure 13 of the Twine paper: a federation has clusters of fixed size. Job B outgrows its cluster
and is split over two; a shard takes machines from the region's free pool, and job B stays whole.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.transactions import Allocation, Allocations
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Kinds
from control_plane.broker.holds import Take
from control_plane.store.memory import MemoryStore
from vm_lab.region.generator import make_region
from wire.errors import Conflict, FieldError

JOB_TASKS = 600
"""Tasks of one job; each needs a whole machine."""
WHOLE = Demand(memory_bytes=33 << 30, rru=0.6)
"""Two of these fit on no machine of `make_region` with 64 GiB; larger ones may take several."""


@dataclass
class Owners:
    """All brokers: the owner of each machine, changed by compare-and-set."""

    machines: dict[str, str] = field(default_factory=dict)
    """Machine → the entitlement that it belongs to; a free one is missing."""
    held: dict[str, Mapping[str, Take]] = field(default_factory=dict)
    refused: int = 0
    """Requested machines that belonged to others."""


class Shard:
    """One shard's allocator: an index of the whole region, which may be old, and its own jobs."""

    def __init__(
        self,
        number: int,
        records: Iterable[MachineRecord],
        owners: Owners,
        known: Mapping[str, str],
    ) -> None:
        """Build the index from what is `known`, which may be old."""
        self.pool, self.owners = f"ent-{number:02}", owners
        self.index, self._kinds = RegionIndex(), Kinds()
        for record in records:
            self._put(record, known.get(record.machine, FREE))

    def _put(self, record: MachineRecord, pool: str) -> None:
        kinds = self._kinds
        self.index.put(record.machine, kinds.capacity(record), kinds.place(record), pool, "")

    def _catch_up(self) -> None:
        """Read the present owners from the brokers."""
        for name, owner in self.owners.machines.items():
            machine = self.index.machines[name]
            if machine.pool != owner:
                self.index.put(name, machine.capacity, machine.place, owner, machine.blocked)

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all machines at their brokers, or none; after a refusal read the present owners."""
        taken = {name: own for name in takes if (own := self.owners.machines.get(name))}
        if taken:
            self.owners.refused += len(taken)
            self._catch_up()
            errors = tuple(FieldError(field=n, reason=f"is {o}'s") for n, o in taken.items())
            raise Conflict(f"cannot hold {len(takes)} machines", errors=errors)
        self.owners.held[transaction] = takes

    async def commit(self, transaction: str) -> None:
        """Assign the held machines."""
        takes = self.owners.held.pop(transaction, {})
        self.owners.machines |= {name: take.entitlement for name, take in takes.items()}

    async def abort(self, transaction: str) -> None:
        """Release the held machines."""
        self.owners.held.pop(transaction, None)

    def in_doubt(self) -> Mapping[str, object]:
        """Return the held machines."""
        return self.owners.held

    async def place(self, jobs: int, tasks: int) -> list[Allocation]:
        """Place `jobs` jobs of `tasks` tasks each, one after the other."""
        async with MemoryStore() as store:
            allocations = Allocations(store, self.index, self)
            made = []
            for number in range(jobs):
                groups = (Group(WHOLE, tuple(range(tasks))),)
                request = Request(f"{self.pool}-job-{number}", self.pool, groups)
                made.append(await allocations.allocate(request, Allowance, "web"))
            await allocations.close()
            return made


def holders(made: Iterable[Allocation]) -> set[str]:
    """Return the machines that tasks of these allocations are on."""
    return {claim.machine.name for one in made if one.claims is not None for claim in one.claims}


def share(machines: int, shards: int, tasks: int) -> dict[str, float]:
    """Let one shard after the other place its jobs; check that no machine has two owners."""
    records, owners, known = list(make_region(machines)), Owners(), dict[str, str]()
    began, placed, unplaced = time.process_time(), 0, 0
    held: dict[str, int] = {}
    per_shard: list[float] = []
    for number in range(shards):
        start = time.process_time()
        shard = Shard(number, records, owners, known)
        known = dict(owners.machines)  # the next shard's knowledge: without this shard's changes
        made = asyncio.run(shard.place(max(1, tasks // JOB_TASKS), min(tasks, JOB_TASKS)))
        for name in holders(made):
            if name in held or owners.machines[name] != shard.pool:
                raise AssertionError(f"{name} has two owners: shards {held.get(name)} and {number}")
            held[name] = number
        placed += sum(len(list(one.claims)) for one in made if one.claims is not None)
        unplaced += sum(len(one.unplaced) for one in made)
        per_shard.append(time.process_time() - start)
        del shard
        gc.collect()
    if set(owners.machines) - set(held):
        raise AssertionError("machines belong to an entitlement that has no task there")
    counts = Counter(held.values())
    return {
        "machines": len(records),
        "shards": shards,
        "tasks_placed": placed,
        "tasks_unplaced": unplaced,
        "machines_taken": len(held),
        "machines_with_two_owners": 0,
        "machines_per_shard_min": min(counts.values()),
        "machines_per_shard_max": max(counts.values()),
        "refused_by_brokers": owners.refused,
        "shard_cpu_s_first": round(per_shard[0], 2),
        "shard_cpu_s_last": round(per_shard[-1], 2),
        "cpu_s": round(time.process_time() - began, 1),
    }


def figure_13(machines: int, shards: int) -> dict[str, float]:
    """Let job B outgrow one cluster, in a federation and in one sharded region."""
    records = list(make_region(machines))
    size = len(records) // shards
    clusters = [records[n * size : (n + 1) * size] for n in range(shards)]
    others, before, grown = int(size * 0.6), int(size * 0.3), int(size * 0.7)

    def allocated(index: RegionIndex, *jobs: tuple[str, int]) -> list[Allocation]:
        async def all_of_them() -> list[Allocation]:
            async with MemoryStore() as store:
                shard = Shard(0, (), Owners(), {})
                shard.index = index
                allocations = Allocations(store, index, shard)
                made = []
                for job, tasks in jobs:
                    groups = (Group(WHOLE, tuple(range(tasks))),)
                    request = Request(job, f"ent-{job[0]}", groups)
                    made.append(await allocations.allocate(request, Allowance, "web"))
                await allocations.close()
                return made

        return asyncio.run(all_of_them())

    first = Shard(0, clusters[0], Owners(), {}).index
    *_, left = allocated(first, ("a", others), ("b", before), ("b", grown))
    second = Shard(1, clusters[1], Owners(), {}).index
    (rest,) = allocated(second, ("b-second", len(left.unplaced)))
    region = Shard(0, records, Owners(), {}).index
    *_, whole = allocated(region, ("a", others), ("b", before), ("b", grown))
    return {
        "cluster_machines": size,
        "job_b_tasks": grown,
        "federation_clusters_of_b": 1 + bool(left.unplaced),
        "federation_tasks_in_second_cluster": len(left.unplaced) - len(rest.unplaced),
        "sharding_shards_of_b": 1,
        "sharding_tasks_unplaced": len(whole.unplaced),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=4800, help="of each shard")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    gc.disable()  # a collection over all these objects takes as long as creating them
    figures = share(options.machines, options.shards, options.tasks)
    gc.collect()
    figures |= figure_13(options.machines, options.shards)
    figures["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:36} {value:g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
