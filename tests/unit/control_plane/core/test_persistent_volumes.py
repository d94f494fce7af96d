"""`job explain` reports where kept volumes are and what happens to them (docs/volumes.md)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.api import Volume, VolumeKind
from control_plane.api.jobs import (
    ControllerRef,
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
)
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from control_plane.scheduler.core.volume_pinning import volume_notes

pytestmark = pytest.mark.behaviour("AG9")

DATA = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=1 << 20)


def a_job(name: str = "db", machine: str = "m1", **volumes: Volume) -> JobRecord:
    spec = JobSpec(
        name=name,
        entitlement="e",
        tasks=1,
        image="sha256:" + "1" * 64,
        command=["x"],
        volumes=volumes,
    )
    task = TaskRecord(
        index=0,
        version=1,
        generation=1,
        phase=TaskPhase.RUNNING,
        placement=Placement(machine=machine) if machine else None,
    )
    return JobRecord(name=name, spec=spec, version=1, specs={1: spec}, tasks=[task])


def notes(record: JobRecord, *others: JobRecord) -> list[str]:
    return volume_notes(record, {o.name: o for o in others}.get)


def with_task(record: JobRecord, **changes: object) -> JobRecord:
    return replace(record, tasks=[replace(record.tasks[0], **changes)])


def test_where_a_volume_is_and_what_leaves_it_there() -> None:
    general, mine = notes(a_job(data=DATA, log=DATA))
    assert general.startswith("volumes data, log stay on the machine of their task")
    assert "starts elsewhere with empty volumes" in general
    assert mine == "task 0: data, log on m1"


@pytest.mark.parametrize("kind", [VolumeKind.SCRATCH, VolumeKind.TMPFS])
def test_a_job_without_volumes_gets_no_warning(kind: VolumeKind) -> None:
    assert notes(a_job(work=Volume(kind=kind, path="/w", max_bytes=1 << 20))) == []


def test_a_task_whose_machine_is_gone_may_have_it_back() -> None:
    mine = notes(with_task(a_job(data=DATA), phase=TaskPhase.LOST))[1]
    assert "data on m1, which is gone: the task continues with it if m1 is back" in mine
    assert "start empty" in mine


def test_a_task_that_is_to_leave_is_named_with_the_reason() -> None:
    move = Operation(
        id="db-0.1",
        task=0,
        kind=OperationKind.MOVE,
        cause=Cause.MAINTENANCE,
        state=OperationState.OFFERED,
    )
    mine = notes(with_task(a_job(data=DATA), operation=move))[1]
    assert "which it has to leave because of maintenance: it will start empty elsewhere" in mine
    assert "controller" not in mine
    job = a_job(data=DATA)
    asks = replace(
        job, spec=replace(job.spec, controller=ControllerRef(url="https://c:1", name="zk"))
    )
    assert notes(with_task(asks, operation=move))[1].endswith(
        "it stays until its controller acknowledges the move"
    )
    stays = replace(move, instead="stop")
    assert notes(with_task(a_job(data=DATA), operation=stays))[1] == "task 0: data on m1"


@pytest.mark.behaviour("BUG-UX7")
def test_a_task_that_just_moved_is_not_announced_to_leave() -> None:
    moved = Operation(
        id="db-0.1",
        task=0,
        kind=OperationKind.MOVE,
        cause=Cause.MAINTENANCE,
        state=OperationState.RUNNING,
        from_machine="m1",
        to_machine="m2",
    )
    arrived = with_task(a_job(machine="m2", data=DATA), operation=moved)
    assert notes(arrived)[1] == "task 0: data on m2"


def test_leftover_objects_are_named() -> None:
    left = replace(a_job(machine="m2", data=DATA), leaving={"m1": ["db-0"]})
    assert notes(left)[1:] == ["task 0: data on m2", "m1 has volumes of db-0 from before the move"]


@pytest.mark.parametrize(
    ("owner", "shown"),
    [
        ("m1", "data of db-0, on m1, too"),
        ("m2", "which is on m2: on m1 the task waits"),
        ("", "which is on no machine"),
    ],
)
def test_a_volume_is_shown_with_its_owner_and_place(owner: str, shown: str) -> None:
    shared = Volume(kind=VolumeKind.SHARED, path="/r", source="db-0.data")
    reader = a_job("reader", ref=shared)
    [mine] = notes(reader, a_job("db", owner, data=DATA))
    assert shown in mine
    assert "on no machine" in notes(reader)[0], "its job is not there at all"


def test_each_task_goes_by_the_version_that_it_runs() -> None:
    record = a_job(data=DATA)
    newer = replace(record.spec, volumes={})
    mixed = replace(record, spec=newer, version=2, specs={1: record.spec, 2: newer})
    assert notes(mixed)[1] == "task 0: data on m1"
