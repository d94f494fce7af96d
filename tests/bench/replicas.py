"""What do three replicas of every role cost while idle, and how long is a shard unavailable?

    python -m tests.bench.replicas [--machines 1000] [--seconds 60] [--rounds 6] [--ttl 4] [--json]

Three processes of the core and three of one shard on one etcd member, with production agents on
machines in memory, one task each, half of them of the shard. `idle_percent` is the CPU use of all
six in percent of one core, `mib` the sum of their resident memory, without etcd. `standbys_percent`
and `standbys_mib` are the parts of both that redundancy adds. `shard_takeover_s` is from SIGKILL of
the shard's leader to the first request about one of its jobs that succeeds through the core (goal:
the lease and 1 s). The killed process restarts as a standby. Goals: 15 % of a core and 900 MB for
1,000 machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.takeover import percentile
from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import PlaneProcess, RegionOfProcesses, region_of_processes, used
from wire.errors import TwineError

_PAUSE_S = 0.02
_MIB = 1 << 20
_IN_STANDBY = "standing by"


def main() -> None:
    """Measure, and print one JSON line or one line for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which nothing happens")
    parser.add_argument("--rounds", type=int, default=6, help="of killing the shard's leader")
    parser.add_argument("--ttl", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with etcd_cluster(1) as cluster, tempfile.TemporaryDirectory(prefix="tre-") as folder:
        found = asyncio.run(measured(Path(folder), cluster, given))
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:g}")


async def measured(folder: Path, cluster: Cluster, given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one region."""
    async with region_of_processes(folder, cluster, 2, given.ttl) as region:
        shards = [region.processes[1], *(another_replica(region, f"shard1-{n}", 1) for n in "bc")]
        for name in ("core-b", "core-c"):
            another_replica(region, name, 0)
        for process in region.processes[2:]:
            await process.until_logged(_IN_STANDBY)
        try:
            await employ(region, given.machines)
            found = {"machines": float(given.machines)} | await idle(region, given.seconds)
        except (AssertionError, TwineError, OSError) as e:
            raise SystemExit(f"{e}; {ended(region) or 'all processes run'}") from e
        took = sorted([await takeover_s(region, shards) for _ in range(given.rounds)])
        if took:
            found["shard_takeover_s_p50"] = round(statistics.median(took), 2)
            found["shard_takeover_s_p99"] = round(percentile(took, 0.99), 2)
        return found


async def employ(region: RegionOfProcesses, machines: int) -> None:
    """Let hosts join, and run a job on half of them in each shard."""
    await region.join(machines)
    image, half = await region.image(), machines // 2
    for number in (0, 1):
        await region.entitle(f"e{number}", half, number)
        await region.run(f"j{number}", f"e{number}", half, image)


def ended(region: RegionOfProcesses) -> str:
    """Return the processes that ended without a command, and their last output.

    They are not restarted here. On a host that is too busy for `--ttl` a leader loses its lease and
    has to end, and its socket refuses connections.
    """
    gone = (p for p in region.processes if p.process is not None and p.process.poll() is not None)
    return "; ".join(f"{p.name} ended: {p.log.read_text().splitlines()[-1]}" for p in gone)


def another_replica(region: RegionOfProcesses, name: str, shard: int) -> PlaneProcess:
    """Start one more replica: of a shard, or of the core, which has the same authority."""
    made = region.made(name, "shard" if shard else "core", shard)
    if not shard:
        shutil.copy(region.folder / "core" / "authority.pem", region.folder / name)
    made.start()
    return made


async def idle(region: RegionOfProcesses, seconds: float) -> dict[str, float]:
    """Return the CPU use of all processes while idle, and their memory."""
    began, at = [used(p)[0] for p in region.processes], time.monotonic()
    await asyncio.sleep(seconds)
    passed, now = time.monotonic() - at, [used(p) for p in region.processes]
    percent = [100 * (n[0] - b) / passed for n, b in zip(now, began, strict=True)]
    mib = [memory / _MIB for _, memory in now]
    return {
        "idle_percent": round(sum(percent), 2),
        "standbys_percent": round(sum(percent[2:]), 2),
        "mib": round(sum(mib), 1),
        "standbys_mib": round(sum(mib[2:]), 1),
    }


async def takeover_s(region: RegionOfProcesses, shards: list[PlaneProcess]) -> float:
    """Kill the shard's leader, and return after how long a request about its job succeeds."""
    leader = next(process for process in shards if leads(process))
    leader.end()
    began = time.monotonic()
    while True:
        try:
            await region.client.change_job("restart", "j1")
            break
        except (TwineError, OSError):
            await asyncio.sleep(_PAUSE_S)
    took = time.monotonic() - began
    await region.until(lambda: region.is_stable("j1"), "j1 is stable again")
    standbys_before = leader.log.read_text().count(_IN_STANDBY)
    leader.start()
    while leader.log.read_text().count(_IN_STANDBY) == standbys_before:
        await asyncio.sleep(_PAUSE_S)
    return took


def leads(process: PlaneProcess) -> bool:
    """Return whether a process leads, by the last state in its log."""
    log = process.log.read_text()
    return log.rfind("serving at") > log.rfind(_IN_STANDBY)


if __name__ == "__main__":
    main()
