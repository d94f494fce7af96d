"""Two instances of the conveyor on one etcd: one with the lease acts, the other takes over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.config import EtcdSettings
from control_plane.store.etcd import EtcdStore
from tests.etcd import Cluster, etcd_cluster
from tests.unit.conveyor.delivery_model import World, digest
from wire.errors import TwineError

PATIENCE_S = 60


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


def on(store: EtcdStore, world: World) -> World:
    """Return a world with this store in place of its default one."""
    changed: Any = world
    changed.store = store
    return world


@pytest.mark.behaviour("CV1", "CV3")
async def test_an_instance_without_lease_changes_no_job_and_the_next_one_continues(
    one: Cluster, tmp_path: Path
) -> None:
    """One instance begins a run and the other finishes it; each stage happens once."""
    ends_soon = EtcdSettings(endpoints=one.urls, prefix=f"/{tmp_path.name}", ttl_s=2, standby=True)
    first, second = EtcdStore(ends_soon), EtcdStore(ends_soon)
    async with asyncio.timeout(PATIENCE_S):
        before = await on(first, World()).begin()
        plane = before.plane
        plane.images["web"] = digest(2)
        while not plane.calls:
            await before.rounds(1)
        first._leadership._renewing.cancel()  # a pause: no lease is renewed
        await second.__aenter__()
        assert first.failure()
        made = list(plane.calls)
        with pytest.raises(TwineError):
            await before.rounds(30)
        assert plane.calls == made, "the first instance changed a job without the lease"
        after = on(second, World())
        after.plane, after.meter, after.now = plane, before.meter, before.now
        after.restart()
        await after.service.load()
        run = await after.until("done")
        assert run.image == digest(2)
        pushes = [call[3] for call in plane.calls if call[0] == "push"]
        assert pushes == ["canary", "percent", "all"]
        for store in (second, first):
            await store.__aexit__(None, None, None)
