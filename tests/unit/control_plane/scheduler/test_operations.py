"""Operations and the log of a job, in the assembled control plane on virtual time."""

import asyncio

import pytest
from msgspec.structs import replace
from virtual_time import clock
from world import World, a_job, scenario

from agent.api import Exit, Health, TaskState
from control_plane.api.inventory import Drain
from control_plane.api.jobs import JobRecord, TaskRecord, UpdatePolicy
from control_plane.api.operations import Cause, JobEvent, OperationKind, OperationState
from control_plane.api.stored_jobs import RetiredJob
from control_plane.api.updates import OnFailure
from control_plane.cli.events import head
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler import event_log
from control_plane.scheduler.event_log import ROW, ROWS, EventLog, retired_job
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from wire.errors import NotFound


async def events_of(w: World, job: str = "web") -> list[JobEvent]:
    """Return the whole log, read page by page."""
    found: list[JobEvent] = []
    while True:
        page = await w.cp.job_events(job, found[-1].seq if found else 0, 7)
        found += page.events
        if not page.more:
            return [event for event in found if event.kind is not OperationKind.ROLLOUT]


def brief(events: list[JobEvent]) -> set[tuple[int, str, str, str]]:
    return {(e.task, e.kind.value, e.cause.value, e.outcome.value) for e in events}


@pytest.mark.behaviour("SC20")
@scenario()
async def test_every_operation_ends_in_the_log_with_its_cause(w: World):
    await w.deployed(a_job(3))
    events = await events_of(w)
    assert brief(events) == {(i, "start", "release", "done") for i in range(3)}
    assert [e.seq for e in events] == [1, 2, 3]
    assert all(e.end > e.start and e.to_machine for e in events)

    await w.cp.apply_job(a_job(3, command=["/bin/other"]))
    await w.stable()
    assert brief((await events_of(w))[3:]) == {(i, "update", "release", "done") for i in range(3)}

    await w.cp.apply_job(a_job(2, command=["/bin/other"]))
    await w.stable()
    (removed,) = (await events_of(w))[6:]
    assert (removed.kind, removed.cause, removed.outcome) == ("remove", "resize", "done")

    await w.cp.stop_job("web")
    await w.until(lambda: w.cp._jobs.find("web") is None)
    gone = (await events_of(w))[7:]
    assert {(e.kind.value, e.cause.value, e.outcome.value) for e in gone} == {
        ("remove", "stop", "done")
    }
    assert (await w.cp.task_story("web", 0)).phase == ""
    with pytest.raises(NotFound, match="no log of one"):
        await w.cp.job_events("other")


@scenario()
async def test_a_failure_and_a_drain_show_both_machines_of_the_move(w: World):
    await w.deployed(a_job(3))
    (first,) = [e for e in (await events_of(w)) if e.task == 0]
    w.region.machines[first.to_machine].power_off()
    await w.until(lambda: w.alive()[first.to_machine] == 0)
    await w.until(lambda: w.alive().total() == 3)
    await w.stable()
    moved = [e for e in (await events_of(w))[3:] if e.outcome == "done"]
    assert [(e.kind, e.cause, e.from_machine) for e in moved] == [
        ("move", "failure", first.to_machine)
    ]
    assert moved[0].to_machine != first.to_machine
    leaving = moved[0].to_machine
    w.region.machines[first.to_machine].power_on()
    await w.until(w.all_answer)
    seen = len(await events_of(w))
    await w.cp.inventory.drain(Drain(machines=[leaving], reason="new fans"))
    await w.until(lambda: w.alive()[leaving] == 0)
    await w.until(lambda: w.alive().total() == 3)
    await w.stable()
    drained = [e for e in (await events_of(w))[seen:] if e.cause == "maintenance"]
    assert {(e.kind.value, e.outcome.value, e.from_machine, e.reason) for e in drained} == {
        ("move", "done", leaving, "new fans")
    }


