"""A region of 150 MW in twenty shards: the result of the rule for new entitlements, and the limit
of one scheduler.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from control_plane.api.ownership import ShardLoad
from control_plane.shards.core.scopes import least_loaded_first
from tests.bench.shard_limit import limit
from vm_lab.region.generator import make_racks

MACHINES, SHARDS, REGION_MW = 455_000, 20, 150.0
LARGEST = 60_000
"""Number of machines of the paper's largest entitlement."""
POOLS = {"web": 30, "compute": 12, "cache": 6, "storage": 6, "inference": 3, "training": 3}
"""Number of private pools, by the needs of their services: tens, as in the paper."""


def pools(seed: int) -> Iterator[tuple[int, float]]:
    """Yield the machines and megawatts of pools that share a whole region, in random order.

    A few are large and most are small; each has machines of its services' kind.
    """
    machines, power_w = defaultdict[str, int](int), defaultdict[str, int](int)
    for rack in make_racks(MACHINES, seed=seed):
        kind = rack.kind.name.partition("-")[0]
        machines[kind] += rack.size
        power_w[kind] += rack.size * rack.kind.hardware.power_w
    made = []
    for kind, count in POOLS.items():
        weights = [1 / (1 + n) for n in range(count)]
        for weight in weights:
            share = weight / sum(weights)
            size = min(LARGEST, round(machines[kind] * share))
            made.append((size, power_w[kind] / machines[kind] * size / 1e6))
    random.Random(seed).shuffle(made)
    return iter(made)


@pytest.mark.behaviour("SH11", "SH8")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shard_exceeds_its_share_of_power_only_by_one_pool(seed: int) -> None:
    """The mean is 7.5 of 150 MW; apart from its largest pool no shard has much more.

    The rule does not consider power: a shard with a pool of GPUs may have 21 MW.
    """
    loads = [ShardLoad(shard=n) for n in range(SHARDS)]
    power, largest = [0.0] * SHARDS, [0.0] * SHARDS
    for size, mw in pools(seed):
        shard = least_loaded_first(loads)[0]
        loads[shard] = ShardLoad(shard=shard, load=loads[shard].load + size)
        power[shard] += mw
        largest[shard] = max(largest[shard], mw)
    mean = sum(power) / SHARDS
    assert mean == pytest.approx(REGION_MW / SHARDS, rel=0.1)
    assert max(p - one for p, one in zip(power, largest, strict=True)) < 1.25 * REGION_MW / SHARDS
    assert max(power) < 3 * REGION_MW / SHARDS
    assert max(of.load for of in loads) < LARGEST + MACHINES / SHARDS


@pytest.mark.behaviour("SH17", "SH8")
def test_the_end_of_a_shard_is_where_its_line_meets_one_core() -> None:
    """Twice the events lower the limit, and a fixed part counts once."""
    points = [
        {"machines": n, "idle_percent": 5 + n / 1000, "rss_mb": 100 + n / 50, "event_ms": 0.9}
        | {"start_cpu_s": n / 500}
        for n in (1_000, 2_000, 5_000)
    ]
    quiet, busy = limit(points, 0.0), limit(points, 40.0)
    assert quiet["machines_at_one_core"] == 95_000
    assert quiet["gib_there"] == pytest.approx(2.0, abs=0.1)
    assert quiet["takeover_cpu_s_there"] == 190
    assert busy["machines_at_one_core"] == 47_500
    assert quiet["growth"] < 1
