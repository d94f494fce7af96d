"""The paper's Figures 11 and 12: CPU time of scheduler and allocator by number of machines in a
shard.

    python -m tests.bench.figure_11 [--sizes 5 10 20 40] [--seconds 30] [--out FOLDER] [--json]

A core and one shard process for each size run on one etcd. Production agents run on machines in
memory, with one task on each machine. Each shard has an entitlement of its size. For `--seconds`
the bench repeatedly removes half of the tasks of each job and places them again. Figure 11 is the
P99 of each process's CPU over one-second samples, in per cent of a core. Figure 12 is the CPU time
of its allocator, in milliseconds per second, from its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import RegionOfProcesses, region_of_processes, used

_ALLOCATOR = re.compile(rb"^twine_allocator_cpu_seconds_total (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class ShardPoint:
    """The measurement of one shard."""

    machines: int
    cpu_percent: float
    allocator_ms: float
    """CPU milliseconds per second."""
    mib: float


def main() -> None:
    """Measure, draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with etcd_cluster(1) as cluster, tempfile.TemporaryDirectory(prefix="tf11-") as folder:
        points = asyncio.run(measured(Path(folder), cluster, given.sizes, given.seconds))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        for name, title, values in pictures(points):
            (given.out / f"{name}.svg").write_text(svg_of(title, points, values))
    figures = {
        f"{of}_{point.machines}": value
        for point in points
        for of, value in (
            ("cpu_percent", round(point.cpu_percent, 1)),
            ("allocator_ms", round(point.allocator_ms, 2)),
            ("mib", round(point.mib, 1)),
        )
    }
    if given.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:18} {value:g}" for name, value in figures.items()))


def pictures(points: Sequence[ShardPoint]) -> list[tuple[str, str, list[float]]]:
    """Return name, title and values of each picture."""
    return [
        (
            "figure-11",
            "P99 CPU of a shard's process, % of a core, against its machines",
            [point.cpu_percent for point in points],
        ),
        (
            "figure-12",
            "CPU of a shard's allocator, ms per second, against its machines",
            [point.allocator_ms for point in points],
        ),
    ]


async def measured(
    folder: Path, cluster: Cluster, sizes: Sequence[int], seconds: float
) -> list[ShardPoint]:
    """Return a point for each size."""
    async with region_of_processes(folder, cluster, len(sizes) + 1, ttl_s=30) as region:
        await region.join(sum(sizes))
        image = await region.image()
        for number, size in enumerate(sizes, 1):
            await region.entitle(f"e{number}", size, number)
            await region.run(f"j{number}", f"e{number}", size, image)
        samples: list[list[float]] = [[] for _ in sizes]
        before = [await allocator_s(region, number) for number in range(1, len(sizes) + 1)]
        began = time.monotonic()
        working = [
            asyncio.create_task(again_and_again(region, number, size, image))
            for number, size in enumerate(sizes, 1)
        ]
        while time.monotonic() < began + seconds:
            known, at = [used(p)[0] for p in region.processes[1:]], time.monotonic()
            await asyncio.sleep(1.0)
            took = time.monotonic() - at
            for kept, process, cpu_s in zip(samples, region.processes[1:], known, strict=True):
                kept.append(100 * (used(process)[0] - cpu_s) / took)
        took = time.monotonic() - began
        after = [await allocator_s(region, number) for number in range(1, len(sizes) + 1)]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        return [
            ShardPoint(
                machines=size,
                cpu_percent=sorted(kept)[int(0.99 * (len(kept) - 1))],
                allocator_ms=1000 * (last - first) / took,
                mib=used(process)[1] / (1 << 20),
            )
            for size, kept, first, last, process in zip(
                sizes, samples, before, after, region.processes[1:], strict=True
            )
        ]


async def again_and_again(
    region: RegionOfProcesses, number: int, machines: int, image: str
) -> None:
    """Remove half of the tasks of a job and place them again, until cancelled."""
    while True:
        for tasks in (machines // 2, machines):
            await region.run(f"j{number}", f"e{number}", tasks, image)


async def allocator_s(region: RegionOfProcesses, shard: int) -> float:
    """Return the CPU seconds of a shard's allocator."""
    text = b"".join([chunk async for chunk in region.client.shard_metrics(shard)])
    found = _ALLOCATOR.search(text)
    assert found is not None
    return float(found[1])


def svg_of(title: str, points: Sequence[ShardPoint], values: Sequence[float]) -> str:
    """Return a picture with a dot for each shard."""
    width, height, edge = 640, 360, 50
    across, up = max(point.machines for point in points), max([*values, 1e-9])
    dots = []
    for point, value in zip(points, values, strict=True):
        x = edge + point.machines / across * (width - 2 * edge)
        y = height - edge - value / up * (height - 2 * edge)
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#36c"/>')
        dots.append(f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle">{value:.1f}</text>')
        dots.append(
            f'<text x="{x:.1f}" y="{height - edge + 18}" text-anchor="middle">'
            f"{point.machines}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{edge}" y="24">{title}</text>'
        f'<path d="M{edge} {edge}V{height - edge}H{width - edge}" fill="none" stroke="#999"/>'
        + "".join(dots)
        + "</svg>\n"
    )


if __name__ == "__main__":
    main()
