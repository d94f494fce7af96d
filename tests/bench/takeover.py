"""How long does a region have no control plane for writes after its leader is killed?

    python -m tests.bench.takeover [--rounds 20] [--ttl 4] [--machines 1000] [--json]

Two `twine-control-plane serve` on a real etcd cluster of three members. In each round the leader
gets SIGKILL, and a client writes to the standby's socket every 20 ms. `takeover_s` is the time from
the signal to the first write that succeeds. `lease_s` is its part until the successor reports that
it is the leader: the store's wait. `open_s` is the rest: the successor's own work. The killed
process restarts as the next standby. All members and both processes share this host.

The store holds records of machines, so that a take-over loads a region of that size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from control_plane.api.people import GroupSpec
from control_plane.client import ControlPlaneClient
from control_plane.config import EtcdSettings
from control_plane.store.bulk import put_all
from control_plane.store.etcd import EtcdStore
from control_plane.store.records import MACHINES, encode
from tests.etcd import Replica, etcd_cluster
from vm_lab.region.generator import make_region
from wire.errors import TwineError

PAUSE_S = 0.02


async def first_write(replica: Replica, number: int) -> float:
    """Return when a write succeeded for the first time, on `time.monotonic`."""
    async with ControlPlaneClient(f"unix:{replica.socket}") as client:
        while True:
            try:
                await client.put_group(f"g{number % 10}", GroupSpec(members=["ann"]))
                return time.monotonic()
            except (TwineError, OSError):
                await asyncio.sleep(PAUSE_S)


async def fill(urls: list[str], machines: int) -> None:
    """Write a region's machines."""
    async with EtcdStore(EtcdSettings(endpoints=urls, prefix="/t", ttl_s=60)) as store:
        await put_all(store, ((MACHINES + r.machine, encode(r)) for r in make_region(machines)))


def percentile(values: list[float], share: float) -> float:
    """Return the value at this quantile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(rounds: int, ttl_s: int, machines: int, folder: Path) -> dict[str, float]:
    """Kill the leader again and again."""
    lease: list[float] = []
    whole: list[float] = []
    with etcd_cluster(3, folder) as cluster, ExitStack() as stack:
        asyncio.run(fill(cluster.urls, machines))
        leader = Replica(folder, "r0", cluster.urls, ttl_s)
        stack.callback(lambda: leader.end())
        leader.until("serving at")
        for name in ("r1", "r2"):
            (folder / name).mkdir()
            shutil.copy(leader.state / "authority.pem", folder / name)
        standby = Replica(folder, "r1", cluster.urls, ttl_s)
        stack.callback(lambda: standby.end())
        standby.until("standing by")
        for number in range(rounds):
            name = leader.state.name
            began = time.monotonic()
            leader.end()
            standby.until("STATUS=leads")
            lease.append(time.monotonic() - began)
            whole.append(asyncio.run(first_write(standby, number)) - began)
            standby.until("serving at")
            leader, standby = standby, Replica(folder, name, cluster.urls, ttl_s)
            standby.until("standing by")
            print(f"{number}: {lease[-1]:.2f} {whole[-1]:.2f}", file=sys.stderr, flush=True)
    opened = [all_ - until for all_, until in zip(whole, lease, strict=True)]
    figures: dict[str, float] = {"rounds": rounds, "ttl_s": ttl_s, "machines": machines}
    for key, values in (("takeover_s", whole), ("lease_s", lease), ("open_s", opened)):
        figures[f"{key}_p50"] = round(statistics.median(values), 2)
        figures[f"{key}_p99"] = round(percentile(values, 0.99), 2)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ttl", type=int, default=EtcdSettings().ttl_s)
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        figures = measure(options.rounds, options.ttl, options.machines, Path(name))
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{key:18} {value:g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
