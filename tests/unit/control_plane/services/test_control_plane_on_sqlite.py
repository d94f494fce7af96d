"""The control plane on its real store and the real clock, over a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fake_agents import IMAGE, IMAGE_2, Region, find_image
from world import a_job, a_region

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase, UpdatePolicy
from control_plane.api.settings import SchedulerSettings
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import Runtime
from control_plane.store.sqlite import SqliteStore


def a_fast_region() -> Region:
    region = a_region()
    for machine in region.machines.values():
        fast = machine.behaviour
        fast.start_s = fast.stop_s = fast.switch_s = fast.pull_s = 0.02
    return region


async def stable(cp: ControlPlane) -> None:
    async with asyncio.timeout(90):
        while (await cp.get_job("web")).phase is not JobPhase.STABLE:
            await asyncio.sleep(0.02)


@pytest.mark.behaviour("RB9")
@pytest.mark.parametrize("own", [(), ("dc2",), ("dc1", "dc2")])
def test_a_job_outlives_the_process_that_took_it(tmp_path, own):
    """Holds for machines in the main store and for machines in the stores of their data centers."""

    async def main() -> None:
        region, policy = a_fast_region(), UpdatePolicy(drain_s=0.1)

        @asynccontextmanager
        async def running() -> AsyncIterator[ControlPlane]:
            async with AsyncExitStack() as stack:
                main, *others = [
                    await stack.enter_async_context(SqliteStore(tmp_path / name))
                    for name in ("main", *own)
                ]
                stores = dict(zip(own, others, strict=True))
                settings = SchedulerSettings()
                cp = ControlPlane(
                    main,
                    region.agent,
                    Runtime(),
                    settings,
                    find_image,
                    broker_stores=stores,
                )
                yield await stack.enter_async_context(cp)

        async with running() as cp:
            for machine in region.machines.values():
                await cp.joined(machine.join())
            spec = EntitlementSpec(machines=3, host_profile="web")
            await cp.capacity.put_entitlement("front", spec)
            await cp.apply_job(a_job(update=policy))
            await stable(cp)
            assert [len(tasks) for tasks in region.where().values()] == [2, 2, 2]
            await cp.apply_job(a_job(image=IMAGE_2, update=policy))
        async with running() as cp:
            await stable(cp)
            assert (await cp.get_job("web")).record.version == 2
        images = {s.image for m in region.machines.values() for s in m.tasks.values()}
        assert images == {IMAGE_2} != {IMAGE}
        assert region.broken_rules == []

    asyncio.run(main())
