"""Moves of tasks that their owner requests."""

import asyncio

import pytest
from virtual_time import run
from world import World, a_job, a_region, scenario

from control_plane.api.operations import RestartRequest
from wire.errors import Conflict, InvalidInput, NotFound


async def where(w: World, index: int) -> str:
    task = (await w.cp.get_job("web")).record.tasks[index]
    return task.placement.machine if task.placement is not None else ""


@pytest.mark.behaviour("SC10")
@scenario()
async def test_a_task_moves_to_the_machine_that_its_owner_names(w: World):
    """The task stops there and starts here. The other tasks stay where they are."""
    await w.deployed(a_job(6))
    before = [await where(w, i) for i in range(6)]
    to = next(name for name in w.region.machines if name != before[0])
    story = await w.cp.move_task("web", 0, to, "closer to its data")
    assert story.now is not None
    assert (story.now.kind, story.now.cause, story.now.reason) == (
        "move",
        "owner",
        "closer to its data",
    )
    assert (await w.cp.move_task("web", 0, to, "closer to its data")).now == story.now
    await w.until(lambda: is_at(w, 0, to))
    await w.stable()
    assert [await where(w, i) for i in range(1, 6)] == before[1:]
    (event,) = [e for e in (await w.cp.job_events("web")).events if e.cause == "owner"]
    assert (event.from_machine, event.to_machine, event.outcome) == (before[0], to, "done")


async def is_at(w: World, index: int, machine: str) -> bool:
    return await where(w, index) == machine


@scenario(repair_after_s=100_000)
async def test_without_a_name_it_goes_to_another_machine_and_never_stays(w: World):
    await w.deployed(a_job(3))
    before = await where(w, 1)
    await w.cp.move_task("web", 1, "", "a noisy neighbour")
    await w.until(lambda: moved_from(w, 1, before))
    await w.stable()


async def moved_from(w: World, index: int, machine: str) -> bool:
    return await where(w, index) not in (machine, "")


@scenario()
async def test_moves_wait_for_the_budget_like_anything_else(w: World):
    await w.deployed(a_job(6))
    least = 6
    for index in range(3):
        await w.cp.move_task("web", index, "", "three at once")
    while any(e.operation for e in (await w.cp.get_job("web")).record.tasks):
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.1)
    assert least == 5
    events = (await w.cp.job_events("web")).events
    assert len([e for e in events if e.cause == "owner" and e.outcome == "done"]) == 3


@scenario()
async def test_a_move_that_cannot_be_is_refused_and_changes_nothing(w: World):
    await w.deployed(a_job(3))
    w.region.add("m9", "dc1", "msb1")
    await w.cp.joined(w.region.machines["m9"].join())
    here = await where(w, 0)
    for to, index, error in (
        ("m9", 0, Conflict),
        ("no", 0, NotFound),
        (here, 0, Conflict),
        ("", 7, NotFound),
    ):
        with pytest.raises(error):
            await w.cp.move_task("web", index, to, "x")
    assert all(t.operation is None for t in (await w.cp.get_job("web")).record.tasks)


@pytest.mark.parametrize("after_s", [0.2, 1, 2.5, 4])
def test_a_move_continues_after_the_process_is_killed(after_s):
    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.deployed(a_job(6))
            to = next(
                n
                for n in w.region.machines
                if n != w.cp._jobs.get("web").tasks[0].placement.machine
            )
            await w.cp.move_task("web", 0, to, "x")
            await asyncio.sleep(after_s)
        async with w.running():
            await w.until(lambda: is_at(w, 0, to))
            await w.stable()
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("SC10", "SC6")
@scenario()
async def test_a_restart_of_a_task_is_an_operation_and_leaves_it_where_it_is(w: World):
    """The task is drained, stopped and started again on its machine. Other tasks do not change."""
    await w.deployed(a_job(6))
    before = (await w.cp.get_job("web")).record.tasks
    story = await w.cp.restart_task("web", 0, RestartRequest(reason="it leaks"))
    assert story.now is not None
    assert (story.now.kind, story.now.cause, story.now.reason) == ("restart", "owner", "it leaks")
    again = await w.cp.restart_task("web", 0, RestartRequest(reason="it leaks"))
    assert again.now is not None
    assert again.now.id == story.now.id
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].generation > before[0].generation)
    await w.stable()
    after = (await w.cp.get_job("web")).record.tasks
    assert [t.placement for t in after] == [t.placement for t in before]
    assert [t.generation for t in after[1:]] == [t.generation for t in before[1:]]
    (event,) = [e for e in (await w.cp.job_events("web")).events if e.cause == "owner"]
    assert (event.kind, event.outcome, event.reason) == ("restart", "done", "it leaks")


@pytest.mark.behaviour("SC6")
@scenario()
async def test_restarts_of_tasks_wait_for_the_budget(w: World):
    """Three restarts are requested at once, and run one after the other."""
    await w.deployed(a_job(6))
    least = 6
    for index in range(3):
        await w.cp.restart_task("web", index, RestartRequest())
    while any(task.operation for task in (await w.cp.get_job("web")).record.tasks):
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.1)
    assert least == 5
    events = (await w.cp.job_events("web")).events
    assert len([e for e in events if e.kind == "restart" and e.outcome == "done"]) == 3


@scenario()
async def test_a_newer_version_overtakes_a_restart(w: World):
    """A task with a pending restart is updated instead, once and not twice."""
    await w.deployed(a_job(3))
    await w.cp.pause_job("web", paused=True)
    await w.cp.apply_job(a_job(3, command=["/bin/other"]))
    await w.cp.restart_task("web", 1, RestartRequest())
    await w.cp.pause_job("web", paused=False)
    await w.stable()
    events = [e for e in (await w.cp.job_events("web")).events if e.task == 1]
    assert [e.kind for e in events if e.outcome == "done"].count("update") == 1


@pytest.mark.behaviour("SC6")
@scenario()
async def test_an_immediate_restart_needs_no_approval_but_a_reason(w: World):
    """It ignores the budget and the controller; the audit log has the reason."""
    await w.deployed(a_job(3))
    with pytest.raises(InvalidInput, match="only for a reason"):
        await w.cp.restart_task("web", 0, RestartRequest(now=True))
    with pytest.raises(NotFound, match="task 7"):
        await w.cp.restart_task("web", 7, RestartRequest(now=True, reason="no such task"))
    await w.cp.restart_task("web", 0, RestartRequest(now=True, reason="it hangs"))
    assert (await w.cp.task_story("web", 0)).now is None


@scenario()
async def test_an_operation_on_a_task_comes_before_its_restart(w: World):
    await w.deployed(a_job(3))
    await w.cp.move_task("web", 1, "", "a noisy neighbour")
    with pytest.raises(Conflict, match="move because of owner comes first"):
        await w.cp.restart_task("web", 1, RestartRequest())
    await w.cp.stop_job("web")
    with pytest.raises(Conflict, match="being stopped"):
        await w.cp.restart_task("web", 0, RestartRequest())
