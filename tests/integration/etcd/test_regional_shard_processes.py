"""A regional shard in a separate process; its region is a setting of the core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.api.capacity import EntitlementSpec
from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import RegionOfProcesses, region_of_processes
from wire.errors import Conflict

pytestmark = pytest.mark.behaviour("SH13")


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


async def deploy(region: RegionOfProcesses, name: str, pin: str | None, image: str) -> None:
    """Create an entitlement and a job that is stable in it."""
    spec = EntitlementSpec(machines=2, host_profile="web", region=pin)
    await region.client.put_entitlement(name, spec)
    await region.run(f"{name}1", name, 2, image)


async def owned(region: RegionOfProcesses) -> list[tuple[str, list[str]]]:
    """Return the region and the entitlements of each shard."""
    loads = (await region.client.list_shards()).shards
    return [(load.region, load.entitlements) for load in loads]


@pytest.mark.behaviour("SH13")
async def test_the_scopes_of_processes_are_the_cores(one: Cluster, tmp_path: Path) -> None:
    """Covers new entitlements, moves, changes of region, and a start of the core with another
    region.
    """
    async with region_of_processes(tmp_path, one, 2, regions={"1": "west"}) as region:
        await region.join(2, "west")
        await region.join(2, "east")
        image = await region.image()
        await deploy(region, "pay", "west", image)
        await deploy(region, "ads", "east", image)
        assert await owned(region) == [("", ["ads"]), ("west", ["pay"])]
        before = region.started()
        with pytest.raises(Conflict, match="that shard is for region west"):
            await region.client.move_entitlement("ads", 1)
        spec = EntitlementSpec(machines=2, host_profile="web")
        with pytest.raises(Conflict, match="shard 1 owns it, which is for region west"):
            await region.client.put_entitlement("pay", spec)
        for to in (0, 1):
            assert (await region.client.move_entitlement("pay", to)).done
        assert region.started() == before

        core = region.processes[0]
        core.end()
        config = tmp_path / "core.toml"
        right = config.read_text()
        config.write_text(right.replace('1 = "west"', '1 = "east"'))
        core.start()
        await core.until_logged("'pay' in shard 1 is pinned to region west")
        core.end()
        config.write_text(right)
        core.start()
        await region.until(lambda: is_served(region), "the core serves again")
        assert await owned(region) == [("", ["ads"]), ("west", ["pay"])]


async def is_served(region: RegionOfProcesses) -> bool:
    return len(await owned(region)) == 2
