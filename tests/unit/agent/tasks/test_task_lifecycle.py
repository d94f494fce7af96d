"""The table of the task's life: every state with every possible observation."""

from __future__ import annotations

import pytest
from builders import BOOT, a_record, a_spec, a_unit, an_ended_unit, seen
from msgspec.structs import replace

from agent.api import Exit, Health, Limits, Probe, RestartPolicy, RestartWhen, TaskState
from agent.api.life import Life
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord, Wanted
from agent.tasks.core.lifecycle import Action, Decision, ObservedUnit, decide
from agent.tasks.core.restarts import after_failure, backoff_s

NOW, UP = 100.0, 7000.0
AT = LeaseMoment(wall=NOW, boot_s=UP)
S, A = TaskState, Action
TABLE: list[tuple[str, str, S, A]] = [
    # state          observed          new state      action
    ("accepted", "nothing", S.PREPARING, A.PREPARE),
    ("accepted", "root", S.STARTING, A.START),
    ("accepted", "running", S.RUNNING, A.LIMIT),  # its limits are unknown
    ("accepted", "activating", S.STARTING, A.WAIT),
    ("accepted", "ended", S.BACKOFF, A.STOP),
    ("accepted", "another", S.STOPPING, A.STOP),
    ("preparing", "nothing", S.PREPARING, A.PREPARE),
    ("preparing", "root", S.STARTING, A.START),
    ("preparing", "running", S.RUNNING, A.LIMIT),  # its limits are unknown
    ("starting", "nothing", S.PREPARING, A.PREPARE),
    ("starting", "root", S.STARTING, A.START),
    ("starting", "activating", S.STARTING, A.WAIT),
    ("starting", "running", S.RUNNING, A.LIMIT),  # its limits are unknown
    ("starting", "ended", S.BACKOFF, A.STOP),
    ("running", "running", S.RUNNING, A.WAIT),
    ("running", "reloading", S.RUNNING, A.WAIT),
    ("running", "deactivating", S.STOPPING, A.WAIT),
    ("running", "ended", S.BACKOFF, A.STOP),
    ("running", "another", S.STOPPING, A.STOP),
    ("running", "another leaving", S.STOPPING, A.WAIT),
    ("running", "root", S.BACKOFF, A.WAIT),
    ("running", "nothing", S.BACKOFF, A.WAIT),
    ("backoff", "root", S.BACKOFF, A.WAIT),
    ("backoff", "running", S.RUNNING, A.WAIT),
    ("backoff due", "root", S.STARTING, A.START),
    ("backoff due", "nothing", S.PREPARING, A.PREPARE),
    ("stopping", "root", S.STARTING, A.START),
    ("stopping", "nothing", S.PREPARING, A.PREPARE),
    ("stopped", "root", S.STOPPED, A.WAIT),
    ("stopped", "nothing", S.STOPPED, A.WAIT),
    ("failed", "root", S.FAILED, A.WAIT),
    ("failed", "nothing", S.FAILED, A.WAIT),
    ("running", "lingering", S.STOPPING, A.WAIT),
    ("stopping", "lingering", S.STOPPING, A.WAIT),
    ("backoff due", "lingering", S.BACKOFF, A.WAIT),
    ("failed", "lingering", S.FAILED, A.WAIT),
    ("restart", "lingering", S.STOPPING, A.WAIT),
    ("gone", "lingering", S.STOPPING, A.WAIT),
    ("gone", "running", S.STOPPING, A.STOP),
    ("gone", "deactivating", S.STOPPING, A.WAIT),
    ("gone", "ended", S.STOPPING, A.STOP),
    ("gone", "another", S.STOPPING, A.STOP),
    ("gone", "root", S.STOPPED, A.REMOVE_ROOT),
    ("gone", "nothing", S.STOPPED, A.FORGET),
    ("restart", "running", S.STOPPING, A.STOP),
    ("restart", "root", S.STARTING, A.START),
    ("restart", "nothing", S.PREPARING, A.PREPARE),
]


