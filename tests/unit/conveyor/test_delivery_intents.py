"""The push of the conveyor beside the other writers of a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.intents import PushIntent, part_of
from conveyor.api import ControlRequest, ControlVerb, PipelineStage, StageKind, StartRequest
from conveyor.core.stages import wanted
from conveyor.runs import RunState
from tests.unit.conveyor.delivery_model import ME, ModelJob, World, a_pipeline, digest

ANN = "user:ann"


def control(verb: str) -> ControlRequest:
    return ControlRequest(verb=ControlVerb(verb), reason="because")


async def at_canary() -> tuple[World, ModelJob]:
    """Return a world in which the canary of image 2 runs."""
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    job = world.plane.jobs["web"]
    while job.tasks.count(digest(2)) < 1:
        await world.rounds(1)
    await world.rounds(1)
    return world, job


@given(st.integers(1, 9_999), st.integers(0, 15_000))
def test_cv2_a_stage_is_as_many_tasks_as_job_control_makes_of_its_share(hundredths: int, size: int):
    stage = PipelineStage(kind=StageKind.PERCENT, percent=hundredths / 100)
    assert wanted(stage, size) == part_of(hundredths / 10_000, size)
    assert 2 * 10_000 * wanted(stage, size) == pytest.approx(2 * hundredths * size, abs=10_000)


async def test_cv2_a_canary_stage_is_a_count_and_a_percent_stage_a_share_of_the_push_intent():
    world, job = await at_canary()
    assert job.push == PushIntent(version=1, tasks=1)
    assert (job.owner, job.reason) == (ME, "pipeline web, run 1: canary 1")
    while (await world.run()).step == 0:
        await world.rounds(1)
    await world.rounds(1)
    assert job.push == PushIntent(version=1, share=0.5)
    await world.until("done")
    assert (job.push, job.owner) == (PushIntent(version=1), "")


async def test_a_write_between_look_and_push_is_not_overwritten():
    """JC15: the push names the version that it replaces."""
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    job = world.plane.jobs["web"]
    await world.rounds(1)
    world.plane.before_write = lambda: job.want(digest(9))
    while not job.version:
        await world.rounds(1)
    assert job.image == digest(9)
    view = await world.service.view("web")
    assert "the push is at version 1, not 0" in view.trouble
    await world.until("done")  # it began on top of what it saw then
    assert job.image == digest(2)


async def test_a_person_who_takes_the_push_over_ends_the_run_and_keeps_it():
    world, job = await at_canary()
    job.write(ANN, digest(2), PushIntent(version=1, share=0.8), "mine")
    run = await world.until("stopped")
    assert run.reason == "user:ann took over the push of job web"
    assert (job.owner, job.push.share, job.paused) == (ANN, 0.8, False)
    world.plane.images["web"] = digest(3)
    await world.rounds(60)
    waiting = (await world.service.view("web")).record.waiting
    assert waiting is not None
    assert waiting.waits == "the push of job web belongs to user:ann, who has to give it back"
    assert job.image == digest(2)


async def test_a_run_by_hand_takes_the_push_over_from_its_owner():
    world = await World(a_pipeline(trigger={})).begin()
    job = world.plane.jobs["web"]
    job.write(ANN, digest(1), PushIntent(version=1), "mine")
    await world.service.start("web", StartRequest(image=digest(2)), "user/ann")
    await world.until("done")
    assert job.tasks == [digest(2)] * 10


async def test_nothing_begins_under_a_hold_and_the_time_of_a_stage_stands_still():
    world = await World(a_pipeline(stages=[{"kind": "all", "reach_s": "5m"}])).begin()
    job = world.plane.jobs["web"]
    job.held = "user:ann holds it until 2027-01-15: the cup final"
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    waiting = (await world.service.view("web")).record.waiting
    assert waiting is not None
    assert waiting.waits == f"job web: {job.held}"
    job.held = ""
    await world.rounds(4)
    job.held = "user:ann holds it again"
    await world.rounds(200)
    run = await world.run()
    assert (run.state, run.waits) == (RunState.RUNNING, f"job web: {job.held}")
    assert 0 < job.tasks.count(digest(2)) < 10
    job.held = ""
    run = await world.until("done")
    assert run.steps[0].blocked_s >= 1_900


async def test_the_next_stage_waits_for_the_end_of_a_hold_and_gates_go_on():
    world, job = await at_canary()
    job.held = "user:ann holds it until noon"
    await world.rounds(100)
    run = await world.run()
    assert (run.step, run.waits) == (0, "50 %: job web: user:ann holds it until noon")
    assert world.now - run.verdicts["errors"].at < 60
    world.meter.bad = {digest(2)}
    await world.rounds(5)
    run = await world.run()
    assert run.state is RunState.ROLLING_BACK
    job.held = ""
    await world.until("rolled-back")


async def test_a_job_that_the_scheduler_brought_back_itself_fails_the_run():
    """`update.on_failure = "rollback"` of the owner stays in force during a run."""
    world, job = await at_canary()
    job.write("", digest(1), PushIntent(version=1))
    job.went_back = "version 2 failed on 1 task; the job went back to version 1"
    run = await world.until("rolled-back")
    assert run.reason == f"job web: {job.went_back}"
    assert job.tasks == [digest(1)] * 10


async def test_a_percent_stage_of_no_task_is_passed_over_and_told():
    stages = [{"kind": "percent", "percent": 4, "gates": ["errors"]}, {"kind": "all"}]
    world = await World(a_pipeline(stages=stages)).begin()
    world.plane.images["web"] = digest(2)
    run = await world.until("done")
    assert "4 % is no task at this size" in [entry.what for entry in run.log]
    assert [c[3] for c in world.plane.calls if c[0] == "push"] == ["all"]


async def test_a_rollback_of_a_run_that_is_done_takes_the_push_over():
    world = await World().begin()
    job = world.plane.jobs["web"]
    world.plane.images["web"] = digest(2)
    await world.until("done")
    job.write(ANN, digest(2), PushIntent(version=1), "mine")
    await world.service.control("web", control("rollback"), "user/bob")
    await world.until("rolled-back")
    assert (job.tasks, job.owner) == ([digest(1)] * 10, "")