@pytest.mark.behaviour("BUG-UX2")
@scenario()
async def test_restarts_of_a_crash_loop_are_in_the_log_and_the_task_story(w: World):
    """The log has few events, even if the task crashes often; each event has its exit code."""
    await w.deployed(a_job(1))
    (start,) = await events_of(w)
    machine = w.region.machines[start.to_machine]
    for count in range(1, 11):
        ended = Exit(result="exit-code", code=3, at=clock())
        run = f"run-{count}"
        machine.report("web-0", restarts=count, last_exit=ended, invocation_id=run)
        await w.until(lambda n=count: w.cp._jobs.get("web").tasks[0].restarts == n)
    crashes = (await events_of(w))[1:]
    assert brief(crashes) == {(0, "restart", "failure", "failed")}
    assert [e.reason for e in crashes] == [
        f"exit code 3; it ended {n} so far" for n in ("once", "2 times", "4 times", "8 times")
    ]
    story = await w.cp.task_story("web", 0)
    assert (story.restarts, story.last_exit and story.last_exit.code) == (10, 3)
    assert [e.seq for e in story.events] == [1, 2, 3, 4, 5]
    words = head("web-0", story)
    assert any("10 restart(s) of this run, last exit code 3" in line for line in words)
    assert words[-1].endswith("twinectl job logs web 0 --previous")


@pytest.mark.behaviour("BUG-UX5")
@scenario()
async def test_the_log_has_an_automatic_rollback_with_the_exit_that_caused_it(w: World):
    update = UpdatePolicy(on_failure=OnFailure.ROLLBACK, health_gate_s=30)
    await w.deployed(a_job(1, update=update))
    await w.cp.apply_job(a_job(1, update=update, command=["/bin/bad"]))
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].version == 2)
    machine = w.region.machines[(await events_of(w))[0].to_machine]
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].state is TaskState.RUNNING)
    ended = Exit(result="exit-code", code=127, at=clock())
    machine.report("web-0", state=TaskState.BACKOFF, health=Health.UNHEALTHY, last_exit=ended)
    await w.until(lambda: w.cp._jobs.get("web").version == 3)
    await w.stable()
    reasons = [event.reason for event in (await w.cp.task_story("web", 0)).events]
    assert any(reason.startswith("exit code 127; it ended once") for reason in reasons)
    back = [r for r in reasons if r.startswith("rolled back to version 1: version 2 failed")]
    assert back
    assert "exit code 127" in back[0]


@scenario()
async def test_an_operation_under_way_is_shown_and_survives_a_restart(w: World):
    await w.set_up()
    for machine in w.region.machines.values():
        machine.reachable = False
    await w.cp.apply_job(a_job(1))
    await asyncio.sleep(5)
    story = await w.cp.task_story("web", 0)
    assert story.now is not None
    assert (story.now.kind, story.now.cause) == ("start", "release")
    assert story.events == []


@pytest.mark.behaviour("BUG-CP9")
@scenario()
async def test_a_step_of_the_clock_holds_up_no_drain(w: World):
    """The wall clock is set back by an hour during the drain."""
    slow = UpdatePolicy(drain_s=5)
    await w.deployed(a_job(3, update=slow))
    await w.cp.apply_job(a_job(3, update=slow, command=["/bin/other"]))
    await w.until(lambda: w.endpoints_count(2))
    w.runtime.wall = lambda: clock() - 3600
    await w.stable(within_s=60)
    assert all(task.version == 2 for task in (await w.cp.get_job("web")).record.tasks)


@pytest.mark.behaviour("BUG-CP20")
@scenario(repair_after_s=20)
async def test_tasks_move_back_towards_even_spread(w: World):
    await w.deployed(a_job(6))
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    w.region.machines["m1"].power_off()
    w.region.machines["m2"].power_off()
    await w.until(lambda: w.alive() == {"m1": 0, "m2": 0, "m3": 6}, 900)
    w.region.machines["m1"].power_on()
    w.region.machines["m2"].power_on()
    lowest = 6

    async def is_even() -> bool:
        nonlocal lowest
        lowest = min(lowest, len(await w.endpoints()))
        return w.alive() == {"m1": 2, "m2": 2, "m3": 2}

    await w.until(w.all_answer)
    await w.stable()
    await w.until(is_even, 600)
    await w.stable()
    assert lowest >= 5  # the budget is one task
    moves = [e for e in await events_of(w) if e.cause == "rebalance"]
    assert len([e for e in moves if e.outcome == "done"]) == 4
    count = len(await events_of(w))
    await asyncio.sleep(300)
    assert len(await events_of(w)) == count