def _task(name: str) -> TaskRecord:
    if name == "gone":
        return a_record(wanted=Wanted.GONE, state=S.RUNNING, invocation_id="i1")
    if name == "restart":
        return a_record(restart_asked=True, state=S.RUNNING, invocation_id="i1", boot_id=BOOT)
    state = S(name.partition(" ")[0])
    due = {"backoff": UP + 1, "backoff due": UP}.get(name)
    before = state in (S.BACKOFF, S.STOPPED, S.FAILED, S.STOPPING)
    ran = state is S.RUNNING or before
    return a_record(
        state=state,
        next_start_at=due and due - UP + NOW,
        next_start_boot_s=due,
        invocation_id="i1" if ran else "",
        ended_invocation="i1" if before else "",
        limits=Limits() if ran else None,
        boot_id=BOOT,
    )


def _seen_unit(name: str) -> ObservedUnit | None:
    return {
        "running": a_unit(),
        "reloading": a_unit(active="reloading"),
        "activating": a_unit(active="activating", sub="start"),
        "deactivating": a_unit(active="deactivating", sub="stop-sigterm"),
        "ended": an_ended_unit(),
        "lingering": a_unit(active="inactive", sub="dead"),
        "another": a_unit(key="other"),
        "another leaving": a_unit(key="other", active="deactivating"),
    }.get(name)


@pytest.mark.parametrize(("task", "host", "state", "action"), TABLE)
def test_the_next_step_of_a_task_follows_from_its_state(
    task: str, host: str, state: S, action: A
) -> None:
    there = host != "nothing"
    decision = decide(_task(task), seen(_seen_unit(host), root=there, leftover=there), AT)

    assert (decision.task.state, decision.action) == (state, action)
    assert decision.task.health is Health.UNKNOWN or state is S.RUNNING


@pytest.mark.parametrize(("task", "host", "state", "action"), TABLE)
def test_a_decision_made_again_is_the_same_or_to_wait(
    task: str, host: str, state: S, action: A
) -> None:
    there = host != "nothing"
    observed = seen(_seen_unit(host), root=there, leftover=there)
    first = decide(_task(task), observed, AT)
    second = decide(first.task, observed, AT)

    assert second.action in (first.action, A.WAIT)
    assert decide(second.task, observed, AT).task == second.task


def _after_end(when: RestartWhen, code: int) -> Decision:
    policy = RestartPolicy(when=when, backoff_s=2.0)
    task = a_record(spec=a_spec(restart=policy), state=S.RUNNING, invocation_id="i1")
    return decide(task, seen(an_ended_unit(task, code)), AT)


@pytest.mark.parametrize(
    ("when", "code", "state"),
    [
        (RestartWhen.ALWAYS, 0, S.BACKOFF),
        (RestartWhen.ALWAYS, 1, S.BACKOFF),
        (RestartWhen.ON_FAILURE, 0, S.STOPPED),
        (RestartWhen.ON_FAILURE, 1, S.BACKOFF),
        (RestartWhen.NEVER, 0, S.STOPPED),
        (RestartWhen.NEVER, 1, S.STOPPED),
    ],
)
def test_the_restart_policy_decides_what_follows_an_end(
    when: RestartWhen, code: int, state: S
) -> None:
    task = _after_end(when, code).task

    assert task.state is state
    assert task.last_exit == Exit(result="exit-code" if code else "success", code=code, at=100.0)
    assert task.restarts == (state is S.BACKOFF)


def test_an_end_is_counted_once() -> None:
    first = _after_end(RestartWhen.ALWAYS, 1)
    again = decide(first.task, seen(an_ended_unit(first.task)), AT)

    assert again.task == first.task
    assert again.action is A.STOP


@pytest.mark.behaviour("F-16")
def test_pauses_double_up_to_the_maximum_and_start_over_after_a_long_run() -> None:
    policy = RestartPolicy(backoff_s=1.0, backoff_max_s=5.0)
    task, pauses = a_record(spec=a_spec(restart=policy)), []
    for number in range(5):
        unit = an_ended_unit(task, invocation_id=f"i{number}", started_at=99.0)
        task = decide(replace(task, state=S.RUNNING), seen(unit), AT).task
        assert task.next_start_at is not None
        pauses.append(task.next_start_at - NOW)
    unit = an_ended_unit(task, invocation_id="long", started_at=100.0 - 600.0)
    task = decide(replace(task, state=S.RUNNING), seen(unit), AT).task

    expected = [1.0, 2.0, 4.0, 5.0, 5.0]
    assert all(0.75 * most <= pause <= most for pause, most in zip(pauses, expected, strict=True))
    assert 0.75 <= task.next_start_at - NOW <= 1.0
    assert 0.75 * 5.0 <= backoff_s(task, 10_000) <= 5.0


