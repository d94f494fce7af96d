"""Jobs whose tasks find no room: when they are tried again, and the cost for other jobs."""

import asyncio

import pytest
from msgspec.structs import replace
from test_growing_and_shrinking import SMALL, deploy, entitle, held, hosts, job, on, region_of
from world import World

from control_plane.api.jobs import JobPhase
from control_plane.api.policy import Admission
from control_plane.api.settings import Overgrant


def reason(w: World, name: str) -> str:
    """Return why a task of a job has no machine; empty if no machine was searched for yet."""
    return "".join(task.reason for task in w.cp._jobs.get(name).tasks)


@pytest.mark.behaviour("BUG-AL1")
@on(region_of("dc1/msb1"))
async def test_a_job_that_waits_takes_its_new_version_at_once(w: World):
    """Waiting tasks kept the claims of their first version forever."""
    await entitle(w, "front", 1)
    await deploy(w, job("other", 1))
    await w.cp.apply_job(job("web", 1))
    await w.until(lambda: reason(w, "web"))
    await w.cp.apply_job(job("web", 1, limits=SMALL))
    await w.stable("web")
    task = (await w.cp.get_job("web")).record.tasks[0]
    assert (task.version, hosts(w, "web")) == (2, {"web-0": "m1"})


@pytest.mark.behaviour("BUG-AL1")
@on(region_of("dc1/msb1", "dc1/msb2"), give_back_after_s=1)
async def test_a_task_whose_machine_was_lost_takes_the_version_that_has_room(w: World):
    """The same holds for a task that waits because its machine is lost."""
    await entitle(w, "front", 2)
    await deploy(w, job("web", 2))
    lost = hosts(w, "web")["web-1"]
    w.region.machines[lost].power_off()
    await w.until(lambda: reason(w, "web"))
    await w.cp.apply_job(job("web", 2, limits=SMALL))
    await w.until(
        lambda: len(set(hosts(w, "web"))) == 2 and len(set(hosts(w, "web").values())) == 1
    )


@pytest.mark.behaviour("BUG-AL2")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_a_job_that_cannot_use_machines_keeps_no_other_job_from_them(w: World):
    """A third pool gained room, which does not help the gang. The gang was tried first, forever."""
    w.cp._portal.settings = replace(w.cp._portal.settings, overgrant=Overgrant.ALLOW)
    await entitle(w, "third", 1)
    await entitle(w, "low", 1, priority=100)
    await entitle(w, "high", 2, priority=900)
    await deploy(w, job("stays", 1, "third", SMALL), job("goes", 1, "third", SMALL))
    await w.cp.apply_job(job("dear", 2, "high", admission=Admission.GANG))
    await w.until(lambda: reason(w, "dear"))
    await w.cp.stop_job("goes")
    await asyncio.sleep(60)
    counts = w.cp._allocator.allocations.counts
    before = counts.hits + counts.misses
    await asyncio.sleep(60)
    assert counts.hits + counts.misses - before < 60  # it was tried 20 times a second
    await w.cp.apply_job(job("cheap", 1, "low"))
    await w.stable("cheap")
    assert len(held(w, "low")) == 1
    assert (await w.cp.get_job("dear")).phase is JobPhase.WAITING
