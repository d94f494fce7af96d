"""How reports of agents change a job's record, one case each."""

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from agent.api import (
    Disconnect,
    DisconnectPolicy,
    Exit,
    Health,
    RestartPolicy,
    RestartWhen,
    TaskState,
    TaskStatus,
)
from control_plane.agents.core.commands import Start, Stop, unknown_tasks
from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import (
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
    UpdatePolicy,
)
from control_plane.api.machines import EventKind, UnavailabilityEvent
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from control_plane.api.stored_jobs import read_retired, retired_of
from control_plane.api.updates import OnFailure, Rollout
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decide import decide
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.new_tasks import is_failing
from control_plane.scheduler.core.operations import OperationLedger
from control_plane.scheduler.core.reconcile import next_round_at, observe
from control_plane.scheduler.core.release import with_rollout_advanced
from control_plane.scheduler.core.rollout import tasks_to_place
from control_plane.scheduler.core.sizing import remaining_tasks
from control_plane.scheduler.core.task_commands import command_about, commands
from control_plane.scheduler.core.task_versions import placement_version

IMAGE = "sha256:" + "1" * 64


def a_record(*tasks: TaskRecord, version: int = 1, **spec) -> JobRecord:
    values = {"name": "web", "entitlement": "e", "tasks": len(tasks), "image": IMAGE}
    made = JobSpec(**(values | {"command": ["/x"]} | spec))
    specs = dict.fromkeys(range(1, version + 1), made)
    highest = max((task.generation for task in tasks), default=0)
    return JobRecord(
        name="web", spec=made, version=version, specs=specs, tasks=[*tasks], generation=highest
    )


def a_task(index: int = 0, phase: TaskPhase = TaskPhase.RUNNING, **changes) -> TaskRecord:
    values = {
        "index": index,
        "version": 1,
        "generation": 5,
        "phase": phase,
        "placement": Placement(machine="m1"),
        "listed": phase is TaskPhase.RUNNING,
        "begun": 0.0,
    }
    return TaskRecord(**(values | changes))


def a_status(index: int = 0, **changes) -> TaskStatus:
    values = {
        "task_id": f"web-{index}",
        "generation": 5,
        "epoch": 1,
        "state": TaskState.RUNNING,
        "health": Health.HEALTHY,
        "image": IMAGE,
        "job": "web",
    }
    return TaskStatus(**(values | changes))


def m1(*tasks: TaskStatus, **changes) -> dict[str, ObservedMachine]:
    values = {"up": True, "answering": True, "ready": True}
    return {"m1": ObservedMachine(**(values | changes), tasks={t.task_id: t for t in tasks})}


def at(seconds: float) -> Moment:
    return Moment(wall=1e9 + seconds, steady=seconds)


def after(record: JobRecord, view, now: float = 100.0) -> TaskRecord:
    return observe(record, view, at(now)).tasks[0]


def test_a_task_lost_in_a_reboot_is_started_at_once():
    status = a_status(state=TaskState.STOPPED, last_exit=Exit(result="lost", at=1))
    task = after(a_record(a_task()), m1(status))
    assert (task.phase, task.generation, task.listed) == (TaskPhase.STARTING, 6, False)


@pytest.mark.parametrize("when", list(RestartWhen))
def test_a_task_that_was_cut_off_restarts_at_once(when: RestartWhen):
    status = a_status(state=TaskState.STOPPED, last_exit=Exit(result="cut-off", at=1))
    task = after(a_record(a_task(), restart=RestartPolicy(when=when)), m1(status))
    assert (task.phase, task.generation, task.listed) == (TaskPhase.STARTING, 6, False)