@pytest.mark.behaviour("BUG-AG91")
def test_a_task_that_keeps_ending_does_not_occupy_its_host() -> None:
    """Its owner can ask for a quick first restart, but not for endless quick ones."""
    policy = RestartPolicy(backoff_s=0.001, backoff_max_s=0.001)
    task = a_record(spec=a_spec(restart=policy))
    assert backoff_s(task, 0) <= 0.001
    assert 0.75 <= backoff_s(task, 20) <= 1.0


@pytest.mark.behaviour("BUG-AG14")
def test_tasks_that_ended_together_start_at_different_times() -> None:
    names = [f"web-{number}" for number in range(50)]
    pauses = {backoff_s(a_record(task_id=name), 0) for name in names}

    assert len(pauses) == len(names)
    assert min(pauses) < 0.8 * max(pauses)
    assert backoff_s(a_record(), 0) == backoff_s(a_record(), 0)


@pytest.mark.behaviour("BUG-AG14")
@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
def test_a_stepped_clock_makes_no_pause_longer_or_shorter(step_s: float) -> None:
    """After a step of one hour back the pause was 3,600 s."""
    policy = RestartPolicy(backoff_s=4.0)
    task = a_record(spec=a_spec(restart=policy), state=S.RUNNING, boot_id=BOOT)
    pausing = decide(task, seen(an_ended_unit(task)), AT).task
    pause_s = backoff_s(task, 0)
    early = decide(pausing, seen(), LeaseMoment(NOW + step_s, UP + pause_s - 0.1))
    due = decide(pausing, seen(), LeaseMoment(NOW + step_s, UP + pause_s))

    assert (early.action, early.until) == (A.WAIT, UP + pause_s)
    assert due.action is A.START


def test_a_task_in_back_off_reports_its_next_check() -> None:
    decision = decide(_task("backoff"), seen(), AT)

    assert decision.until == UP + 1


@pytest.mark.behaviour("F-21")
def test_a_unit_stopped_by_another_program_is_started_again_with_the_reason() -> None:
    task = decide(_task("running"), seen(), AT).task

    assert task.last_exit == Exit(result="external-stop", at=NOW)
    assert "another program" in task.reason


@pytest.mark.parametrize(
    "state", [S.ACCEPTED, S.PREPARING, S.STARTING, S.RUNNING, S.BACKOFF, S.STOPPING]
)
def test_after_a_reboot_a_task_waits_for_its_owner_whatever_it_was_doing(state: S) -> None:  # P8
    task = a_record(
        state=state, boot_id=BOOT, invocation_id="i1", next_start_at=0.0, restart_asked=True
    )
    decision = decide(task, seen(boot_id="boot-2"), AT)
    again = decide(decision.task, seen(boot_id="boot-2"), AT)

    assert (decision.task.state, decision.action) == (S.STOPPED, A.WAIT)
    assert decision.task.last_exit == Exit(result="lost", at=NOW)
    assert again == decision


@pytest.mark.parametrize(
    ("task", "host", "state", "action"),
    [
        ("accepted", "root", S.ACCEPTED, A.WAIT),
        ("starting", "activating", S.STOPPING, A.STOP),
        ("running", "running", S.STOPPING, A.STOP),
        ("running", "ended", S.BACKOFF, A.STOP),
        ("stopping", "deactivating", S.STOPPING, A.WAIT),
        ("stopping", "nothing", S.STOPPING, A.WAIT),
        ("backoff due", "root", S.BACKOFF, A.WAIT),
        ("stopped", "root", S.STOPPED, A.WAIT),
        ("gone", "root", S.STOPPED, A.REMOVE_ROOT),
    ],
)
def test_on_a_host_that_goes_down_all_ends_and_nothing_starts(
    task: str, host: str, state: S, action: A
) -> None:
    there = host != "nothing"
    what = seen(_seen_unit(host), root=there, leftover=there)
    decision = decide(_task(task), what, AT, leaving=True)

    assert (decision.task.state, decision.action) == (state, action)


