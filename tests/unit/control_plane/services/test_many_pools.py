"""A region like the paper's: hundreds of services in tens of private pools, in several shards."""

from __future__ import annotations

import asyncio

import pytest
from fake_agents import Region
from virtual_time import run
from world import World, a_job

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase

POOLS, SERVICES, MSBS, PER_MSB, SHARDS = 24, 200, 6, 24, 6
FEW = Limits(memory_max_bytes=64 << 20)


def a_wide_region() -> Region:
    """Return machines in six MSBs of three data centers, as many as the quotas of all pools."""
    region = Region()
    for number in range(MSBS * PER_MSB):
        msb = number % MSBS
        region.add(f"m{number}", f"dc{msb % 3}", f"msb{msb}")
    return region


async def employ(w: World) -> None:
    """Grant all pools, and apply all services at once, with one to three tasks each."""
    for machine in w.region.machines.values():
        await w.cp.joined(machine.join())
    for pool in range(POOLS):
        spec = EntitlementSpec(machines=MSBS * PER_MSB // POOLS, host_profile="web")
        await w.cp.capacity.put_entitlement(f"pool{pool}", spec)
    for first in range(0, SERVICES, POOLS):
        services = (
            a_job(1 + n % 3, name=f"s{n}", entitlement=f"pool{n % POOLS}", limits=FEW)
            for n in range(first, min(first + POOLS, SERVICES))
        )
        await asyncio.gather(*map(w.cp.apply_job, services))


async def all_stable(w: World) -> bool:
    jobs = (await w.cp.list_jobs()).jobs
    return len(jobs) == SERVICES and all(job.phase is JobPhase.STABLE for job in jobs)


async def foreign_tasks(w: World) -> list[str]:
    """Return tasks that run on a machine of a pool other than their service's."""
    views = (await w.cp.list_machines()).machines
    pools = {view.record.machine: view.record.entitlement for view in views}
    return [
        f"{task} on {machine} of {pools[machine] or 'no pool'}"
        for machine, tasks in w.region.where().items()
        for task in tasks
        if pools[machine] != f"pool{int(task[1:].partition('-')[0]) % POOLS}"
    ]


@pytest.mark.behaviour("EX11")
def test_hundreds_of_services_in_tens_of_private_pools_outlive_an_msb() -> None:
    """Tasks stay in their pools, shards have equal parts, and other services are not affected."""

    async def main() -> None:
        w = World(a_wide_region(), shards=SHARDS)
        async with w.running():
            await employ(w)
            await w.until(lambda: all_stable(w), 600)
            wanted = sum(1 + n % 3 for n in range(SERVICES))
            assert sum(w.alive().values()) == wanted
            assert await foreign_tasks(w) == []
            loads = w.cp.shards.loads()
            assert sum(load.jobs for load in loads) == SERVICES
            assert [len(load.entitlements) for load in loads] == [POOLS // SHARDS] * SHARDS
            lost = [m for m in w.region.machines.values() if m.location.msb == "msb0"]
            before = {m.name: list(m.starts) for m in w.region.machines.values()}
            away = {task for m in lost for task in w.region.where()[m.name]}
            assert away
            for machine in lost:
                machine.power_off()
            await w.until(lambda: sum(w.alive().values()) == wanted, 600)
            await w.until(lambda: all_stable(w), 600)
            started = {
                task
                for m in w.region.machines.values()
                for task in list(m.starts)[len(before[m.name]) :]
            }
            assert started == away, "only what was lost is started again"
            assert await foreign_tasks(w) == []
        assert w.region.broken_rules == []

    run(main())
