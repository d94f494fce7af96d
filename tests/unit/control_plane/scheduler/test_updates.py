"""Updates in the assembled control plane: owners pause, resume, restart and roll back."""

import asyncio

import pytest
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import Limits
from control_plane.api.intent_changes import HoldChange
from control_plane.api.jobs import JobPhase, JobStatus, TaskRecord
from control_plane.api.machines import EventKind
from control_plane.api.operations import OperationKind, OperationState
from control_plane.api.routes import ROUTES
from control_plane.front_end.intent_handlers import IntentHandlers
from wire.errors import Conflict, NotFound
from wire.fairness import Peer
from wire.server import Call

OTHER = ["/bin/other"]


async def versions(w: World) -> list[int]:
    return [task.version for task in (await w.cp.get_job("web")).record.tasks]


def tasks(w: World) -> list[TaskRecord]:
    return w.cp._jobs.get("web").tasks


async def commands(w: World) -> set[str]:
    record = (await w.cp.get_job("web")).record
    return {record.specs[task.version].command[0] for task in record.tasks}


@scenario()
async def test_a_paused_update_takes_down_no_further_task_until_it_is_resumed(w: World):
    await w.deployed(a_job(6))
    await w.cp.apply_job(a_job(6, command=OTHER))
    await w.until(lambda: 2 in [t.version for t in w.cp._jobs.get("web").tasks])
    await w.cp.pause_job("web", paused=True)
    await asyncio.sleep(60)
    paused = await versions(w)
    assert paused.count(2) in (1, 2)  # operations that had begun are finished
    assert (await w.cp.get_job("web")).detail == "the update to version 2 is paused"
    assert await w.endpoints_count(6)
    await asyncio.sleep(600)
    assert await versions(w) == paused
    await w.cp.pause_job("web", paused=False)
    await w.stable()
    assert await versions(w) == [2] * 6


@pytest.mark.behaviour("BUG-UX167", "BUG-UX172")
@scenario()
async def test_a_command_for_another_version_than_the_present_one_is_refused(w: World):
    """A pause that was meant for an earlier update stopped the update that a user began since."""
    await w.deployed(a_job(6))
    await w.cp.apply_job(a_job(6, command=OTHER))
    handlers = IntentHandlers(w.cp)
    routes = {route.name: route for route in ROUTES}

    async def send(name: str, expect: str) -> bool:
        call = Call(
            routes[name], Peer("local:0", "local"), None, {"job": "web"}, {"expect": expect}
        )
        answer: JobStatus = await getattr(handlers, name)(call)
        return answer.record.paused

    with pytest.raises(Conflict, match=r"at version 2, and the request is for version 1"):
        await send("pause_job", "1")
    assert not (await w.cp.get_job("web")).record.paused
    assert await send("pause_job", "2")
    with pytest.raises(Conflict, match="cannot resume job 'web'"):
        await send("resume_job", "1")
    assert not await send("resume_job", "2")
    await w.stable()

    with pytest.raises(Conflict, match="cannot restart job 'web'"):
        await send("restart_job", "1")
    with pytest.raises(Conflict, match="cannot roll back job 'web'"):
        await send("rollback_job", "1")
    assert (await w.cp.get_job("web")).record.version == 2
    await send("rollback_job", "2")
    with pytest.raises(Conflict, match="at version 3, and the request is for version 2"):
        await send("rollback_job", "2")  # a request that was sent twice does not go back and forth
    await send("restart_job", "3")
    assert (await w.cp.get_job("web")).record.version == 4


@pytest.mark.behaviour("BUG-UX80")
@scenario()
async def test_an_answer_to_a_change_shows_at_once_what_a_pause_or_a_hold_postpones(w: World):
    """During a hold, `job pause` and `job apply` answered "progressing"."""
    await w.deployed(a_job(6))
    await w.cp.apply_job(a_job(6, command=OTHER))
    await w.until(lambda: 2 in [t.version for t in w.cp._jobs.get("web").tasks])
    paused = await w.cp.pause_job("web", paused=True)
    words = "the update to version 2 is paused"
    assert (paused.phase, paused.detail) == (JobPhase.WAITING, words)
    assert (await w.cp.job_planner.explain("web")).update == words
    assert (await w.cp.pause_job("web", paused=False)).phase is JobPhase.PROGRESSING
    await w.stable()
    await w.cp.intents.hold("web", HoldChange(lasts_s=3600, reason="outage"), "user:ann")
    held = await w.cp.apply_job(a_job(6), writer="user:ann")
    words = "the job is held (outage): version 3 waits"
    assert (held.phase, held.detail) == (JobPhase.WAITING, words)
    assert (await w.cp.job_planner.explain("web")).update == words