@pytest.mark.behaviour("AG4")
def test_a_task_that_ended_with_its_host_is_not_lost_and_starts_again() -> None:
    """It starts again after the boot, or on the running host if the shutdown was cancelled."""
    for alone, boot, action in ((True, "boot-2", A.START), (False, BOOT, A.START)):
        task = replace(_task("running"), spec=a_spec(offline_restart=alone))
        ending = decide(task, seen(_seen_unit("running")), AT, leaving=True).task
        waiting = decide(ending, seen(root=True), AT, leaving=True).task
        back = decide(waiting, seen(root=True, boot_id=boot), AT)

        assert (back.action, back.task.restarts, back.task.last_exit) == (action, 0, None)


def test_after_a_reboot_a_task_that_may_starts_again_and_its_loss_is_counted() -> None:
    task = a_record(
        spec=a_spec(offline_restart=True),
        state=S.RUNNING,
        health=Health.HEALTHY,
        boot_id=BOOT,
        invocation_id="i1",
    )
    decision = decide(task, seen(boot_id="boot-2"), AT)

    assert (decision.action, decision.task.restarts) == (A.START, 1)
    assert decision.task.health is Health.UNKNOWN


def test_a_finished_task_stays_finished_over_a_reboot() -> None:
    task = a_record(spec=a_spec(offline_restart=True), state=S.STOPPED, reason="done", boot_id=BOOT)
    decision = decide(task, seen(boot_id="boot-2"), AT)

    assert (decision.task.state, decision.task.reason) == (S.STOPPED, "done")


def test_a_request_of_the_owner_after_a_reboot_starts_the_task() -> None:
    task = a_record(state=S.STOPPED, boot_id="boot-2", restart_asked=True)

    assert decide(task, seen(boot_id="boot-2"), AT).action is A.START


def test_a_unit_replaced_before_it_ran_is_no_external_stop() -> None:
    task = a_record(state=S.STARTING, invocation_id="i0", ended_invocation="i0", boot_id=BOOT)
    replaced = decide(task, seen(a_unit(key="old", invocation_id="i1")), AT).task
    after = decide(replaced, seen(), AT)

    assert after.action is A.START
    assert (after.task.restarts, after.task.last_exit) == (0, None)


def test_a_task_wanted_back_while_it_stops_starts_at_once() -> None:
    leaving = decide(_task("gone"), seen(a_unit()), AT).task
    back = replace(leaving, wanted=Wanted.RUN, restart_asked=True, boot_id=BOOT)
    waits = decide(back, seen(a_unit(active="deactivating")), AT)
    starts = decide(waits.task, seen(), AT)

    assert (waits.action, starts.action) == (A.WAIT, A.START)
    assert (starts.task.restarts, starts.task.last_exit) == (0, None)


def test_a_requested_restart_overrides_policy_never() -> None:
    spec = a_spec(restart=RestartPolicy(when=RestartWhen.NEVER))
    task = a_record(
        spec=spec, state=S.RUNNING, invocation_id="i1", restart_asked=True, boot_id=BOOT
    )
    decision = decide(task, seen(), AT)

    assert decision.action is A.START
    assert not decision.task.restart_asked


def test_how_a_task_ended_is_kept_although_its_owner_changed_it_meanwhile() -> None:
    task = a_record(state=S.RUNNING, invocation_id="i1", boot_id=BOOT)
    decision = decide(task, seen(an_ended_unit(key="old", code=3)), AT)

    assert decision.action is A.STOP
    assert decision.task.last_exit == Exit(result="exit-code", code=3, at=100.0)


def test_a_unit_whose_stop_was_begun_is_not_taken_back_and_its_end_is_not_counted() -> None:
    """Its hook had run.

    The agent reported the unit as running, then as stopped by another program.
    """
    task = a_record(state=S.STOPPING, invocation_id="i1", ended_invocation="i1", boot_id=BOOT)
    wanted_again = decide(task, seen(a_unit()), AT)
    going = decide(wanted_again.task, seen(a_unit(active="deactivating")), AT)
    gone = decide(going.task, seen(), AT)

    assert (wanted_again.task.state, wanted_again.action) == (S.STOPPING, A.STOP)
    assert "requested it again" in wanted_again.task.reason
    assert (going.task.state, going.action) == (S.STOPPING, A.WAIT)
    assert (gone.action, gone.task.restarts, gone.task.last_exit) == (A.START, 0, None)


