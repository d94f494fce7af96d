"""Extra tasks in the core: their last known state decides whether they may be removed."""

import pytest
from msgspec.structs import replace

from agent.api import Health, TaskState, TaskStatus
from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import (
    ControllerRef,
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
)
from control_plane.api.machines import EventKind, UnavailabilityEvent
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from control_plane.api.updates import UpdatePolicy
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decide import decide
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.task_control.core.conversation import ControllerAnswer

DRAINED = UnavailabilityEvent(event_id="e", kind=EventKind.MAINTENANCE, reason="fan", start=0.0)


def serving(index: int, *, extra: bool = False) -> TaskRecord:
    return TaskRecord(
        index=index,
        version=1,
        generation=1,
        phase=TaskPhase.RUNNING,
        placement=Placement(machine=f"m{index}"),
        since=0.0,
        begun=0.0,
        listed=True,
        extra=extra,
    )


def machine(*, answering: bool) -> ObservedMachine:
    return ObservedMachine(up=True, answering=answering, ready=True)


@pytest.mark.behaviour("SC21")
@pytest.mark.parametrize("stale", [True, False])
def test_an_extra_task_on_a_silent_machine_stays_until_the_machine_answers(stale: bool):
    """After a start of the control plane, tasks serve although no machine has answered yet."""
    spec = JobSpec(
        name="web",
        entitlement="web",
        tasks=2,
        image="sha256:" + "a" * 64,
        command=["/bin/web"],
        update=UpdatePolicy(max_unavailable=1, surge=1),
    )
    version = 2 if stale else 1
    record = JobRecord(
        name="web",
        spec=spec,
        version=version,
        generation=1,
        specs=dict.fromkeys(range(1, version + 1), spec),
        tasks=[serving(0), serving(1), serving(2, extra=True)],
    )
    view = {f"m{n}": machine(answering=False) for n in range(3)}
    made = decide(record, DecisionInput(view, Moment(100.0, 100.0)))
    assert [task.phase for task in made.record.tasks] == [TaskPhase.RUNNING] * 3
    assert all(task.operation is None for task in made.record.tasks)


def region(*down: int, **last) -> dict[str, ObservedMachine]:
    """Return seven machines with a task on each; `last` changes the extra task's machine."""
    seen = {"up": True, "answering": True, "ready": True}
    view = {}
    for n in range(7):
        status = TaskStatus(
            task_id=f"web-{n}",
            generation=1,
            epoch=1,
            state=TaskState.RUNNING,
            health=Health.UNHEALTHY if n in down else Health.HEALTHY,
            image="sha256:" + "a" * 64,
            job="web",
        )
        values = seen | (last if n == 6 else {})
        view[f"m{n}"] = ObservedMachine(**values, tasks={status.task_id: status})
    return view


def removal(state: OperationState) -> Operation:
    values = {"kind": OperationKind.REMOVE, "cause": Cause.SURGE, "began": 0.0, "since": 0.0}
    return Operation(id="web-6.1", task=6, state=state, approved="db", **values)


def controlled(*down: int, controller: bool = True) -> JobRecord:
    """Return a job of six tasks, and an extra one whose removal the controller acknowledged."""
    spec = JobSpec(
        name="web",
        entitlement="web",
        tasks=6,
        image="sha256:" + "a" * 64,
        command=["/bin/web"],
        update=UpdatePolicy(max_unavailable=1, surge=1),
        controller=ControllerRef(url="https://10.0.0.9:7450", name="db") if controller else None,
    )
    extra = replace(serving(6, extra=True), operation=removal(OperationState.ACKNOWLEDGED))
    tasks = [replace(serving(n), listed=n not in down) for n in range(6)]
    specs, tasks = {1: spec}, [*tasks, extra]
    values = {"version": 1, "generation": 1, "specs": specs, "asked": True, "tasks": tasks}
    return JobRecord(name="web", spec=spec, **values)


@pytest.mark.behaviour("BUG-CP33")
@pytest.mark.parametrize("controller", [True, False])
@pytest.mark.parametrize(("down", "expected"), [((), True), ((0,), True), ((0, 1), False)])
def test_an_acknowledged_removal_of_an_extra_task_waits_for_the_budget(
    down: tuple[int, ...], expected: bool, controller: bool
):
    """Two of six tasks are down and at most one may be. The extra task serves instead of one."""
    view, answer = region(*down), ControllerAnswer(down=frozenset({*down}))
    record = controlled(*down, controller=controller)
    made = decide(record, DecisionInput(view, Moment(100.0, 100.0), answer=answer))
    extra = made.record.tasks[-1]
    assert extra.phase is (TaskPhase.DRAINING if expected else TaskPhase.RUNNING)


@pytest.mark.behaviour("BUG-CP33")
def test_an_extra_task_on_a_machine_that_must_be_empty_now_is_removed_at_any_budget():
    """A deadline overrides the budget, and no second extra task is started."""
    view = region(0, 1, departure=DRAINED, overdue=True)
    made = decide(controlled(0, 1), DecisionInput(view, Moment(100.0, 100.0)))
    assert made.record.tasks[-1].phase is TaskPhase.DRAINING


@pytest.mark.behaviour("BUG-CP32")
@pytest.mark.parametrize("overdue", [(), (0, 1)])
def test_an_extra_task_is_not_removed_in_the_round_that_stops_overdue_tasks(overdue):
    """Their machine was cut off past its deadline, and reports again."""
    view = region()
    for n in overdue:
        view[f"m{n}"] = replace(view[f"m{n}"], departure=DRAINED, overdue=True)
    record = controlled(controller=False)
    made = decide(record, DecisionInput(view, Moment(100.0, 100.0)))
    phases = {task.index: task.phase for task in made.record.tasks}
    assert phases[6] is (TaskPhase.RUNNING if overdue else TaskPhase.DRAINING)
    assert set(made.overdue) == set(overdue)