def test_a_failed_start_waits_longer_each_time():
    status = a_status(state=TaskState.FAILED, reason="exec format error")
    record = a_record(a_task(phase=TaskPhase.STARTING, attempts=3))
    waiting = observe(record, m1(status), at(100.0))
    assert waiting.tasks[0].retry_at == 116.0
    assert next_round_at(waiting, at(100.0)) == 116.0
    assert after(waiting, m1(status), 115.0) == waiting.tasks[0]
    again = after(waiting, m1(status), 116.0)
    assert (again.phase, again.attempts, again.retry_at) == (TaskPhase.STARTING, 4, 0.0)


def test_a_task_that_may_end_is_not_started_again():
    done = a_status(state=TaskState.STOPPED, last_exit=Exit(result="success", at=1))
    for when in (RestartWhen.NEVER, RestartWhen.ON_FAILURE):
        record = a_record(a_task(), restart=RestartPolicy(when=when))
        task = after(record, m1(done))
        assert (task.phase, task.generation, task.listed) == (TaskPhase.RUNNING, 5, False)
        assert str(when) in task.reason


@pytest.mark.behaviour("BUG-EL8")
def test_a_failed_task_with_policy_never_is_not_restarted():
    """The task was restarted, and its submitter never learned of the failure."""

    def failed(result: str, code: int | None = None, when: RestartWhen = RestartWhen.NEVER):
        end = a_status(state=TaskState.FAILED, last_exit=Exit(result=result, code=code, at=1))
        record = a_record(a_task(), restart=RestartPolicy(when=when))
        return after(record, m1(end))

    for result, code in (("exit-code", 1), ("signal", None), ("oom-kill", None), ("timeout", None)):
        task = failed(result, code)
        assert (task.phase, task.generation, task.retry_at) == (TaskPhase.RUNNING, 5, 0.0)
        assert "never" in task.reason
        assert failed(result, code, RestartWhen.ON_FAILURE).retry_at > 0
    for result, code in (("exit-code", 203), ("evicted", None), ("start-timeout", None)):
        assert failed(result, code).retry_at > 0  # caused by the host


@pytest.mark.behaviour("SC3")
def test_silence_concludes_nothing_and_a_down_machine_loses_its_task():
    record = a_record(a_task())
    assert observe(record, m1(answering=False), at(1.0)) == record
    task = after(record, m1(up=False, answering=False))
    assert (task.phase, task.listed) == (TaskPhase.LOST, False)
    assert task.placement == Placement(machine="m1")  # until a better one is found


def test_a_leaving_task_is_remembered_when_its_machine_died():
    for phase in (TaskPhase.DRAINING, TaskPhase.STOPPING):
        seen = observe(a_record(a_task(phase=phase), version=2), m1(up=False), at(1.0))
        assert seen.leaving == {"m1": ["web-0"]}
        assert (seen.tasks[0].phase, seen.tasks[0].version) == (TaskPhase.PENDING, 2)


def test_moved_tasks_are_deleted_on_the_returned_machine():
    record = replace(a_record(), leaving={"m1": ["web-0", "web-1"]}, generation=9)
    view = m1(a_status(0, generation=3))
    seen = observe(record, view, at(1.0))
    assert seen.leaving == {"m1": ["web-0"]}
    assert commands(seen, view) == [Stop("m1", "web-0", 9)]
    assert observe(seen, m1(), at(1.0)).leaving == {}
    assert observe(seen, {}, at(1.0)).leaving == {}


@pytest.mark.behaviour("F-49")
def test_an_unsent_start_waits_for_the_old_copy_on_a_returned_machine():
    """The transfer of the image to m2 took long. Meanwhile m1 is back, with the task."""
    task = a_task(phase=TaskPhase.STARTING, generation=7, placement=Placement(machine="m2"))
    record = replace(a_record(task), leaving={"m1": ["web-0"]})
    start = Start("m2", "web-0", 0, 1, 7, Placement(machine="m2"))
    stop = Stop("m1", "web-0", 7)
    new = {"m2": m1()["m1"]}
    down = new | m1(a_status(), up=False, answering=False)
    assert commands(record, down) == [start]
    back = new | m1(a_status())
    assert commands(record, back) == [stop]
    assert command_about(record, 0, "m2", back) is None
    assert after(record, back).reason == "its remains on m1 are removed first"
    silent = new | m1(answering=False)  # silent again, and not declared down yet
    assert commands(record, silent) == []
    gone = observe(record, new | m1(), at(1.0))
    assert commands(gone, new | m1()) == [start]


