"""The lab's tests detect from the printed output that no more changes are to come."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.api import Location, ProfileState
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, Placement, TaskRecord
from control_plane.api.machines import (
    EventKind,
    MachineRecord,
    MachineState,
    MachineView,
    UnavailabilityEvent,
)
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from tests.lab.quiescence import unsettled

WHERE = ("m1", "m2", "m3", "m1", "m2", "m3")


def a_machine(name: str, **changes: Any) -> MachineView:
    record = MachineRecord(
        machine=name,
        location=Location(datacenter="dc1", msb="msb1", row="row1", rack="rack1"),
        machine_type="small",
        entitlement="demo",
        profile_wanted="web",
        profile="web",
        profile_state=ProfileState.VERIFIED,
    )
    return MachineView(record=replace(record, **changes), tasks=["web-0"], ready=True)


def a_job(where: tuple[str, ...] = WHERE, **changes: Any) -> JobStatus:
    image = "sha256:" + "0" * 64
    spec = JobSpec(name="web", entitlement="demo", tasks=len(where), image=image, command=["x"])
    tasks = [
        TaskRecord(index=i, version=1, generation=1, placement=Placement(machine=name))
        for i, name in enumerate(where)
    ]
    record = JobRecord(name="web", spec=spec, version=1, tasks=tasks)
    count = len(where)
    status = JobStatus(
        record=record,
        phase=JobPhase.STABLE,
        wanted=count,
        running=count,
        healthy=count,
        updated=count,
    )
    return replace(status, **changes)


def as_printed(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def unsettled_text(*machines: MachineView, job: JobStatus | None = None) -> str:
    known = {view.record.machine: view for view in machines}
    views = [known.get(name, a_machine(name)) for name in ("m1", "m2", "m3")]
    return "; ".join(unsettled(as_printed(views), as_printed([job or a_job()])))


def test_a_lab_at_rest_has_no_pending_work():
    assert unsettled_text() == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": MachineState.DOWN}, "m2: down"),
        ({"state": MachineState.DOWN, "entitlement": ""}, "m2: down"),
        ({"profile_state": ProfileState.APPLYING}, "m2: profile web: applying"),
        (
            {
                "unavailability": (
                    UnavailabilityEvent(
                        event_id="1", kind=EventKind.MAINTENANCE, reason="new memory", start=0.0
                    ),
                )
            },
            "m2: maintenance: new memory",
        ),
    ],
)
def test_a_machine_without_capacity_for_tasks_is_unsettled_for_every_holder(changes, why):
    assert why in unsettled_text(a_machine("m2", **changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ready": False}, "m2: up, its agent does not answer"),
        ({"health": "it was down 2 times recently"}, "m2: it was down 2 times recently"),
        ({"tasks": []}, "m2: held without a task"),
    ],
)
def test_a_machine_that_is_about_to_change_is_unsettled(changes, why):
    assert why in unsettled_text(replace(a_machine("m2"), **changes))


def test_a_stable_job_with_something_under_way_is_unsettled():
    stable = a_job()
    moving = Operation(
        id="web-0.1",
        task=0,
        kind=OperationKind.MOVE,
        cause=Cause.REBALANCE,
        state=OperationState.PROPOSED,
    )
    first, *rest = stable.record.tasks
    record = replace(stable.record, tasks=[replace(first, operation=moving), *rest])
    assert "task 0: move is proposed" in unsettled_text(job=replace(stable, record=record))
    record = replace(stable.record, leaving={"m3": ["web-0"]})
    assert "web-0 must still go from m3" in unsettled_text(job=replace(stable, record=record))
    assert "progressing" in unsettled_text(job=replace(stable, phase=JobPhase.PROGRESSING))
    assert "cut off" in unsettled_text(
        job=replace(stable, detail="web-0 may still run on m3, cut off")
    )


def test_tasks_that_will_move_for_an_even_spread_are_unsettled():
    uneven = a_job(("m1", "m3") * 3)
    assert "unevenly spread: 3 on m1, 0 on m2, 3 on m3" in unsettled_text(job=uneven)
    assert unsettled_text(job=a_job(("m1", "m2", "m3", "m1"))) == ""
