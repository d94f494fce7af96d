"""What a job's record requests from the allocator in each phase of the job."""

import pytest
from msgspec.structs import replace
from regions import a_region, a_request, allocate

from agent.api import Limits
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Request
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord
from control_plane.scheduler.core.job_request import request_of

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
LIMITS = Limits(memory_max_bytes=1 << 30, cpu_max_cores=1.0)


def a_spec(image: str, limits: Limits = LIMITS) -> JobSpec:
    return JobSpec(
        name="web", entitlement="e1", tasks=3, image=image, command=["/x"], limits=limits
    )


def running(index: RegionIndex, limits: Limits = LIMITS) -> JobRecord:
    """Return a job whose three tasks run on their claimed machines, at the first of 2 versions."""
    allocate(index, a_request(3))
    tasks = [
        TaskRecord(
            index=claim.task,
            version=1,
            generation=1,
            phase=TaskPhase.RUNNING,
            placement=Placement(machine=claim.machine.name),
        )
        for claim in index.claims["web"]
    ]
    new = a_spec(NEW, limits)
    return JobRecord(name="web", spec=new, version=2, specs={1: a_spec(OLD), 2: new}, tasks=tasks)


def request_for(record: JobRecord, index: RegionIndex) -> Request:
    return request_of(record, {}, "e1", None, index.claims.get("web"))


def with_task(record: JobRecord, phase: TaskPhase, version: int = 2, **fields) -> JobRecord:
    """Return the record with task 1 in another phase; a pending task has no machine."""
    first, task, last = record.tasks
    if phase is TaskPhase.PENDING:
        fields["placement"] = None
    changed = replace(task, phase=phase, version=version, **fields)
    return replace(record, tasks=[first, changed, last])


@pytest.mark.behaviour("AL13")
@pytest.mark.parametrize(
    ("phase", "version"),
    [
        (TaskPhase.DRAINING, 1),
        (TaskPhase.STOPPING, 1),
        (TaskPhase.PENDING, 2),
        (TaskPhase.STARTING, 2),
        (TaskPhase.RUNNING, 2),
    ],
)
def test_an_update_in_place_asks_for_the_same_at_each_of_its_steps(phase, version):
    index = a_region()
    record = running(index)
    before = request_for(record, index)
    (group,) = before.groups
    assert (group.tasks, group.running) == ((0, 1, 2), True)
    assert request_for(with_task(record, phase, version), index) == before


def waits(record: JobRecord, index: RegionIndex, **fields) -> bool:
    """Return whether the request asks for a machine for task 1, which does not run."""
    groups = request_for(with_task(record, TaskPhase.PENDING, **fields), index).groups
    return [group.tasks for group in groups if not group.running] == [(1,)]


def test_a_task_that_cannot_restart_on_its_machine_is_requested_again():
    index = a_region()
    record = running(index)
    there = record.tasks[1].placement
    assert there is not None
    assert not waits(record, index)
    assert waits(record, index, avoid=there.machine)
    index.block(there.machine, "is down")
    assert waits(record, index)
    index.block(there.machine, "")
    assert not waits(record, index)
    index.put(
        there.machine,
        index.machines[there.machine].capacity,
        index.machines[there.machine].place,
        "other",
        "",
    )
    assert waits(record, index)


def test_a_version_that_needs_more_is_requested_separately():
    index = a_region()
    record = running(index, Limits(memory_max_bytes=2 << 30, cpu_max_cores=1.0))
    assert waits(record, index)
    started = request_for(with_task(record, TaskPhase.STARTING), index)
    assert [(group.tasks, group.running) for group in started.groups] == [
        ((0, 2), True),
        ((1,), True),
    ]


def test_a_task_without_a_claim_waits_for_a_machine():
    index = a_region()
    record = running(index)
    request = request_of(with_task(record, TaskPhase.PENDING), {}, "e1", None, None)
    assert [group.tasks for group in request.groups if not group.running] == [(1,)]
