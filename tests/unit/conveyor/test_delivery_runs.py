"""Runs of a pipeline over model jobs, from the trigger to the end."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from control_plane.store.bounds import ROWS_MAX
from conveyor import records, service
from conveyor.api import ControlRequest, ControlVerb, StartRequest
from conveyor.core.evaluation import Measurement
from conveyor.runs import GateOutcome, RunState
from tests.unit.conveyor.delivery_model import (
    NO_DATA,
    KillableStore,
    ModelJob,
    World,
    a_pipeline,
    digest,
)
from wire.errors import Busy, Conflict, Forbidden, InvalidInput, NotFound, Unreachable

pytestmark = pytest.mark.behaviour("CV1", "CV2", "CV5")


def control(verb: str, reason: str = "because", gate: str = "") -> ControlRequest:
    return ControlRequest(verb=ControlVerb(verb), reason=reason, gate=gate)


async def test_cv1_a_good_image_goes_through_every_stage_and_gives_the_push_back():
    world = await World().begin()
    await world.rounds(3)
    assert world.plane.calls == [], "the job runs the newest image already"
    world.plane.images["web"] = digest(2)
    run = await world.until("done")
    job = world.plane.jobs["web"]
    assert [c[3] for c in world.plane.calls if c[0] == "push"] == ["canary", "percent", "all"]
    assert world.plane.calls[-1] == ("give", "web")
    assert job.tasks == [digest(2)] * 10
    assert job.owner == ""
    assert [s.name for s in run.steps] == ["canary 1", "50 %", "all"]
    for step in run.steps[:2]:
        assert step.reached is not None
        assert step.ended is not None
        assert step.ended - step.reached >= 60
    history = await world.service.history("web", 10, None)
    assert all(v.numbers == {"max": 0.01} for v in history.verdicts[run.number])
    assert {v.step for v in history.verdicts[run.number]} == {0, 1, 2}


async def test_cv1_cv5_a_bad_image_is_stopped_at_the_canary_and_rolled_back_with_its_numbers():
    world = await World(a_pipeline(on_failure={"notify": ["http://hook.example/x"]})).begin()
    world.plane.images["web"] = digest(2)
    await world.until("done")
    world.plane.images["web"] = digest(3)
    world.meter.bad = {digest(3)}
    run = await world.until("rolled-back")
    job = world.plane.jobs["web"]
    assert job.tasks == [digest(2)] * 10
    assert job.owner == ""
    assert [s.name for s in run.steps] == ["canary 1", "rollback"]
    assert "0.4 errors" in run.reason
    [*_, last] = (await world.service.history("web", 1, None)).verdicts[run.number]
    assert (last.outcome, last.numbers) == (GateOutcome.FAIL, {"max": 0.4})
    assert [(url, r.number) for url, r in world.sent] == [("http://hook.example/x", run.number)]
    await world.rounds(50)
    assert job.tasks == [digest(2)] * 10, "the trigger does not start a failed image again"


async def test_no_data_is_a_failure_at_the_deadline_and_not_before():
    world = await World().begin()
    world.meter.default = NO_DATA
    world.plane.images["web"] = digest(2)
    await world.rounds(12)
    run = await world.run()
    assert run.state is RunState.RUNNING
    assert run.verdicts["errors"].outcome is GateOutcome.NO_DATA
    run = await world.until("rolled-back")
    assert "Prometheus does not answer" in run.reason
    assert run.steps[0].ended - run.steps[0].reached > 60 + 300


async def test_cv2_a_share_is_kept_while_the_size_changes():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    job = world.plane.jobs["web"]
    while job.tasks.count(digest(2)) < 5:
        await world.rounds(1)
    await world.rounds(2)
    job.resize(20)
    await world.rounds(4)
    assert (await world.run()).waits.startswith("50 %: web")
    assert job.allowed() == 10
    while job.tasks.count(digest(2)) < 10:
        assert (await world.run()).step == 1
        await world.rounds(1)
    await world.until("done")
    assert job.tasks == [digest(2)] * 20


async def test_a_newer_image_supersedes_a_waiting_run_but_not_a_running_one():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(3)
    for number in (3, 4):
        world.plane.images["web"] = digest(number)
        await world.rounds(1)
    run = await world.run()
    assert run.image == digest(2)
    await world.until("done")
    last = await world.until("done")
    runs = (await world.service.history("web", 10, None)).runs
    assert last.image == digest(4)
    assert [(r.image, r.state.value) for r in sorted(runs, key=lambda r: r.number)] == [
        (digest(2), "done"),
        (digest(3), "superseded"),
        (digest(4), "done"),
    ]
    assert all(digest(3) not in call for call in world.plane.calls)


async def test_a_rollback_restores_the_image_that_finished_last():
    world = await World().begin()
    world.meter.bad = {digest(3), digest(4)}
    for number in (2, 3, 4):
        world.plane.images["web"] = digest(number)
        await world.until("done" if number == 2 else "rolled-back")
        assert world.plane.jobs["web"].tasks == [digest(2)] * 10


async def test_a_rollback_during_a_rollback_is_refused_with_its_reason():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    await world.service.control("web", control("rollback", "wrong colour"), "user:ann")
    with pytest.raises(
        Conflict, match=r"is already rolling back: asked for by user:ann: wrong colour"
    ):
        await world.service.control("web", control("rollback"), "user:bob")
    run = await world.until("rolled-back")
    assert world.plane.jobs["web"].tasks == [digest(1)] * 10
    with pytest.raises(Conflict, match="no run made a change"):
        await world.service.control("web", control("rollback"), "user:bob")
    assert any(entry.who == "user:ann" for entry in run.log)


async def test_a_run_that_is_done_can_be_rolled_back_to_the_image_before():
    world = await World().begin()
    for number in (2, 3):
        world.plane.images["web"] = digest(number)
        await world.until("done")
    await world.service.control("web", control("rollback"), "user:ann")
    await world.until("rolled-back")
    assert world.plane.jobs["web"].tasks == [digest(2)] * 10
    await world.rounds(30)
    assert world.plane.jobs["web"].tasks == [digest(2)] * 10


async def test_a_paused_run_changes_nothing_and_soaks_again_when_resumed():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)
    await world.service.control("web", control("pause"), "user:ann")
    with pytest.raises(Conflict, match="already paused"):
        await world.service.control("web", control("pause"), "user:ann")
    await world.rounds(100)
    job = world.plane.jobs["web"]
    assert (job.tasks.count(digest(2)), job.paused) == (1, True)
    resumed_at = world.now
    await world.service.control("web", control("resume"), "user:ann")
    run = await world.until("done")
    assert not job.paused
    passed = next(e.at for e in run.log if e.what == "canary 1 passed")
    assert passed - resumed_at >= 60


@pytest.mark.behaviour("BUG-CP121")
async def test_a_request_that_was_decided_on_an_earlier_version_is_refused():
    """Ann resumed and paused again for another reason; Bob, who saw the first pause, resumed."""
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)
    view = await world.service.control("web", control("pause"), "user:ann")
    seen = view.record.version
    await world.rounds(20)
    assert (await world.service.view("web")).record.version == seen
    for verb in ("resume", "pause"):
        request = replace(control(verb), expect=(await world.service.view("web")).record.version)
        await world.service.control("web", request, "user:ann")
    with pytest.raises(Conflict, match=f"it is at version {seen + 2}, not {seen}"):
        await world.service.control("web", replace(control("resume"), expect=seen), "user:bob")
    assert (await world.run()).paused
    await world.service.start("web", StartRequest(image=digest(3)), "user:ann")
    abort = replace(control("abort", "wrong"), expect=seen + 2)
    with pytest.raises(Conflict, match="cannot abort pipeline web"):
        await world.service.control("web", abort, "user:bob")
    await world.service.control("web", control("resume"), "user:ann")


async def test_an_aborted_run_freezes_its_jobs_and_the_next_run_continues():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    with pytest.raises(InvalidInput, match="needs a reason"):
        await world.service.control("web", control("abort", ""), "user:ann")
    await world.service.control("web", control("abort", "fire"), "user:ann")
    run = await world.until("aborted")
    job = world.plane.jobs["web"]
    mixed = list(job.tasks)
    assert "user:ann: fire" in run.reason
    await world.rounds(50)
    assert job.paused
    assert job.tasks == mixed
    world.plane.images["web"] = digest(3)
    await world.until("done")
    assert (job.tasks, job.paused, job.owner) == ([digest(3)] * 10, False, "")


async def test_an_aborted_run_can_be_rolled_back():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    await world.service.control("web", control("abort"), "user:ann")
    await world.until("aborted")
    await world.service.control("web", control("rollback"), "user:ann")
    await world.until("rolled-back")
    job = world.plane.jobs["web"]
    assert (job.tasks, job.paused, job.owner) == ([digest(1)] * 10, False, "")


async def test_a_skipped_step_is_logged_with_user_and_reason():
    world = await World().begin()
    world.meter.default = NO_DATA
    world.plane.images["web"] = digest(2)
    await world.rounds(4)
    await world.service.control("web", control("skip", "Prometheus is rebuilt"), "user:ann")
    world.meter.default = Measurement(GateOutcome.PASS, "fine", {})
    run = await world.until("done")
    assert ("user:ann", "skips canary 1: Prometheus is rebuilt") in [
        (e.who, e.what) for e in run.log
    ]


async def test_an_approval_waits_for_a_user_who_may_approve():
    spec = a_pipeline(
        gates={
            "errors": {"query": {"promql": "errors", "at_most": 0.1}},
            "release": {"approval": {"by": ["ann"]}, "deadline_s": "2h"},
        },
        stages=[
            {"kind": "canary", "tasks": 1, "gates": ["errors", "release"]},
            {"kind": "all"},
        ],
    )
    world = await World(spec).begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(100)
    assert (await world.run()).waits == "canary 1: waits for approval release"
    with pytest.raises(Forbidden, match="may not approve release"):
        await world.service.control("web", control("approve"), "user:bob")
    await world.service.control("web", control("approve", "looks good"), "user:ann")
    run = await world.until("done")
    verdicts = (await world.service.history("web", 1, run.number)).verdicts[run.number]
    [given] = [v for v in verdicts if v.gate == "release"]
    assert given.reason == "approved by user:ann: looks good"


async def test_a_job_that_its_owner_changes_during_a_run_is_not_changed_further():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    world.plane.jobs["web"].want(digest(9))
    run = await world.until("stopped")
    assert "changed to image" in run.reason
    assert world.plane.jobs["web"].image == digest(9)
    assert not world.plane.jobs["web"].paused


async def test_jobs_in_order_begin_when_the_previous_one_is_done():
    world = World(a_pipeline(jobs=["web", "api"], order="in-order"))
    world.plane.jobs["api"] = ModelJob()
    await world.begin()
    world.plane.images["web"] = digest(2)
    await world.until("done")
    pushes = [c[1] for c in world.plane.calls if c[0] == "push"]
    assert pushes == ["web"] * 3 + ["api"] * 3


@pytest.mark.behaviour("CV3", "AV15")
async def test_a_bug_never_reaches_the_second_of_two_regions():
    """With one job for each region or shard, in order, the first job stops the release."""
    world = World(a_pipeline(jobs=["web", "api"], order="in-order"))
    world.plane.jobs["api"] = ModelJob()
    await world.begin()
    world.plane.images["web"] = digest(2)
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")
    assert {c[1] for c in world.plane.calls} == {"web"}
    assert world.plane.jobs["api"].tasks == [digest(1)] * 10


@pytest.mark.behaviour("BUG-UX132")
async def test_the_reason_of_a_rollback_is_still_true_after_the_end_of_the_run():
    """The scheduler shows it as the result of the last update, until the next one."""
    world = await World().begin()
    world.plane.images["web"], world.meter.bad = digest(2), {digest(2)}
    run = await world.until("rolled-back")
    written = f"pipeline web, run {run.number}: rolled back: {run.reason}"
    assert written in world.plane.jobs["web"].reasons


async def test_a_failure_of_the_second_job_rolls_both_back():
    world = World(a_pipeline(jobs=["web", "api"], order="together"))
    world.plane.jobs["api"] = ModelJob()
    await world.begin()
    world.plane.images["web"] = digest(2)
    while len(await _steps(world)) < 2:
        await world.rounds(1)
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")
    assert [j.tasks for j in world.plane.jobs.values()] == [[digest(1)] * 10] * 2


async def _steps(world: World):
    active = (await world.service.view("web")).record.active
    return active.steps if active is not None else ()


async def test_stages_begin_only_in_windows_and_a_rollback_at_any_time():
    spec = a_pipeline(windows={"during": ["mon-fri 09:00-17:00"]})
    world = World(spec)
    world.now = 1_799_996_400.0  # Friday 2027-01-15, 07:00 UTC
    await world.begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(10)
    assert world.plane.calls == []
    world.now += 2 * 3600
    await world.rounds(4)
    assert [c[3] for c in world.plane.calls] == ["canary"]
    world.now += 8 * 3600
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")


async def test_a_run_waits_and_reports_while_the_front_end_is_unreachable():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(3)
    world.plane.is_away = True
    await world.rounds(20)
    view = await world.service.view("web")
    assert "cannot read job web" in view.trouble or "image store" in view.trouble
    assert view.record.active.state is RunState.RUNNING
    world.plane.is_away = False
    await world.until("done")


async def test_a_step_of_the_clock_backwards_only_waits_longer():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(8)
    world.now -= 3600
    run = await world.until("done", most=2000)
    assert run.state is RunState.DONE


async def test_a_step_of_the_clock_forwards_skips_no_gate():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(6)
    world.now += 86_400
    world.meter.bad = {digest(2)}
    run = await world.until("rolled-back")
    assert [s.name for s in run.steps] == ["canary 1", "rollback"]
    assert max(c[3] for c in world.plane.calls if c[0] == "push") == "canary"


async def test_a_schedule_starts_the_newest_image_once_at_each_time():
    spec = a_pipeline(trigger={"image": "web", "schedule": ["mon-fri 10:00"]})
    world = World(spec)
    world.now = 1_799_996_400.0  # Friday 07:00 UTC
    await world.begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    assert world.plane.calls == []
    world.now += 3 * 3600
    await world.until("done")
    world.plane.images["web"] = digest(3)
    await world.rounds(50)
    assert world.plane.jobs["web"].image == digest(2), "the next time is on Monday"
    world.now += 3 * 86_400
    await world.until("done")
    assert world.plane.jobs["web"].image == digest(3)


@pytest.mark.behaviour("BUG-CP139")
async def test_a_changed_schedule_starts_no_run_for_a_time_before_the_change():
    """Formerly a run began at once if the new schedule had a time since the last start."""
    world = World(a_pipeline())
    world.now = 1_799_996_400.0  # Friday 07:00 UTC
    await world.begin()
    world.now += 8 * 3600
    trigger = {"image": "web", "schedule": ["mon-fri 10:00"]}
    await world.service.apply(a_pipeline(trigger=trigger), "user:ann")
    world.plane.images["web"] = digest(2)
    await world.rounds(20)
    assert world.plane.calls == [], "it is 15:00, and the next time is on Monday"
    world.now += 3 * 86_400
    await world.until("done")
    assert world.plane.jobs["web"].image == digest(2)


async def test_a_job_belongs_to_one_pipeline():
    world = await World().begin()
    with pytest.raises(Conflict, match="job web belongs to pipeline web"):
        await world.service.apply(replace(a_pipeline(), name="other"), "user:ann")


async def test_a_run_by_hand_needs_no_trigger():
    world = await World(a_pipeline(trigger={})).begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)
    assert world.plane.calls == []
    await world.service.start("web", StartRequest(image=digest(2), reason="try"), "user:ann")
    run = await world.until("done")
    assert (run.by, run.trigger) == ("user:ann", "hand")


async def test_a_second_process_on_the_same_store_is_refused():
    world = await World().begin()
    with pytest.raises(Busy, match="another process owns it"):
        await world.store.__aenter__()


async def test_a_process_that_lost_its_store_changes_no_job():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    world.store.failure = lambda: "the lease has ended"  # type: ignore[method-assign]
    with pytest.raises(Busy, match="the lease has ended"):
        await world.rounds(3)
    assert world.plane.calls == []


async def test_the_loop_of_the_service_carries_a_run_to_its_end():
    world = await World().begin()
    world.service._round_s = 0.001
    world.plane.images["web"] = digest(2)
    running = asyncio.ensure_future(world.service.run())
    await world.service.load()
    try:
        async with asyncio.timeout(30):
            while (await world.service.view("web")).last is None:
                world.now += 5
                world.plane.jobs["web"].tick()
                if "web" in world.service._wake:
                    world.service._wake["web"].set()
                await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert world.plane.jobs["web"].tasks == [digest(2)] * 10


async def test_gates_are_measured_while_a_window_keeps_the_next_stage_back():
    world = World(a_pipeline(windows={"during": ["mon-fri 06:00-07:02"]}))
    world.now = 1_799_996_400.0  # Friday 2027-01-15, 07:00 UTC
    await world.begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(60)
    run = await world.run()
    assert (run.step, "outside of its windows" in run.waits) == (1, True)
    assert world.now - run.verdicts["errors"].at < 60
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")


async def test_a_notification_is_sent_again_until_its_hook_answers():
    world = await World(a_pipeline(on_failure={"notify": ["http://hook.example/x"]})).begin()
    answered = world._send
    refused = 0

    async def refuses(url: str, message: object) -> None:
        nonlocal refused
        refused += 1
        raise Unreachable("no answer")

    world.service._notifications.send = refuses
    world.plane.images["web"] = digest(2)
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")
    await world.rounds(20)
    assert 2 <= refused <= 5, "once a minute"
    world.restart()
    await world.service.load()
    world.service._notifications.send = answered
    await world.rounds(20)
    assert len(world.sent) == 1


@pytest.mark.behaviour("BUG-CP83")
async def test_a_hook_that_is_down_does_not_keep_the_others_from_their_notification():
    """Formerly the first failing hook ended the list, and the hooks before it were called each
    minute."""
    hooks = ["http://one.example/", "http://down.example/", "http://two.example/"]
    world = await World(a_pipeline(on_failure={"notify": hooks})).begin()

    async def sends(url: str, message: object) -> None:
        if url == hooks[1]:
            raise Unreachable("no answer")
        await world._send(url, message)

    world.service._notifications.send = sends
    world.plane.images["web"] = digest(2)
    world.meter.bad = {digest(2)}
    await world.until("rolled-back")
    await world.rounds(40)
    assert [url for url, _ in world.sent] == [hooks[0], hooks[2]]
    assert (await world.service.view("web")).record.unsent
    await world.rounds(20, 6_000.0)
    assert not (await world.service.view("web")).record.unsent


@pytest.mark.behaviour("BUG-CP143")
async def test_a_pipeline_with_the_name_of_a_removed_one_notifies_every_hook():
    """Formerly run 1 of the new pipeline notified only hooks that run 1 of the removed one had
    not reached."""
    hooks = ["http://one.example/", "http://down.example/"]
    world = await World(a_pipeline(on_failure={"notify": hooks})).begin()
    notified = list[str]()

    async def sends(url: str, _: object) -> None:
        if url == hooks[1]:
            raise Unreachable("no answer")
        notified.append(url)

    world.service._notifications.send = sends
    world.meter.bad = {digest(2), digest(3)}
    world.plane.images["web"] = digest(2)
    await world.until("rolled-back")
    await world.rounds(2)
    await world.service.remove("web")
    await world.service.apply(a_pipeline(on_failure={"notify": hooks}), "user:ann")
    world.plane.images["web"] = digest(3)
    await world.until("rolled-back")
    await world.rounds(2)
    assert notified == [hooks[0], hooks[0]]


def of_two_jobs() -> World:
    world = World(a_pipeline(jobs=["web", "api"], order="together"))
    world.plane.jobs["api"] = ModelJob()
    world.plane.images["web"] = digest(2)
    return world


@pytest.mark.behaviour("BUG-CP84")
async def test_a_job_that_is_removed_leaves_the_other_jobs_of_a_run_paused():
    """Formerly the other jobs stayed half updated, and their update continued without gates."""
    world = await of_two_jobs().begin()
    while world.plane.jobs["api"].tasks.count(digest(2)) < 1:
        await world.rounds(1)
    del world.plane.jobs["web"]
    run = await world.until("stopped")
    assert "job web no longer exists" in run.reason
    assert world.plane.jobs["api"].paused


@pytest.mark.behaviour("BUG-CP84")
async def test_a_job_that_is_removed_does_not_end_the_rollback_of_others():
    """Formerly the other jobs kept the bad image."""
    world = await of_two_jobs().begin()
    while world.plane.jobs["api"].tasks.count(digest(2)) < 5:
        await world.rounds(1)
    world.meter.bad = {digest(2)}
    while (await world.run()).state != "rolling-back":
        await world.rounds(1)
    del world.plane.jobs["web"]
    await world.until("rolled-back")
    assert set(world.plane.jobs["api"].tasks) == {digest(1)}


async def test_only_a_pipeline_without_a_run_can_be_removed_and_its_history_with_it():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)
    with pytest.raises(Conflict, match="it has a run"):
        await world.service.remove("web")
    await world.until("done")
    await world.service.remove("web")
    assert (await world.store.list_prefix("")).entries == ()


async def test_old_runs_are_dropped_with_their_verdicts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RUNS_KEPT", 2)
    world = await World().begin()
    for number in range(2, 7):
        world.plane.images["web"] = digest(number)
        await world.until("done", most=100)
        while (await world.service.view("web")).last.image != digest(number):
            await world.rounds(1)
    history = await world.service.history("web", 100, None)
    assert [run.number for run in history.runs] == [5, 4]
    assert len((await world.store.list_prefix("verdicts/")).entries) == sum(
        run.measured for run in history.runs
    )


@pytest.mark.behaviour("BUG-CP95")
async def test_a_history_of_more_verdicts_than_a_transaction_takes_can_be_dropped_and_removed(
    monkeypatch: pytest.MonkeyPatch,
):
    """On etcd the run whose end dropped such a run could not end, and ended the service."""
    monkeypatch.setattr(records, "RUNS_KEPT", 1)
    gates = {"errors": {"query": {"promql": "errors", "at_most": 0.1}, "every_s": 10}}
    stages = [{"kind": "all", "soak_s": "30m", "gates": ["errors"]}]
    world = World(a_pipeline(gates=gates, stages=stages))
    world.store = KillableStore(strict=True)
    await world.begin()
    for number in (2, 3):
        world.plane.images["web"] = digest(number)
        assert await done(world, digest(number)) > ROWS_MAX
    history = await world.service.history("web", 100, None)
    kept = (await world.store.list_prefix("verdicts/")).entries
    assert [run.number for run in history.runs] == [2]
    assert len(kept) == history.runs[0].measured
    await world.service.remove("web")
    assert (await world.store.list_prefix("")).entries == ()


@pytest.mark.behaviour("BUG-CP95")
async def test_a_run_ends_although_old_runs_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RUNS_KEPT", 1)
    world = await World().begin()
    for number in (2, 3):
        world.plane.images["web"] = digest(number)
        with monkeypatch.context() as broken:
            broken.setattr(records.DeliveryRecords, "_delete_below", _refused)
            await done(world, digest(number))
    assert len((await world.store.list_prefix("runs/")).entries) == 2
    world.plane.images["web"] = digest(4)
    await done(world, digest(4))
    history = await world.service.history("web", 100, None)
    kept = (await world.store.list_prefix("verdicts/")).entries
    assert [run.number for run in history.runs] == [3], "the end of the next run repeats it"
    assert len(kept) == history.runs[0].measured


@pytest.mark.behaviour("BUG-CP105")
async def test_a_history_of_several_runs_has_the_newest_verdicts_of_each(
    monkeypatch: pytest.MonkeyPatch,
):
    """Formerly it had all of them: hundreds of MB where a gate is measured for days."""
    monkeypatch.setattr(service, "VERDICTS_SHOWN", 2)
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    run = await world.until("done")
    everything = (await world.service.history("web", 1, run.number)).verdicts[run.number]
    assert len(everything) == run.measured > 2
    newest = (await world.service.history("web", 10, None)).verdicts[run.number]
    assert newest == everything[-2:]


async def done(world: World, image: str) -> int:
    """Return the number of verdicts of the run of an image, once it is done."""
    while (run := await world.until("done")).image != image:
        await world.rounds(1)
    return run.measured


async def _refused(*_: object) -> None:
    raise Busy("the store accepts no writes")


async def test_a_push_that_appears_after_an_abort_is_paused_too():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    while not world.plane.calls:
        await world.rounds(1)
    assert (await world.run()).pushed == ()
    await world.service.control("web", control("abort"), "user:ann")
    await world.until("aborted")
    assert world.plane.jobs["web"].paused


async def test_a_run_that_waits_for_another_update_of_its_job_begins_after_it():
    world = await World().begin()
    job = world.plane.jobs["web"]
    job.want(digest(9))
    world.plane.images["web"] = digest(2)
    await world.rounds(3)
    waiting = (await world.service.view("web")).record.waiting
    assert waiting is not None
    assert waiting.waits == "another update of job web is under way"
    run = await world.until("done")
    assert run.back == {"web": digest(9)}


async def test_the_image_that_finished_last_is_remembered_while_its_tasks_are_broken():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.until("done")
    job = world.plane.jobs["web"]
    # not settled: the image that the job wants now has not been shown to work
    job.broken = {digest(2)}
    world.plane.images["web"] = digest(3)
    world.meter.bad = {digest(3)}
    await world.rounds(3)
    assert (await world.run()).back == {"web": digest(2)}
    job.broken = set()
    await world.until("rolled-back")
    assert job.tasks == [digest(2)] * 10


async def test_a_start_with_an_image_that_the_store_does_not_have_is_refused_at_once():
    """Formerly the run held the pipeline for half an hour, in a stage that it could never reach."""
    world = await World().begin()
    with pytest.raises(NotFound, match="the image store has no image sha256:"):
        await world.service.start("web", StartRequest(image=digest(99)), "user:ann")
    assert (await world.service.view("web")).record.waiting is None
    world.plane.is_away = True
    view = await world.service.start("web", StartRequest(image=digest(2)), "user:ann")
    assert view.record.waiting is not None, "it has no verdict: the run waits"