@pytest.mark.behaviour("BUG-CP3")
@scenario(repair_after_s=120)
async def test_a_pause_of_the_control_plane_is_no_quiet_time_of_a_job(w: World):
    """After a pause of minutes, the job is observed again before its spread is repaired."""
    await w.deployed(a_job(6))
    w.region.machines["m1"].power_off()
    await w.until(lambda: w.alive() == {"m1": 0, "m2": 3, "m3": 3}, 900)
    w.region.machines["m1"].power_on()
    await w.until(w.all_answer)
    await w.stable()
    await asyncio.sleep(60)  # the job is checked each 30 s, so its quiet time begins
    asyncio.get_running_loop()._virtual.now += 361
    await asyncio.sleep(80)
    assert w.alive() == {"m1": 0, "m2": 3, "m3": 3}
    await w.until(lambda: w.alive() == {"m1": 2, "m2": 2, "m3": 2}, 300)


@pytest.mark.behaviour("BUG-CP20")
@scenario(repair_after_s=100_000)
async def test_a_smaller_job_leaves_the_fullest_place_and_keeps_its_indexes(w: World):
    await w.deployed(a_job(4))
    for machine in ("m1", "m2"):
        w.region.machines[machine].power_off()
    await w.until(lambda: w.alive() == {"m1": 0, "m2": 0, "m3": 4}, 900)
    for machine in ("m1", "m2"):
        w.region.machines[machine].power_on()
    await w.until(w.all_answer)
    await asyncio.sleep(30)
    await w.cp.apply_job(a_job(8))
    await w.stable()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 4}
    await w.cp.apply_job(a_job(6))
    await w.stable()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    record = (await w.cp.get_job("web")).record
    assert [task.index for task in record.tasks] == [0, 1, 4, 5, 6, 7]
    await w.cp.apply_job(a_job(7))
    await w.stable()
    record = (await w.cp.get_job("web")).record
    assert [task.index for task in record.tasks] == [0, 1, 2, 4, 5, 6, 7]
    await w.cp.apply_job(a_job(0))
    await w.until(lambda: w.alive().total() == 0)


async def test_a_log_keeps_the_newest_events_up_to_its_bound() -> None:
    async with MemoryStore(strict=True) as store:
        table, log = JobTable(store), EventLog(store)
        record = JobRecord(name="web", spec=a_job(1), version=1)
        for number in range(60):
            record = replace(record, generation=number)
            await log.commit(table, record, [an_event(task) for task in range(23)])
        await EventLog(store).commit(table, replace(record, generation=99), [an_event(0)])
        kept = (await log.page(table, "web", 0, 500)).events
        kept += (await log.page(table, "web", kept[-1].seq, 500)).events
        assert [event.seq for event in kept] == list(range(kept[0].seq, 60 * 23 + 2))
        assert ROW * (ROWS - 1) <= len(kept) <= ROW * ROWS
        everything = [an_event(task) for task in range(15_000)]
        tasks = [TaskRecord(index=index, version=1, generation=1) for index in range(15_000)]
        await log.commit(table, replace(record, generation=100, tasks=tasks), everything)
        rows = (await store.list_prefix("job-events/web/")).entries
        assert len(rows) == ROWS
        assert (await log.page(table, "web", 0, 500)).more


@pytest.mark.behaviour("FE7")
async def test_a_page_of_a_log_reads_no_rows_that_it_does_not_need() -> None:
    """The console requests three pages, and each request read all rows at once."""
    turns = 0

    async def checkpoint() -> None:
        nonlocal turns
        turns += 1

    async with MemoryStore(strict=True) as store:
        table, log = JobTable(store), EventLog(store, checkpoint)
        record = JobRecord(name="web", spec=a_job(1), version=1)
        await log.commit(table, record, [an_event(task) for task in range(5 * ROW)])
        for after, limit, rows in [(0, 10, 1), (0, ROW, 2), (4 * ROW, 10, 1), (5 * ROW, 10, 1)]:
            turns = 0
            page = await log.page(table, "web", after, limit)
            assert turns == rows
            expected = range(after + 1, min(after + limit, 5 * ROW) + 1)
            assert [event.seq for event in page.events] == [*expected]
            assert page.more == (after + limit < 5 * ROW)
        await log.commit(table, record, [], is_gone=True)
        assert (await log.page(table, "web", 90 * ROW, 10)).events == []
        with pytest.raises(NotFound):
            await log.page(table, "other", 90 * ROW, 10)