def test_a_lost_task_that_ran_on_is_adopted_without_a_restart():
    task = after(a_record(a_task(phase=TaskPhase.LOST)), m1(a_status()))
    assert (task.phase, task.generation, task.listed) == (TaskPhase.RUNNING, 5, True)
    sick = a_status(health=Health.UNHEALTHY)
    task = after(a_record(a_task(phase=TaskPhase.LOST)), m1(sick))
    assert (task.phase, task.generation, task.listed) == (TaskPhase.STARTING, 5, False)


def test_a_lost_task_keeps_its_version_when_its_machine_was_taken_away():
    record = a_record(a_task(phase=TaskPhase.LOST), version=2)
    seen = observe(record, m1(a_status(), homes=frozenset()), at(1.0))
    assert (seen.tasks[0].phase, seen.tasks[0].version) == (TaskPhase.PENDING, 1)
    assert seen.leaving == {"m1": ["web-0"]}


def test_a_stop_counts_only_once_the_agent_confirmed_it():
    going = Operation(id="web-0.1", task=0, kind=OperationKind.REMOVE, cause=Cause.RESIZE)
    record = a_record(a_task(phase=TaskPhase.STOPPING, operation=going), tasks=0)
    missing = m1()
    assert commands(observe(record, missing, at(1.0)), missing) == [Stop("m1", "web-0", 5)]
    confirmed = m1(stopped={"web-0": 5})
    assert observe(record, confirmed, at(1.0)).tasks == []


def test_a_higher_generation_overrules_a_foreign_change():
    task = after(a_record(a_task()), m1(a_status(generation=40)))
    assert (task.phase, task.generation) == (TaskPhase.STARTING, 41)


@pytest.mark.behaviour("HP15")
def test_a_start_waits_for_the_profile():
    record = a_record(a_task(phase=TaskPhase.STARTING))
    assert commands(record, m1(ready=False)) == []
    assert "has not proved" in after(record, m1(ready=False)).reason
    assert commands(record, m1(homes=frozenset())) == []
    assert [type(c) for c in commands(record, m1())] == [Start]
    assert commands(record, m1(a_status())) == []
    assert [type(c) for c in commands(record, m1(a_status(generation=4)))] == [Start]


def test_the_refusal_of_an_agent_becomes_the_reason():
    record = a_record(a_task(phase=TaskPhase.STARTING))
    assert after(record, m1(refused={"web-0": "no space"})).reason == "no space"


def test_a_task_that_is_refused_for_long_goes_elsewhere():
    record = a_record(a_task(phase=TaskPhase.STARTING))
    gone = after(record, m1(refused={"web-0": "no space"}))
    assert (gone.phase, gone.avoid, gone.reason) == (TaskPhase.PENDING, "m1", "no space")


def test_a_task_that_must_not_run_twice_moves_after_its_machine_refuses_it():
    """A start without an answer for a minute may still arrive at the agent that refused it."""
    disconnect = Disconnect(policy=DisconnectPolicy.STOP)
    record = a_record(a_task(phase=TaskPhase.STARTING), disconnect=disconnect)
    refusing = m1(refused={"web-0": "no answer"})
    record = observe(record, refusing, at(100.0))
    (task,) = record.tasks
    assert (task.phase, task.generation) == (TaskPhase.STOPPING, 6)
    assert commands(record, refusing) == [Stop("m1", "web-0", 6)]
    assert observe(record, refusing, at(900.0)).tasks == [task], "it is not confirmed"
    gone = after(record, m1(stopped={"web-0": 6}))
    assert (gone.phase, gone.avoid) == (TaskPhase.PENDING, "m1")


