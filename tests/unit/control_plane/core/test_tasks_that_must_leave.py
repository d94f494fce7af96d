"""Tasks that must leave their machines: in which order, why, and how."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.api import Health, Location, TaskState, TaskStatus
from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import (
    ControllerRef,
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
    UpdatePolicy,
)
from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from control_plane.broker.core.unavailability import returning
from control_plane.scheduler.core.approval import question
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decide import decide
from control_plane.scheduler.core.decision import Decision, DecisionInput
from control_plane.task_control.core.conversation import ControllerAnswer

pytestmark = pytest.mark.behaviour("BUG-AU4")

IMAGE = "sha256:" + "1" * 64
NOW = 1e9
TASKS = 4


def machine(index: int, **fields) -> ObservedMachine:
    """Return a machine with one healthy task on it."""
    status = TaskStatus(
        task_id=f"web-{index}",
        generation=1,
        epoch=1,
        state=TaskState.RUNNING,
        health=Health.HEALTHY,
        image=IMAGE,
        job="web",
    )
    values = {"up": True, "answering": True, "ready": True, "tasks": {status.task_id: status}}
    return ObservedMachine(**(values | fields))


def leaving(
    index: int,
    deadline_s: float | None = None,
    kind: EventKind = EventKind.MAINTENANCE,
    **fields,
) -> ObservedMachine:
    deadline = None if deadline_s is None else NOW + deadline_s
    return machine(index, departure=replace(an_event(kind), deadline=deadline), **fields)


def a_view(**others: ObservedMachine) -> dict[str, ObservedMachine]:
    return {f"m{n}": machine(n) for n in range(TASKS)} | others


def a_record(*operations: Operation, controlled: bool = False, version: int = 1) -> JobRecord:
    """Return a job with a task on each machine; at most one task may be unavailable."""
    spec = JobSpec(
        name="web",
        entitlement="e",
        tasks=TASKS,
        image=IMAGE,
        command=["/x"],
        update=UpdatePolicy(max_unavailable=1),
        controller=ControllerRef(url="https://10.0.0.9:7450", name="db") if controlled else None,
    )
    known = {operation.task: operation for operation in operations}
    tasks = [
        TaskRecord(
            index=n,
            version=1,
            generation=1,
            phase=TaskPhase.RUNNING,
            placement=Placement(machine=f"m{n}"),
            listed=True,
            operation=known.get(n),
        )
        for n in range(TASKS)
    ]
    values = {"version": version, "generation": 1, "asked": 1000, "tasks": tasks}
    return JobRecord(name="web", spec=spec, specs=dict.fromkeys((1, version), spec), **values)


def an_operation(task: int, state: OperationState, cause: Cause, **changes) -> Operation:
    values = {"kind": OperationKind.MOVE, "began": NOW, "since": NOW} | changes
    return Operation(id=f"web-{task}.1", task=task, cause=cause, state=state, **values)


def decided(view: dict[str, ObservedMachine], record: JobRecord | None = None, **seen) -> Decision:
    return decide(record or a_record(), DecisionInput(view, Moment(wall=NOW, steady=0.0), **seen))


@pytest.mark.behaviour("BUG-AU4", "SC6")
@pytest.mark.parametrize("first", range(TASKS))
def test_the_nearest_deadline_has_the_budget(first: int):
    """Indexes do not matter. Releases and tasks without a deadline come later."""
    later = {f"m{n}": leaving(n, 600 + n) for n in range(TASKS)}
    assert decided(later | {f"m{first}": leaving(first, 60)}).chosen == (first,)
    none = {f"m{n}": leaving(n) for n in range(TASKS)}
    assert decided(none | {f"m{first}": leaving(first, 900)}).chosen == (first,)
    released = a_record(version=2)
    assert decided(a_view(**{f"m{first}": leaving(first, 900)}), released).chosen == (first,)


@pytest.mark.behaviour("BUG-AU4")
def test_without_deadlines_the_longest_wait_goes_first():
    """A task that was chosen stays chosen."""
    waits = a_record(an_operation(2, OperationState.PROPOSED, Cause.MAINTENANCE))
    assert decided({f"m{n}": leaving(n) for n in range(TASKS)}, waits).chosen == (2,)


PASSING = {EventKind.MAINTENANCE, EventKind.POWER_CAP, EventKind.PROFILE}
TAKEN = [*PASSING, EventKind.DECOMMISSION, EventKind.REFRESH, EventKind.REVOKED]


def an_event(kind: EventKind) -> UnavailabilityEvent:
    return UnavailabilityEvent(event_id=f"m0-{kind}", kind=kind, reason="work", start=NOW - 1)


def a_machine(*events: UnavailabilityEvent) -> MachineRecord:
    where = Location(region="r", datacenter="dc1", msb="msb1", row="row1", rack="rack1")
    values = {"address": "m0", "location": where, "machine_type": "lab", "unavailability": events}
    return MachineRecord(machine="m0", **values)


@pytest.mark.behaviour("BUG-AU4", "TC8")
@pytest.mark.parametrize("kind", TAKEN)
def test_stop_is_offered_only_where_the_machine_will_be_there_again(kind: EventKind):
    """Stop is not offered for a decommission, a replacement, or a revoked loan."""
    event = an_event(kind)
    comes_back = returning(a_machine(event), NOW)
    assert comes_back == (kind in PASSING)
    view = a_view(m0=leaving(0, plans=(event,), returning=comes_back))
    offered = an_operation(0, OperationState.OFFERED, Cause.MAINTENANCE)
    (operation_offered,) = question(a_record(offered, controlled=True), view).request
    assert operation_offered.instead == (["stop"] if kind in PASSING else [])
    final = an_event(EventKind.DECOMMISSION)
    assert not returning(a_machine(event, final), NOW)


@pytest.mark.behaviour("BUG-AU4")
@pytest.mark.parametrize("reported_down", [False, True])
def test_an_acknowledgement_lapses_when_a_deadline_forces_another_task(reported_down: bool):
    """The acknowledgement stays valid if the controller knew that the other task leaves."""
    acknowledged = an_operation(
        0, OperationState.ACKNOWLEDGED, Cause.MAINTENANCE, approved="db 1", deadline=NOW + 900
    )
    view = a_view(m0=leaving(0, 900), m1=leaving(1, -1, overdue=True))
    answer = ControllerAnswer(
        acks={"web-0.1": ""}, down=frozenset({1}) if reported_down else frozenset()
    )
    made = decided(view, a_record(acknowledged, controlled=True), answer=answer)
    operation = made.record.tasks[0].operation
    assert operation is not None
    assert operation.state is (
        OperationState.ACKNOWLEDGED if reported_down else OperationState.OFFERED
    )
    assert (operation.approved == "db 1") is reported_down
    assert made.overdue == (1,)


@pytest.mark.behaviour("BUG-AU4")
@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({}, True),
        ({"kind": EventKind.PROFILE}, True),
        ({"kind": EventKind.REVOKED}, False),
        ({"kind": EventKind.POWER_CAP}, False),
        ({"overdue": True}, False),
    ],
)
def test_urgent_work_continues_while_many_machines_are_lost(fields: dict[str, Any], waits: bool):
    """A revoked loan, a power cap and a deadline continue; a maintenance waits."""
    made = decided(a_view(m0=leaving(0, 60, **fields)), held_back={"m0": "much is lost in dc1"})
    assert (made.held == [0]) is waits
    assert (0 in (*made.chosen, *made.overdue)) is not waits


@pytest.mark.behaviour("BUG-AU4")
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (EventKind.MAINTENANCE, Cause.MAINTENANCE),
        (EventKind.REVOKED, Cause.LOAN),
        (EventKind.PROFILE, Cause.PROFILE),
        (EventKind.POWER_CAP, Cause.POWER),
    ],
)
def test_an_operation_names_what_the_machine_is_wanted_for(kind: EventKind, cause: Cause):
    made = decided(a_view(m0=leaving(0, 60, kind)))
    operation = made.record.tasks[0].operation
    assert operation is not None
    assert (operation.cause, operation.kind) == (cause, OperationKind.MOVE)
    assert (operation.reason, operation.deadline) == ("work", NOW + 60)
