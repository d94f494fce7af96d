"""What a restored store recognizes as newer than itself, and leaves unchanged."""

from __future__ import annotations

import pytest

from agent.api import Health, TaskState, TaskStatus
from control_plane.agents.core.commands import unknown_tasks
from control_plane.agents.core.observed import ObservedMachine
from control_plane.agents.core.restored import differences, predates_restore
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord
from control_plane.api.restored import Difference
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.reconcile import observe
from control_plane.scheduler.core.task_commands import commands

pytestmark = pytest.mark.behaviour("F-88")

IMAGE = "sha256:" + "1" * 64
RESTORED = 50_000
NOW = Moment(wall=1e9, steady=100.0)


def a_job(name: str, *tasks: TaskRecord) -> JobRecord:
    spec = JobSpec(name=name, entitlement="e", tasks=len(tasks), image=IMAGE, command=["/x"])
    return JobRecord(name=name, spec=spec, version=1, specs={1: spec}, tasks=[*tasks], generation=5)


def a_task(index: int = 0, phase: TaskPhase = TaskPhase.RUNNING, machine: str = "m1") -> TaskRecord:
    return TaskRecord(
        index=index,
        version=1,
        generation=5,
        phase=phase,
        placement=Placement(machine=machine),
        listed=phase is TaskPhase.RUNNING,
        begun=0.0,
    )


def a_status(task: str, generation: int = 5, epoch: int = 7) -> TaskStatus:
    return TaskStatus(
        task_id=task,
        generation=generation,
        epoch=epoch,
        state=TaskState.RUNNING,
        health=Health.HEALTHY,
        image=IMAGE,
        job=task.rpartition("-")[0],
        entitlement="e",
    )


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize(
    ("epoch", "restored", "expected"),
    [(7, 0, False), (7, 7, True), (7, 6, False), (0, 7, False), (8, 7, False)],
)
def test_commands_of_an_earlier_term_are_old(epoch: int, restored: int, expected: bool) -> None:
    """A task that a user started on the host itself has no term and no owner."""
    assert predates_restore(a_status("c-0", epoch=epoch), restored) is expected


@pytest.mark.behaviour("F-88")
def test_a_task_unknown_to_a_restored_copy_is_not_unexpected_until_released() -> None:
    """A task that was started after the store was restored is unknown as usual, and stopped."""
    tasks = {s.task_id: s for s in (a_status("c-0"), a_status("d-0", epoch=RESTORED + 1))}
    assert unknown_tasks(tasks, set()) == ["c-0", "d-0"]
    assert unknown_tasks(tasks, set(), RESTORED) == ["d-0"]
    assert unknown_tasks(tasks, set(), RESTORED, {"c-0"}) == ["c-0", "d-0"]


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize("phase", [TaskPhase.STARTING, TaskPhase.RUNNING])
def test_changes_since_the_copy_stay(phase: TaskPhase) -> None:
    """Without this rule all tasks of the job would have restarted at once, at the old version."""
    record, status = a_job("b", a_task(phase=phase)), a_status("b-0", generation=9)
    for restored, expected in ((0, TaskPhase.STARTING), (RESTORED, TaskPhase.RUNNING)):
        machine = ObservedMachine(
            up=True, answering=True, ready=True, tasks={"b-0": status}, restored=restored
        )
        after = observe(record, {"m1": machine}, NOW)
        assert after.tasks[0].phase is expected
        assert after.generation >= 9, "what comes next is above all that was sent"
        assert bool(commands(after, {"m1": machine})) is (not restored)


@pytest.mark.behaviour("F-88")
def test_operators_are_shown_each_way_in_which_a_machine_differs() -> None:
    """Covers deployed, moved, added, changed and removed since the copy, and unchanged."""
    same, changed, gone = a_job("s", a_task()), a_job("b", a_task()), a_job("a", a_task())
    moved = a_job("m", a_task(machine="m2"))
    left = a_job("l", a_task(phase=TaskPhase.STOPPING))
    seen = [
        a_status("s-0"),
        a_status("b-0", generation=6),
        a_status("c-0"),
        a_status("m-0", generation=8),
        a_status("n-0", epoch=RESTORED + 2),
        a_status("local", epoch=0),
    ]
    found = differences(
        "m1",
        {status.task_id: status for status in seen},
        {"s-0": same, "b-0": changed, "a-0": gone, "l-0": left},
        {"s": same, "b": changed, "m": moved},
        RESTORED,
    )
    assert [(one.task, one.difference) for one in found] == [
        ("a-0", Difference.MISSING),
        ("b-0", Difference.CHANGED),
        ("c-0", Difference.UNKNOWN_JOB),
        ("m-0", Difference.NOT_PLACED),
    ]