def test_unexpected_tasks_are_our_own_tasks_that_belong_elsewhere():
    mine, local = a_status(0), a_status(1, epoch=0)
    tasks = {t.task_id: t for t in (mine, local, a_status(2))}
    assert unknown_tasks(tasks, {"web-2"}) == ["web-0"]


def chosen(record: JobRecord, view) -> tuple[int, ...]:
    return decide(record, DecisionInput(view, at(1.0))).chosen


@pytest.mark.behaviour("SC6", "BUG-AU1")
def test_no_more_than_the_budget_is_replaced_at_once_even_if_all_are_broken():
    """A release may repair a job that has no serving task (ADR 0132)."""
    sick = [a_status(i, health=Health.UNHEALTHY) for i in range(4)]
    tasks = [a_task(i, listed=False) for i in range(4)]
    record = a_record(*tasks, version=2, update=UpdatePolicy(max_unavailable=2))
    assert chosen(record, m1(*sick)) == (0, 1)
    tasks[0] = replace(tasks[0], phase=TaskPhase.STARTING, version=2)
    record = replace(record, tasks=tasks)
    assert chosen(record, m1(*sick)) == (1,)


@pytest.mark.behaviour("BUG-CP17")
def test_all_down_tasks_count_before_broken_ones_are_replaced():
    """Two of four tasks are lost or restarting, so the budget of two is used up."""
    tasks = [
        a_task(0, phase=TaskPhase.LOST, placement=Placement(machine="m9")),
        a_task(1, phase=TaskPhase.STARTING, version=2),
        a_task(2, listed=False),
        a_task(3, listed=False),
    ]
    record = a_record(*tasks, version=2, update=UpdatePolicy(max_unavailable=2))
    sick = [a_status(i, health=Health.UNHEALTHY) for i in (1, 2, 3)]
    view = m1(*sick) | {"m9": ObservedMachine(up=False, answering=False, ready=False)}
    assert chosen(record, view) == ()


@pytest.mark.behaviour("SC6", "BUG-AU1")
@pytest.mark.parametrize("broken", [2, 3])
def test_nothing_that_serves_goes_for_a_release_while_the_budget_is_used_up(broken: int):
    """Of four tasks at least two are broken, and at most two may be unavailable."""
    tasks = [a_task(i, listed=i >= broken) for i in range(4)]
    record = a_record(*tasks, version=2, update=UpdatePolicy(max_unavailable=2))
    health = [Health.UNHEALTHY if i < broken else Health.HEALTHY for i in range(4)]
    view = m1(*(a_status(i, health=h) for i, h in enumerate(health)))
    assert chosen(record, view) == (0, 1)


@pytest.mark.behaviour("SC6")
def test_a_task_that_must_leave_now_uses_up_the_budget():
    """Its deadline has passed and it leaves anyway, so no other task may leave with it."""
    tasks = [a_task(0), a_task(1, placement=Placement(machine="m2")), a_task(2)]
    record = a_record(*tasks, version=2, update=UpdatePolicy(max_unavailable=1))
    event = UnavailabilityEvent(event_id="e", kind=EventKind.MAINTENANCE, reason="fan", start=0.0)
    late = m1(a_status(1), departure=event, overdue=True)["m1"]
    made = decide(record, DecisionInput(m1(a_status(0), a_status(2)) | {"m2": late}, at(1.0)))
    assert (made.overdue, made.chosen) == ((1,), ())


def test_broken_tasks_go_first_and_use_up_the_budget():
    tasks = [a_task(0), a_task(1), a_task(2, listed=False)]
    record = a_record(*tasks, version=2, update=UpdatePolicy(max_unavailable=2))
    view = m1(a_status(0), a_status(1), a_status(2, health=Health.UNHEALTHY))
    assert chosen(record, view) == (2, 0)


