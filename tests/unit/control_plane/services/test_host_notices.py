"""Hosts that request it are notified that their machine leaves, and that lent capacity is short."""

import asyncio

import pytest
from msgspec.structs import replace
from test_elastic_capacity import APPLY, WHOLE, best_effort, borrower, lent
from world import World, a_job, scenario

from agent.api.notices import HostNotices
from control_plane.api.job_life import JobLife, JobNotice

pytestmark = pytest.mark.behaviour("EL9")

WITH_NOTICES = JobLife(notice=JobNotice(capacity_of=["batch"]))


def last(world: World, machine: str) -> HostNotices:
    notices = world.region.machines[machine].notices
    return notices[-1] if notices else HostNotices()


@pytest.mark.behaviour("EL9")
@scenario(elastic=APPLY)
async def test_tasks_on_a_lent_machine_get_their_deadline(world: World) -> None:
    """The notice has the deadline of the loan, as the controller's advance notice has."""
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort(life=WITH_NOTICES))
    await world.until(lambda: len(lent(world)) == 3, 600)
    await world.stable("crunch")
    await world.cp.apply_job(a_job(1, limits=WHOLE))
    revoked = {}

    def called_back() -> bool:
        views = world.cp.elastic.report().loans
        revoked.update({v.machine: v.return_by for v in views if v.revoked_at is not None})
        return bool(revoked)

    await world.until(called_back, 300)
    ((machine, return_by),) = revoked.items()
    await world.until(lambda: any(n.kind == "revoked" for n in last(world, machine).notices), 30)
    (notice,) = last(world, machine).notices
    assert notice.deadline == return_by
    assert "front needs it" in notice.reason
    others = [name for name in world.region.machines if name != machine]
    assert not any(last(world, name).notices for name in others)
    await world.stable("web", 400)
    await world.until(lambda: not last(world, machine).notices, 60)  # withdrawn


@pytest.mark.behaviour("EL9")
@scenario(elastic=APPLY)
async def test_a_service_gets_a_notice_when_its_lent_capacity_is_absent(world: World) -> None:
    """The service has machines of its entitlement, and does less while batch has none."""
    await world.set_up(quota=3)
    await borrower(world, borrow=2)
    await world.cp.apply_job(a_job(1, limits=WHOLE, life=WITH_NOTICES))
    await world.stable("web")
    await world.cp.apply_job(best_effort(2))
    await world.until(lambda: len(lent(world)) == 2, 600)
    (mine,) = [name for name, tasks in world.region.where().items() if "web-0" in tasks]
    await world.until(lambda: [c.state for c in last(world, mine).capacity] == ["full"], 120)
    (job,) = [r for r in world.cp._jobs.records() if r.name == "web"]
    await world.cp.apply_job(replace(job.spec, tasks=3))
    await world.stable("web", 400)
    await world.until(lambda: [c.state for c in last(world, mine).capacity] == ["absent"], 120)
    assert last(world, mine).capacity[0].wanted == 2


@scenario(elastic=APPLY)
async def test_hosts_get_notices_once_and_again_after_they_lost_them(world: World) -> None:
    """A host that rebooted is notified again."""
    await world.set_up(quota=3)
    await borrower(world, borrow=2)
    await world.cp.apply_job(a_job(1, limits=WHOLE, life=WITH_NOTICES))
    await world.stable("web")
    await world.cp.apply_job(best_effort(2))
    (mine,) = [name for name, tasks in world.region.where().items() if "web-0" in tasks]
    await world.until(lambda: [c.state for c in last(world, mine).capacity] == ["full"], 900)
    known = len(world.region.machines[mine].notices)
    await asyncio.sleep(120)
    assert len(world.region.machines[mine].notices) == known
    machine = world.region.machines[mine]
    machine.power_off()
    machine.notices.clear()
    machine.power_on()

    def is_notified() -> bool:
        homes = [name for name, tasks in world.region.where().items() if "web-0" in tasks]
        return any(c.entitlement == "batch" for name in homes for c in last(world, name).capacity)

    await world.until(is_notified, 900)
