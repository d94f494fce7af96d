"""How long a task may run without contact: numbers, files and decisions."""

from __future__ import annotations

import pytest
from builders import BOOT, a_record, a_spec, a_unit, an_ended_unit, seen
from msgspec.structs import replace

from agent.api import (
    Disconnect,
    DisconnectPolicy,
    Exit,
    Health,
    TaskState,
    certainly_ended_s,
)
from agent.lease.core.lease import (
    EXPIRED_LEASE,
    FENCE_GRACE_S,
    LeaseMoment,
    TaskLease,
    answered_at,
    ends_at,
    name_answer,
    read_lease,
)
from agent.runtime.core.records import TaskRecord
from agent.tasks.core.admission import accept
from agent.tasks.core.lifecycle import Action, Decision, decide

S, A = TaskState, Action
STOP = Disconnect(policy=DisconnectPolicy.STOP, after_s=30.0)
CONTACT_AT = 1000.0
REASON = "its host had no contact with the control plane for 30 s, the limit of its job"


def _task(state: S = S.RUNNING, **fields: object) -> TaskRecord:
    ran = state is S.RUNNING
    return a_record(
        spec=a_spec(disconnect=STOP),
        state=state,
        boot_id=BOOT,
        invocation_id="i1" if ran else "",
        **fields,
    )


def _at(silent_s: float, **fields: object) -> LeaseMoment:
    return LeaseMoment(wall=50.0, boot_s=CONTACT_AT + silent_s, contact_s=CONTACT_AT, **fields)  # type: ignore[arg-type]


def _gone(task: TaskRecord, now: LeaseMoment) -> Decision:
    return decide(task, seen(), now)


def test_a_bound_task_is_stopped_once_its_time_without_contact_is_over() -> None:
    task = _task()
    before = decide(task, seen(a_unit(task)), _at(29.9))
    after = decide(before.task, seen(a_unit(task)), _at(30.0))
    ended = _gone(after.task, _at(35.0))

    assert before.task.state is S.RUNNING
    assert (after.action, after.task.state) == (A.STOP, S.STOPPING)
    assert (ended.action, ended.task.state, ended.task.reason) == (A.WAIT, S.STOPPED, REASON)
    assert ended.task.last_exit == Exit(result="cut-off", at=50.0)
    assert ended.task.health is Health.UNKNOWN


def test_a_bound_task_does_not_run_before_the_first_contact_in_a_boot() -> None:
    spec = _task().spec
    assert ends_at(spec, None) == 0.0
    assert ends_at(spec, 5.0) == 5.0 + spec.disconnect.after_s


def test_a_running_task_is_checked_again_at_its_time_limit() -> None:
    limited = _task(limits=a_spec().limits)
    assert decide(limited, seen(a_unit(limited)), _at(7.0)).until == CONTACT_AT + 30.0


def test_a_task_without_a_time_limit_keeps_running() -> None:
    task = a_record(state=S.RUNNING, invocation_id="i1", boot_id=BOOT)
    for now in (_at(1e6), LeaseMoment(wall=0.0, boot_s=1e6, contact_s=None)):
        assert decide(task, seen(a_unit(task)), now).task.state is S.RUNNING


@pytest.mark.parametrize("state", [S.ACCEPTED, S.PREPARING, S.STARTING, S.BACKOFF, S.STOPPING])
def test_nothing_is_started_once_the_time_ran_out(state: S) -> None:
    now = _at(30.0)
    cut = _gone(_task(state, next_start_at=0.0, next_start_boot_s=0.0), now)

    assert (cut.action, cut.task.state, cut.task.cut_off) == (A.WAIT, S.STOPPED, True)


def test_new_contact_starts_nothing_until_a_command_arrives() -> None:
    cut = _gone(_task(), _at(30.0)).task
    after_contact = _gone(cut, LeaseMoment(wall=60.0, boot_s=2000.0, contact_s=1999.0))
    same = accept("web", cut.spec, after_contact.task)
    later_term = accept("web", replace(cut.spec, epoch=5), after_contact.task)
    newer = accept("web", replace(cut.spec, generation=2), after_contact.task)
    assert later_term
    assert newer

    assert (after_contact.action, after_contact.task.state) == (A.WAIT, S.STOPPED)
    assert same is None
    assert later_term.cut_off
    assert not newer.cut_off
    assert _gone(newer, LeaseMoment(wall=60.0, boot_s=2000.0, contact_s=1999.0)).action is A.START