def test_an_update_waits_while_machines_do_not_answer():
    record = a_record(a_task(0), a_task(1), version=2)
    assert chosen(record, m1(answering=False)) == ()


def given_up(record: JobRecord, view) -> list[int]:
    """Return the tasks that are removed because the job is smaller."""
    made = decide(record, DecisionInput(view, at(1.0))).record
    return [t.index for t in made.tasks if t.operation and t.operation.cause is Cause.RESIZE]


@pytest.mark.behaviour("BUG-CP24")
def test_a_smaller_job_gives_up_nothing_that_serves_for_what_does_not():
    """Two tasks of a silent machine had ended, and a third, serving task was stopped."""
    tasks = [a_task(i, placement=Placement(machine="m2" if i < 2 else "m1")) for i in range(6)]
    silent = {"m2": ObservedMachine(up=True, answering=False, ready=False)}
    view = m1(*(a_status(i) for i in range(2, 6))) | silent
    assert given_up(a_record(*tasks), view) == []
    assert given_up(a_record(*tasks, tasks=5), view) == [1]
    assert given_up(a_record(*tasks, tasks=3), view) == [0, 1, 5]


@pytest.mark.behaviour("BUG-CP24")
def test_a_smaller_job_stops_tasks_that_do_not_serve_first():
    """A task on a silent machine may still serve; an unhealthy task does not."""
    tasks = [a_task(0), a_task(1, placement=Placement(machine="m2")), a_task(2)]
    sick = a_status(0, health=Health.UNHEALTHY)
    silent = {"m2": ObservedMachine(up=True, answering=False, ready=False)}
    view = m1(sick, a_status(2)) | silent
    assert given_up(a_record(*tasks, tasks=2), view) == [0]
    assert given_up(a_record(*tasks, tasks=1), view) == [0, 1]


@pytest.mark.behaviour("BUG-CP24")
def test_a_plan_that_sees_nothing_keeps_what_clients_use():
    """Without any reports, no listed task is worse than another."""
    tasks = [a_task(0, phase=TaskPhase.STARTING), a_task(1), a_task(2)]
    assert remaining_tasks(a_record(*tasks, tasks=2), DecisionInput({}, at(0.0))) == (1, 2)
    assert remaining_tasks(a_record(*tasks, tasks=1), DecisionInput({}, at(0.0))) == (1,)


@pytest.mark.behaviour("BUG-TC1", "BUG-CP30")
def test_a_lost_task_that_is_back_is_not_taken_for_a_version_that_it_never_ran():
    """A release was applied while the machine was down; the old copy is back.

    The record keeps the version with which the copy was started until the machine has reported.
    """
    lost = a_task(phase=TaskPhase.LOST, reason="machine m1 is not usable")
    away = {"m1": ObservedMachine(up=False, answering=False, ready=False)}
    record = decide(a_record(lost, version=2), DecisionInput(away, Moment(1000.0, 10.0))).record
    back = {"m1": ObservedMachine(up=True, answering=True, ready=True, tasks={"web-0": a_status()})}
    (task,) = decide(record, DecisionInput(back, Moment(1001.0, 11.0))).record.tasks
    assert (task.version, task.phase, task.generation) == (1, TaskPhase.RUNNING, 5)