def test_new_limits_are_applied_to_the_running_unit() -> None:
    task = a_record(state=S.RUNNING, invocation_id="i1", limits=Limits(tasks_max=7), boot_id=BOOT)
    decision = decide(task, seen(a_unit()), AT)
    settled = replace(decision.task, limits=task.spec.limits)

    assert decision.action is A.LIMIT
    assert decide(settled, seen(a_unit()), AT).action is A.WAIT


def test_a_task_without_a_probe_is_healthy_while_it_runs_and_one_with_waits_for_it() -> None:
    plain = a_record()
    probed = a_record(spec=a_spec(probe=Probe(port=80)))

    assert decide(plain, seen(a_unit()), AT).task.health is Health.HEALTHY
    assert decide(probed, seen(a_unit(probed)), AT).task.health is Health.UNKNOWN


@pytest.mark.behaviour("AG5")
def test_known_health_survives_a_restart_of_the_agent() -> None:
    task = a_record(
        spec=a_spec(probe=Probe(port=80)),
        state=S.RUNNING,
        invocation_id="i1",
        health=Health.HEALTHY,
        boot_id=BOOT,
        limits=Limits(),
    )

    assert decide(task, seen(a_unit(task)), AT) == Decision(task, A.WAIT)


def test_a_start_that_failed_is_tried_again_only_where_it_may_succeed() -> None:
    again = after_failure(a_record(), "no space", AT, retry=True)
    never = after_failure(a_record(), "no image", AT, retry=False)

    assert (again.state, again.streak, again.restarts) == (S.BACKOFF, 1, 0)
    assert (never.state, never.next_start_at) == (S.FAILED, None)


@pytest.mark.behaviour("F-89")
def test_a_barred_host_starts_and_ends_no_task() -> None:
    """The host has a clone; its running tasks keep running."""
    task = a_record(state=TaskState.ACCEPTED)
    for there in (seen(), seen(root=True)):
        decision = decide(task, there, AT, start_refusal="it is the second one")
        assert decision.action is Action.WAIT
        assert (decision.task.state, decision.task.reason) == (
            TaskState.ACCEPTED,
            "it is the second one",
        )
    up = a_record(state=TaskState.RUNNING)
    assert decide(up, seen(a_unit(up)), AT, start_refusal="x") == decide(up, seen(a_unit(up)), AT)


def test_the_time_of_a_gate_begins_once_the_old_version_is_gone() -> None:
    """A long hook of the old version used up the whole time, and the new version never started."""
    old = a_spec(generation=4, command=["/bin/old"])
    new = a_spec(generation=5, life=Life(health_gate_s=15))
    gated = a_record(spec=new, previous=old, state=S.STOPPING, boot_id=BOOT)
    going = decide(gated, seen(a_unit(a_record(spec=old), active="deactivating")), AT)
    gone = decide(going.task, seen(), AT)
    rebooted = decide(replace(gated, boot_id="another"), seen(), AT)

    assert (going.task.gate_boot_s, going.task.previous) == (None, old)
    assert (gone.task.gate_boot_s, gone.action) == (AT.boot_s + 15, A.START)
    assert rebooted.task.previous is None


def test_a_gate_is_judged_by_observed_state() -> None:
    """An agent ended before it recorded that the new version runs; the next one rolled back."""
    old = a_spec(generation=4, command=["/bin/old"])
    gated = a_record(previous=old, gate_boot_s=UP - 1, state=S.STARTING, boot_id=BOOT)
    runs = decide(gated, seen(a_unit(gated)), AT)
    never = decide(gated, seen(a_unit(gated, active="activating")), AT)
    waits = decide(replace(gated, gate_boot_s=UP + 1), seen(a_unit(gated)), AT)

    assert (runs.task.state, runs.task.previous, runs.task.gone_back) == (S.RUNNING, None, "")
    assert never.task.spec == old
    assert "did not become healthy in time" in never.task.gone_back
    assert (never.task.state, never.action) == (S.STOPPING, A.STOP)
    assert waits.task.previous == old