def test_a_begun_stop_is_finished_even_after_new_contact() -> None:
    task = _task()
    stopping = decide(task, seen(a_unit(task)), _at(30.0)).task
    after_contact = LeaseMoment(wall=60.0, boot_s=CONTACT_AT + 31, contact_s=CONTACT_AT + 30.5)
    leaving = decide(stopping, seen(a_unit(task, active="deactivating")), after_contact)
    unheeded = decide(stopping, seen(a_unit(task)), after_contact)

    assert (leaving.action, unheeded.action) == (A.WAIT, A.STOP)
    assert _gone(leaving.task, after_contact).task.state is S.STOPPED


def test_a_lease_that_ran_out_unseen_stays_lapsed_after_new_contact() -> None:
    """An agent that was suspended finds the unit killed and a new contact at the same moment."""
    task = _task()
    now = LeaseMoment(wall=60.0, boot_s=2000.0, contact_s=1999.9, lapsed=True)
    found = decide(task, seen(an_ended_unit(task, exit_signal="SIGKILL", exit_code=None)), now)

    assert (found.action, found.task.cut_off) == (A.STOP, True)
    assert found.task.last_exit == Exit(result="cut-off", signal="SIGKILL", at=60.0)
    assert found.task.restarts == 0
    assert _gone(found.task, now).task.state is S.STOPPED


def test_a_finished_task_keeps_its_end() -> None:
    end = Exit(result="exit-code", code=3, at=10.0)
    over = _task(S.STOPPED, last_exit=end)
    assert _gone(over, _at(100.0)).task == over


def test_after_a_reboot_such_a_task_waits_even_if_it_may_start_offline() -> None:
    task = _task()
    task = replace(task, spec=replace(task.spec, offline_restart=True))
    for after_contact in (None, 4.0):
        now = LeaseMoment(wall=60.0, boot_s=5.0, contact_s=after_contact)
        decision = decide(task, seen(boot_id="boot-2"), now)
        assert (decision.action, decision.task.state) == (A.WAIT, S.STOPPED)
        assert decision.task.last_exit == Exit(result="lost", at=60.0)


@pytest.mark.parametrize("wall", [-7200.0, 0.0, 7200.0])
def test_no_clock_step_ends_a_task_or_prolongs_it(wall: float) -> None:
    task = _task()
    early = replace_wall(_at(29.0), wall)
    late = replace_wall(_at(31.0), wall)

    assert decide(task, seen(a_unit(task)), early).task.state is S.RUNNING
    assert decide(task, seen(a_unit(task)), late).action is A.STOP


def replace_wall(now: LeaseMoment, wall: float) -> LeaseMoment:
    return LeaseMoment(wall, now.boot_s, now.contact_s)


def test_the_bound_is_above_what_host_and_fence_may_take() -> None:
    bound = certainly_ended_s(STOP, 10.0)
    assert bound is not None
    assert bound > 30 + 10 + FENCE_GRACE_S + 5
    assert certainly_ended_s(Disconnect(), 10.0) is None


def test_an_answer_is_dated_by_its_name_and_never_later_than_it_was_given() -> None:
    for boot_s in (0.0, 12.3456, 1e7 + 0.9999):
        at = answered_at(name_answer("b", boot_s), "b", boot_s)
        assert at is not None
        assert boot_s - 0.001 <= at <= boot_s


@pytest.mark.parametrize(
    "name", ["", "b", "b:", "b:x", "b:-1", "b:1e3", "b:٣", "other:1000", ":1000", "b:" + "9" * 30]
)
def test_a_name_that_is_not_ours_proves_nothing(name: str) -> None:
    assert answered_at(name, "b", 100.0) is None


def test_a_missing_answer_proves_nothing() -> None:
    assert answered_at("b:100001", "b", 100.0) is None


def test_a_bond_is_read_back_as_it_was_written() -> None:
    for bond in (TaskLease(30.0, 10.0), TaskLease(5.5, 0.25).lapsed(7.0), EXPIRED_LEASE):
        assert read_lease(bond.line()) == bond


@pytest.mark.parametrize("text", ["", "x", "30", "30 nan", "30 inf", "30 -1", "1 2 3 4", "\0"])
def test_a_bond_that_makes_no_sense_is_the_strictest(text: str) -> None:
    assert read_lease(text) == EXPIRED_LEASE
    assert read_lease(text).is_overdue(1e9, 0.0)


def test_a_lapsed_bond_is_not_prolonged() -> None:
    lapsed = TaskLease(30.0, 10.0).lapsed(100.0)
    assert not lapsed.is_overdue(500.0, 141.9)
    assert lapsed.is_overdue(500.0, 142.0)