async def test_the_logs_of_jobs_that_are_gone_have_a_common_bound(monkeypatch) -> None:
    """Logs were kept forever. A pipeline that creates a job an hour filled the store."""
    monkeypatch.setattr(event_log, "GONE_MAX", 3)
    async with MemoryStore(strict=True) as store:
        table, log = JobTable(store), EventLog(store)

        async def there(name: str, number: int) -> JobRecord:
            spec = replace(a_job(1), name=name)
            record = JobRecord(name=name, spec=spec, version=1, generation=number)
            await log.commit(table, record, [an_event(0)])
            return record

        async def is_removed(record: JobRecord) -> None:
            await log.commit(table, record, [an_event(0)], is_gone=True)

        for number in range(5):
            await is_removed(await there(f"job{number}", number))
        assert await logs_of(store) == {"job2", "job3", "job4"}
        await there("job2", 9)  # the job exists again, and its log continues
        for number in range(5, 8):
            await is_removed(await there(f"job{number}", number))
        assert await logs_of(store) == {"job2", "job5", "job6", "job7"}
        assert [event.seq for event in (await log.page(table, "job2", 0, 500)).events] == [1, 2, 3]
        with pytest.raises(NotFound):
            await log.page(table, "job3", 0, 500)


@pytest.mark.behaviour("BUG-CP35")
async def test_logs_of_deleted_jobs_have_a_bound(monkeypatch) -> None:
    """A later job of any name begins above the numbers of all forgotten jobs."""
    monkeypatch.setattr(event_log, "GONE_MAX", 3)
    async with MemoryStore(strict=True) as store:
        old = [Put(f"retired/old{n}", str(100 + n).encode()) for n in range(4)]
        await store.txn({}, old)  # as earlier releases wrote it, without a list
        table = JobTable(store)
        for number in range(5):
            name = f"job{number}"
            record = JobRecord(
                name=name, spec=a_job(1, name=name), version=1, generation=number, asked=number
            )
            await EventLog(store).commit(table, record, [])
            await EventLog(store).commit(table, record, [], is_gone=True)
        kept = {entry.key for entry in (await store.list_prefix("retired/")).entries}
        assert kept == {"retired/job2", "retired/job3", "retired/job4"}
        assert await retired_job(store, "job3") == RetiredJob(generation=3, asked=3)
        assert await retired_job(store, "old0") == RetiredJob(generation=103, asked=1)
        await store.txn({}, [Put("retired/web", b"14")])
        assert await retired_job(store, "web") == RetiredJob(generation=14)


@pytest.mark.behaviour("BUG-CP35")
@scenario()
async def test_a_later_job_of_a_name_reports_where_copies_of_the_earlier_one_may_run(w: World):
    """The job was stopped while a machine was cut off, and its tasks there continue."""
    await w.deployed(a_job(3))
    task = w.cp._jobs.get("web").tasks[0]
    there = w.region.machines[task.placement.machine]
    there.reachable = False
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].placement.machine != there.name, 300)
    await w.cp.stop_job("web")
    await w.until(lambda: w.cp._jobs.find("web") is None)
    await w.cp.apply_job(a_job(3))
    assert f"web-0 may still run on {there.name}" in (await w.cp.get_job("web")).detail
    there.reachable = True
    await w.until(lambda: not w.cp._jobs.get("web").leaving, 300)
    await w.stable()
    assert "may still run" not in (await w.cp.get_job("web")).detail
    w.region.broken_rules.clear()  # two copies for a moment, which `keep` allows


async def logs_of(store: MemoryStore) -> set[str]:
    rows = (await store.list_prefix("job-events/")).entries
    return {row.key.split("/")[1] for row in rows}


def an_event(task: int) -> JobEvent:
    return JobEvent(
        task=task,
        operation=f"web-{task}.1",
        kind=OperationKind.START,
        cause=Cause.RESIZE,
        outcome=OperationState.DONE,
    )
