"""Two reservations on the machines of one entitlement, each with a separate share."""

import asyncio

import pytest
from test_growing_and_shrinking import entitle, held, hosts, job, on, region_of
from world import World

from control_plane.api.jobs import JobPhase
from wire.errors import QuotaExceeded

pytestmark = pytest.mark.behaviour("MO16")

FIVE = region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc1/msb1", "dc2/msb3")


async def reserve(w: World, **quotas: int) -> None:
    await entitle(w, "base", 1)
    for name, machines in quotas.items():
        await entitle(w, name, machines, materialization="base", host_profile="base")


async def deployed(w: World, *specs) -> None:
    for spec in specs:
        await w.cp.apply_job(spec)
    for spec in specs:
        await w.stable(spec.name)


@pytest.mark.behaviour("MO16", "CP7", "MO12")
@on(FIVE)
async def test_no_reservation_gets_at_the_share_of_another(w: World):
    await reserve(w, one=2, two=2)
    await deployed(w, job("a", 1, "one"), job("b", 1, "one"))
    for more in (job("a", 2, "one"), job("c", 1, "one")):
        with pytest.raises(QuotaExceeded, match="the other jobs of 'one'"):
            await w.cp.apply_job(more)
        with pytest.raises(QuotaExceeded, match="own quota is 2"):
            await w.cp.job_planner.plan(more)  # `job plan` gives the same answer as `apply`
    await deployed(w, job("d", 2, "two"), job("e", 1, "base"))  # room for every own share
    assert len(held(w, "base")) == 5
    assert [s.record.name for s in (await w.cp.list_jobs()).jobs] == ["a", "b", "d", "e"]


@pytest.mark.behaviour("MO16")
@on(FIVE)
async def test_jobs_that_fit_a_share_alone_are_not_let_in_together(w: World):
    await reserve(w, one=2)
    specs = [job(name, 2, "one") for name in ("a", "b", "c")]
    outcomes = await asyncio.gather(*map(w.cp.apply_job, specs), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(failure) for failure in failed] == [QuotaExceeded] * 2
    assert len((await w.cp.list_jobs()).jobs) == 1


@pytest.mark.behaviour("MO16")
@on(FIVE)
async def test_another_job_of_the_reservation_may_use_released_machines(w: World):
    await reserve(w, one=2)
    await deployed(w, job("a", 2, "one"))
    await w.cp.apply_job(job("a", 1, "one"))
    with pytest.raises(QuotaExceeded):  # the second task is still there
        await w.cp.apply_job(job("b", 1, "one"))
    await w.stable("a")
    await deployed(w, job("b", 1, "one"))
    await w.cp.stop_job("a")
    await w.until(lambda: not hosts(w, "a"))


@pytest.mark.behaviour("MO16", "AL3")
@on(FIVE)
async def test_a_smaller_share_ends_nothing_and_lost_tasks_come_back(w: World):
    await reserve(w, one=3)
    await deployed(w, job("a", 2, "one"), job("b", 1, "one"))
    await reserve(w, one=2, two=1)
    await asyncio.sleep(60)
    assert len(hosts(w, "a")) + len(hosts(w, "b")) == 3
    broken = hosts(w, "a")["a-0"]
    w.region.machines[broken].power_off()
    await w.until(lambda: broken not in hosts(w, "a").values() and len(hosts(w, "a")) == 2)
    await w.stable("a")
    await deployed(w, job("a", 2, "one", stop_timeout_s=5.0))  # a release does not count as growth
    with pytest.raises(QuotaExceeded):
        await w.cp.apply_job(job("b", 2, "one"))
    assert (await w.cp.get_job("b")).phase is JobPhase.STABLE
