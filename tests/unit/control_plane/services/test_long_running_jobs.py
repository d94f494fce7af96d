"""Jobs are long-running services: ended tasks do not count as done and make no room for others.

Short-lived batch work is left to schedulers of applications, which hold long-lived tasks
(docs/operating.md). Each test covers one behaviour that differs from a batch system.
"""

import asyncio

import pytest
from world import World, a_job, scenario

from agent.api import Exit, Health, RestartPolicy, RestartWhen, TaskState
from control_plane.api.jobs import JobPhase, TaskPhase
from wire.errors import NotFound

HOUR = 3600


def ended(w: World, result: str = "success") -> None:
    """End every task of the region without a command."""
    for machine in w.region.machines.values():
        for task in machine.tasks:
            exited = Exit(result=result, at=0.0)
            machine.report(task, state=TaskState.STOPPED, health=Health.UNKNOWN, last_exit=exited)


@pytest.mark.behaviour("AL18")
@scenario()
async def test_a_task_that_ends_is_started_again_though_it_did_its_work(w: World):
    await w.deployed(a_job(3))
    before = {t: s.invocation_id for m in w.region.machines.values() for t, s in m.tasks.items()}
    ended(w)
    await w.until(lambda: sum(w.alive().values()) == 0)
    await w.until(lambda: sum(w.alive().values()) == 3)
    await w.stable()
    after = {t: s.invocation_id for m in w.region.machines.values() for t, s in m.tasks.items()}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    where = {t.index: t.placement for t in (await w.cp.get_job("web")).record.tasks}
    assert len({p.machine for p in where.values() if p}) == 3  # each task stays on its machine


@pytest.mark.behaviour("AL18")
@pytest.mark.parametrize("when", [RestartWhen.NEVER, RestartWhen.ON_FAILURE])
def test_a_job_whose_tasks_have_all_ended_keeps_its_place_until_it_is_stopped(when):
    @scenario()
    async def body(w: World) -> None:
        await w.deployed(a_job(3, restart=RestartPolicy(when=when)))
        machines = {v.record.machine for v in (await w.cp.list_machines()).machines}
        ended(w)
        await asyncio.sleep(HOUR)  # long after empty machines are given back
        status = await w.cp.get_job("web")
        assert status.phase is not JobPhase.STABLE  # it only knows that they do not run
        assert (status.wanted, status.running) == (3, 0)
        assert f"it ended, and its restart policy is {when}" in status.detail
        assert {t.phase for t in status.record.tasks} == {TaskPhase.RUNNING}
        assert {t.placement.machine for t in status.record.tasks if t.placement} == machines
        held = (await w.cp.list_machines()).machines
        assert {v.record.entitlement for v in held} == {"front"}

        await w.cp.stop_job("web")
        await w.until(lambda: gone(w))

    body()


async def gone(w: World) -> bool:
    try:
        await w.cp.get_job("web")
    except NotFound:
        return True
    return False