@pytest.mark.behaviour("BUG-UX123", "BUG-UX125")
@scenario()
async def test_an_update_that_waits_for_room_gives_its_present_reason(w: World):
    """After another change of the job, its operations named the previous version.

    `job explain` did not report why an update waits.
    """
    await w.deployed(a_job(3))
    await w.deployed(a_job(3, name="fill", limits=Limits(memory_max_bytes=300 << 20)))
    for memory in (850, 800):
        await w.cp.apply_job(a_job(3, limits=Limits(memory_max_bytes=memory << 20)))
        version = w.cp._jobs.get("web").version

        def is_reported(version: int = version) -> bool:
            reasons = {task.operation and task.operation.reason for task in tasks(w)}
            return reasons == {f"version {version} instead of 1"}

        async def is_explained() -> bool:
            return "waits for room: " in (await w.cp.job_planner.explain("web")).update

        await w.until(is_reported)
        await w.until(is_explained)


@pytest.mark.behaviour("BUG-UX81")
@scenario()
async def test_events_name_the_version_that_a_task_ran_before(w: World):
    """An event named "version 3 instead of 2" for a task that ran version 1 and never version 2."""
    await w.deployed(a_job(3))
    for command in ("/bin/b", "/bin/c", "/bin/d"):
        await w.cp.apply_job(a_job(3, command=[command]))
        await w.until(lambda: any(t.version == w.cp._jobs.get("web").version for t in tasks(w)))
    await w.stable()
    events = (await w.cp.job_events("web", limit=200)).events
    updates = [e for e in events if e.kind is OperationKind.UPDATE]
    assert OperationState.WITHDRAWN in {e.outcome for e in updates}
    done = {e.reason for e in updates if e.outcome is OperationState.DONE}
    assert done == {"version 4 instead of 1"}
    await w.cp.apply_job(a_job(3))
    await w.stable()
    assert (await w.cp.job_events("web", limit=200)).events[-2].reason == "version 5 instead of 4"


@scenario()
async def test_other_operations_continue_while_the_update_is_paused(w: World):
    await w.deployed(a_job(3))
    await w.cp.pause_job("web", paused=True)
    await w.cp.apply_job(a_job(3, command=OTHER))
    leaving = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    await w.cp.inventory.outages.plan_unavailability([leaving], EventKind.MAINTENANCE, "work")
    await w.until(lambda: w.alive()[leaving] == 0)
    await w.until(lambda: w.alive().total() == 3)


def test_a_pause_outlives_the_process():
    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.deployed(a_job(3))
            await w.cp.pause_job("web", paused=True)
            await w.cp.apply_job(a_job(3, command=OTHER))
        async with w.running():
            await asyncio.sleep(120)
            assert await versions(w) == [1] * 3
            await w.cp.pause_job("web", paused=False)
            await w.stable()

    run(main())


@scenario()
async def test_a_restart_restarts_every_task_within_the_budget(w: World):
    await w.deployed(a_job(6))
    where, least = w.region.where(), 6
    await w.cp.restart_job("web")
    while await versions(w) != [2] * 6:
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.1)
    await w.stable()
    assert least == 5
    assert w.region.where() == where
    events = (await w.cp.job_events("web")).events
    assert len([event for event in events if event.kind == "update"]) == 6


@scenario()
async def test_a_rollback_wants_again_what_the_version_before_wanted(w: World):
    """The rollback keeps the present size. It works even if no task runs that version any more."""
    await w.deployed(a_job(3))
    with pytest.raises(Conflict, match="no earlier version"):
        await w.cp.rollback_job("web")
    await w.cp.apply_job(a_job(3, command=OTHER))
    await w.stable()
    await w.cp.restart_job("web")
    await w.cp.apply_job(a_job(4, command=OTHER))
    await w.stable()
    assert await commands(w) == {"/bin/other"}
    status = await w.cp.rollback_job("web")
    assert status.record.version == 4
    await w.stable()
    assert await commands(w) == {"/bin/serve"}
    assert w.alive().total() == 4
    await w.cp.rollback_job("web")  # and back again
    await w.stable()
    assert await commands(w) == {"/bin/other"}


@scenario()
async def test_a_job_that_is_stopped_or_unknown_is_not_changed(w: World):
    await w.deployed(a_job(3))
    await w.cp.stop_job("web")
    for change in (w.cp.restart_job("web"), w.cp.rollback_job("web")):
        with pytest.raises(Conflict, match="being stopped"):
            await change
    with pytest.raises(Conflict, match="being stopped"):
        await w.cp.pause_job("web", paused=True)
    with pytest.raises(NotFound):
        await w.cp.restart_job("other")