@pytest.mark.parametrize(
    ("phase", "reason", "is_done"),
    [
        (TaskPhase.DRAINING, "", False),
        (TaskPhase.STOPPING, "", False),
        (TaskPhase.PENDING, "", False),
        (TaskPhase.PENDING, "no machine has room", True),
        (TaskPhase.LOST, "", True),
        (TaskPhase.STARTING, "", False),
        (TaskPhase.RUNNING, "", True),
    ],
)
def test_a_version_runs_everywhere_once_no_task_is_being_updated_to_it(
    phase: TaskPhase, reason: str, *, is_done: bool
):
    """Tasks without room or on a dead machine are not waited for. A task between two versions is.

    The job reported that all tasks run a version while the last of them was stopped for the update.
    """
    update = Operation(
        id="web-1.1",
        task=1,
        kind=OperationKind.UPDATE,
        cause=Cause.ROLLBACK,
        state=OperationState.RUNNING,
    )
    last = a_task(1, phase, version=2, reason=reason, operation=update)
    record = a_record(a_task(version=2), last, version=2)
    record = replace(record, rollout=Rollout(version=2, base=1, passed=True))
    now = Moment(wall=1000.0, steady=1000.0)
    ledger = OperationLedger(record, now)
    advanced = with_rollout_advanced(record, record, ledger, now)
    assert advanced.rollout is not None
    assert advanced.rollout.done is is_done
    assert [e.reason for e in ledger.events] == ["all tasks run version 2"] * is_done


@pytest.mark.behaviour("BUG-CP32")
@pytest.mark.parametrize("phase", [TaskPhase.PENDING, TaskPhase.LOST, TaskPhase.DRAINING])
def test_an_update_is_not_done_before_one_task_of_its_version_served(phase: TaskPhase):
    """All tasks were down. The version failed, and no rollback was made."""
    record = a_record(a_task(phase=phase, version=2, listed=False), version=2)
    record = replace(record, rollout=Rollout(version=2, base=1, passed=True))
    ledger = OperationLedger(record, at(100.0))
    advanced = with_rollout_advanced(record, record, ledger, at(100.0))
    assert advanced.rollout is not None
    assert not advanced.rollout.done
    assert not ledger.events


@pytest.mark.behaviour("BUG-CP32")
@pytest.mark.parametrize(
    ("state", "is_blamed"), [(TaskState.STOPPING, False), (TaskState.STARTING, True)]
)
def test_a_task_that_its_host_ends_in_a_cut_is_no_evidence_about_its_version(state, is_blamed):
    """Such a task may take longer to stop than a task may take to become healthy."""
    update = UpdatePolicy(on_failure=OnFailure.ROLLBACK, healthy_within_s=60.0)
    task = a_task(phase=TaskPhase.STARTING, version=2, state=state)
    record = a_record(task, version=2, update=update)
    record = replace(record, rollout=Rollout(version=2, base=1, passed=True))
    advanced = with_rollout_advanced(record, record, OperationLedger(record, at(90.0)), at(90.0))
    assert advanced.rollout is not None
    assert advanced.rollout.failed == ((0,) if is_blamed else ())


def released_in_a_cut(old: dict[str, object], new: dict[str, object]) -> JobRecord:
    """Return a lost task's job at version 1; its owner applied version 2 during the cut."""
    lost = a_task(phase=TaskPhase.LOST, reason="machine m1 is not usable")
    before, after = a_record(lost, **old).spec, a_record(lost, version=2, **new)
    return replace(after, specs={1: before, 2: after.spec})


def silent(no_report_s: float) -> dict[str, ObservedMachine]:
    return {"m1": ObservedMachine(up=False, answering=False, ready=False, no_report_s=no_report_s)}


STOP = Disconnect(policy=DisconnectPolicy.STOP, after_s=30.0)


@pytest.mark.behaviour("BUG-CP30")
def test_a_shorter_stop_timeout_of_a_release_in_a_cut_does_not_shorten_the_wait():
    """The old copy was started with 120 s to stop, so it may run for 150 s and more."""
    record = released_in_a_cut(
        {"disconnect": STOP, "stop_timeout_s": 120.0}, {"disconnect": STOP, "stop_timeout_s": 1.0}
    )
    for no_report_s in (40.0, 100.0, 149.0):
        seen = DecisionInput(silent(no_report_s), at(no_report_s))
        record = decide(record, seen).record
        assert tasks_to_place(record, seen.view) == ()
        assert record.tasks[0].version == 1
    ended = decide(record, DecisionInput(silent(200.0), at(200.0))).record
    assert [task.index for task in tasks_to_place(ended, silent(200.0))] == [0]


