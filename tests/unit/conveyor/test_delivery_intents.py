"""The push of the conveyor together with the other writers of a job."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Health, ImageFormat, ImageInfo, TaskState
from control_plane.api.intents import PushIntent, StoredIntent, part_of
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, TaskPhase, TaskRecord
from control_plane.api.updates import Rollout
from conveyor.api import ControlRequest, ControlVerb, PipelineStage, StageKind, StartRequest
from conveyor.core.progress import progress
from conveyor.core.stages import wanted
from conveyor.pipeline_file import pipeline_spec
from conveyor.push import newest
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


@pytest.mark.behaviour("JC15")
async def test_a_write_between_look_and_push_is_not_overwritten():
    """The push names the version that it replaces."""
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
    await world.until("done")  # the run began on top of the version that it saw next
    assert job.image == digest(2)


async def test_a_user_that_takes_over_the_push_ends_the_run_and_keeps_the_push():
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
    await world.service.start("web", StartRequest(image=digest(2)), "user:ann")
    await world.until("done")
    assert job.tasks == [digest(2)] * 10


async def test_no_stage_begins_under_a_hold_and_its_clock_stops():
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


async def test_the_next_stage_waits_for_the_end_of_a_hold_and_gates_continue():
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
    """The owner's `update.on_failure = "rollback"` stays in force during a run."""
    world, job = await at_canary()
    job.write("", digest(1), PushIntent(version=1))
    job.went_back = "version 2 failed on 1 task; the job was rolled back to version 1"
    run = await world.until("rolled-back")
    assert run.reason == f"job web: {job.went_back}"
    assert job.tasks == [digest(1)] * 10


async def test_a_percent_stage_of_zero_tasks_is_skipped_and_logged():
    stages = [{"kind": "percent", "percent": 4, "gates": ["errors"]}, {"kind": "all"}]
    world = await World(a_pipeline(stages=stages)).begin()
    world.plane.images["web"] = digest(2)
    run = await world.until("done")
    assert "4 % is zero tasks at this size" in [entry.what for entry in run.log]
    assert [c[3] for c in world.plane.calls if c[0] == "push"] == ["all"]


async def test_a_rollback_of_a_run_that_is_done_takes_the_push_over():
    world = await World().begin()
    job = world.plane.jobs["web"]
    world.plane.images["web"] = digest(2)
    await world.until("done")
    job.write(ANN, digest(2), PushIntent(version=1), "mine")
    await world.service.control("web", control("rollback"), "user:bob")
    await world.until("rolled-back")
    assert (job.tasks, job.owner) == ([digest(1)] * 10, "")


def a_status(**changes: Any) -> JobStatus:
    """Return a job of four tasks: one on image 2, one on a tester's image 3, two on image 1."""
    specs = {
        version: JobSpec(
            name="web", entitlement="e", tasks=4, image=digest(image), command=["/bin/serve"]
        )
        for version, image in ((1, 1), (2, 2), (3, 3))
    }
    tasks = [
        TaskRecord(
            index=index,
            version=version,
            generation=1,
            phase=TaskPhase.RUNNING,
            listed=True,
            state=TaskState.RUNNING,
            health=Health.HEALTHY,
            extra=index == 4,
        )
        for index, version in enumerate((2, 3, 1, 1, 2))
    ]
    record = JobRecord(
        name="web",
        spec=specs[2],
        version=2,
        specs=specs,
        tasks=tasks,
        trials=(3,),
        rollout=Rollout(version=2, base=1, passed=True),
        **changes,
    )
    return JobStatus(
        record=record, phase=JobPhase.PROGRESSING, wanted=4, running=5, healthy=5, updated=2
    )


@pytest.mark.behaviour("JC6")
def test_canaries_of_a_tester_and_extra_tasks_are_neither_new_nor_stable():
    """The push is not diluted, and the comparison uses the tasks that serve unchanged."""
    seen = progress(a_status(), digest(2))
    assert (seen.new, seen.new_healthy, seen.size) == (1, 1, 4)
    assert (seen.new_tasks, seen.stable_tasks) == (("web-0",), ("web-2", "web-3"))


def test_the_push_its_writer_and_a_hold_are_read_from_the_intents():
    push = StoredIntent(
        writer=ME, version=7, reason="r", is_owned=True, value={"version": 2, "tasks": 1}
    )
    hold = StoredIntent(writer=ANN, expires_at=1_800_000_000.0, reason="the cup final", value={})
    seen = progress(a_status(intents={"push": push, "hold": hold}), digest(2))
    assert (seen.push.tasks, seen.push_version, seen.owner) == (1, 7, ME)
    assert seen.held == "user:ann holds it until 2027-01-15 08:00:00 UTC: the cup final"
    given_back = replace(push, is_owned=False)
    assert progress(a_status(intents={"push": given_back}), digest(2)).owner == ""


@pytest.mark.behaviour("CV1")
def test_a_registry_tag_names_the_newest_fetched_image():
    """`trigger.image` is a signed name or a reference of a registry."""

    def an_image(number: int, reference: str) -> ImageInfo:
        return ImageInfo(
            digest=digest(number),
            format=ImageFormat.TAR,
            stream_bytes=1,
            created_at=float(number),
            reference=reference,
        )

    tag = "registry.example/web:stable"
    images = [an_image(1, tag), an_image(2, tag), an_image(3, "registry.example/web:next")]
    assert newest(images, tag) == digest(2)
    assert newest(images, "web") == ""
    moved = [replace(images[0], names=["web:stable"]), *images[1:]]
    assert newest(moved, "web:stable") == digest(1), "a name means one image, however old"


def test_the_tutorial_shows_the_file_of_the_demo():
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs/pipelines.md").read_text()
    lines = (root / "vm_lab/delivery/web.toml").read_text().splitlines()
    missing = [line for line in lines if not line.startswith("#") and line not in page]
    assert missing == []
    pipeline_spec(tomllib.loads("\n".join(lines)), "the demo's pipeline")
