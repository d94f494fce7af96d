"""What does a machine cost with one, two and four shards in separate processes?

    python -m tests.bench.shards [--machines 20] [--shards 1 2 4] [--seconds 30] [--json]

A core and this number of shard processes run on one etcd, with production agents on machines in
memory, `--machines` for each shard, one task each. `cpu_ms_N` is the CPU milliseconds per machine
and minute of all processes of N idle shards: polls, and following the store. `restart_ms_N` is
their CPU time per machine to restart every task, in all shards at once, minus their idle CPU time
in that period. `mib_N` is the memory of one such process. `growth` and `restart_growth` are
`cpu_ms` and `restart_ms` with the most shards over those with the fewest (goal: 0.85 to 1.15, which
is what "scales out" means). `forwarded_ms` is the median time of a request about a job in another
process, minus that about one in the core's own shard (goal: 1 ms).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import RegionOfProcesses, region_of_processes, used

_QUERIES = 200
"""Number of requests; the median of their times is the figure."""


def main() -> None:
    """Measure, and print one JSON line or one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=20, help="for each shard")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=30.0, help="for which nothing happens")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[str, float] = {}
    for shards in given.shards:
        with etcd_cluster(1) as cluster, tempfile.TemporaryDirectory(prefix="tsh-") as folder:
            work = measured(Path(folder), cluster, shards, given.machines, given.seconds)
            found |= asyncio.run(work)
    first, last = min(given.shards), max(given.shards)
    for name, of in (("growth", "cpu_ms"), ("restart_growth", "restart_ms")):
        found[name] = round(found[f"{of}_{last}"] / found[f"{of}_{first}"], 2)
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:16} {value:g}")


async def measured(
    folder: Path, cluster: Cluster, shards: int, machines: int, seconds: float
) -> dict[str, float]:
    """Return the figures of a region with this number of shard processes."""
    async with region_of_processes(folder, cluster, shards + 1) as region:
        await region.join(machines * shards + 1)
        image = await region.image()
        await region.entitle("own", 1, 0)
        await region.run("own", "own", 1, image)
        for number in range(1, shards + 1):
            await region.entitle(f"e{number}", machines, number)
            await region.run(f"j{number}", f"e{number}", machines, image)
        everything = machines * shards
        began, began_at = cpu_s(region), time.monotonic()
        await asyncio.sleep(seconds)
        idle_s, minutes = cpu_s(region) - began, (time.monotonic() - began_at) / 60
        began, began_at = cpu_s(region), time.monotonic()
        jobs = [f"j{number}" for number in range(1, shards + 1)]
        await asyncio.gather(*(restarted(region, job, machines) for job in jobs))
        anyway_s = idle_s / minutes / 60 * (time.monotonic() - began_at)
        restart_s = cpu_s(region) - began - anyway_s
        found = {
            f"cpu_ms_{shards}": round(1000 * idle_s / minutes / everything, 1),
            f"restart_ms_{shards}": round(1000 * restart_s / everything, 1),
            f"mib_{shards}": round(max(used(p)[1] for p in region.processes[1:]) / (1 << 20), 1),
        }
        own_s, other_s = await answer_s(region, "own"), await answer_s(region, "j1")
        return found | {"forwarded_ms": round(1000 * (other_s - own_s), 2)}


def cpu_s(region: RegionOfProcesses) -> float:
    """Return the CPU seconds of all processes of shards."""
    return sum(used(process)[0] for process in region.processes[1:])


async def restarted(region: RegionOfProcesses, job: str, machines: int) -> None:
    """Restart every task of a job, and return when that is done."""
    await region.client.change_job("restart", job)

    async def is_done() -> bool:
        record = (await region.client.get_job(job)).record
        done = [t for t in record.tasks if t.version == record.version]
        return len(done) == machines and await region.is_stable(job)

    await region.until(is_done, f"{job} is restarted")


async def answer_s(region: RegionOfProcesses, job: str) -> float:
    """Return the median time of a request about a job, in seconds."""
    took = []
    for _ in range(_QUERIES):
        began = time.perf_counter()
        await region.client.get_job(job)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


if __name__ == "__main__":
    main()