@pytest.mark.behaviour("BUG-CP30")
def test_a_stop_version_waits_for_the_copy_of_a_keep_version():
    """After a change from keep to stop in a cut, no second copy starts before a report."""
    record = released_in_a_cut({}, {"disconnect": STOP, "stop_timeout_s": 1.0})
    for no_report_s in (40.0, 1000.0):
        record = decide(record, DecisionInput(silent(no_report_s), at(no_report_s))).record
        placed = tasks_to_place(record, silent(no_report_s))
        assert all(placement_version(record, task) == 1 for task in placed)


@pytest.mark.behaviour("BUG-CP30")
def test_a_job_made_again_knows_the_copies_that_its_predecessor_left_behind():
    """The job is deleted and created again in a cut, with `stop` instead of `keep`."""
    stored = read_retired(
        encode(retired_of(replace(a_record(version=1), generation=9, lasting={"m1": ["web-0"]})))
    )
    fresh = a_task(phase=TaskPhase.PENDING, placement=None)
    record = replace(
        a_record(fresh, disconnect=STOP), leaving=stored.lasting, lasting=stored.lasting
    )
    assert stored.generation == 9
    waiting = decide(record, DecisionInput(silent(500.0), at(500.0))).record
    assert tasks_to_place(waiting, silent(500.0)) == ()
    back = decide(waiting, DecisionInput(m1(), at(501.0))).record
    assert [task.index for task in tasks_to_place(back, m1())] == [0]
    assert read_retired(b"41").generation == 41


@pytest.mark.behaviour("BUG-CP31")
def test_a_task_starts_only_on_a_machine_of_the_entitlement_of_its_own_version():
    """The job moved to another entitlement; the machine belongs to that of one of its versions."""
    task = a_task(phase=TaskPhase.STARTING)
    made = a_record(task, version=2)
    moved = replace(made.spec, entitlement="f")
    record = replace(made, spec=moved, specs={1: made.spec, 2: moved})
    assert [type(c) for c in commands(record, m1(homes=frozenset({"e"})))] == [Start]
    assert commands(record, m1(homes=frozenset({"f"}))) == []


@pytest.mark.behaviour("BUG-CP31")
def test_a_moved_job_does_not_stop_all_its_tasks_at_once():
    """Tasks of the previous version stay where they run, within the job's budget."""
    tasks = [a_task(i, placement=Placement(machine="m1")) for i in range(3)]
    made = a_record(*tasks, version=2)
    moved = replace(made.spec, entitlement="f")
    record = replace(made, spec=moved, specs={1: made.spec, 2: moved})
    there = m1(*(a_status(i) for i in range(3)), homes=frozenset({"e"}))
    after_it = decide(record, DecisionInput(there, at(100.0))).record
    assert sum(task.phase is TaskPhase.RUNNING for task in after_it.tasks) >= 2


@pytest.mark.parametrize(
    ("state", "result", "when", "failing"),
    [
        (TaskState.BACKOFF, "exit-code", RestartWhen.ALWAYS, True),
        (TaskState.FAILED, "exit-code", RestartWhen.NEVER, True),
        (TaskState.STOPPED, "exit-code", RestartWhen.NEVER, False),
        (TaskState.STOPPED, "exit-code", RestartWhen.ON_FAILURE, True),
        (TaskState.STOPPED, "success", RestartWhen.ON_FAILURE, False),
        (TaskState.STOPPED, "success", RestartWhen.ALWAYS, True),
        (TaskState.STOPPED, "lost", RestartWhen.ALWAYS, False),
    ],
)
def test_a_task_that_ended_is_a_failure_of_its_version_unless_it_may_end(
    state, result, when, failing
):
    task = a_task(state=state, last_exit=Exit(result=result, at=0.0))
    record = a_record(task, restart=RestartPolicy(when=when))
    assert is_failing(task, record, Moment(0.0, 0.0)) is failing
