"""The directory of tasks applies only the differences between job records."""

from __future__ import annotations

import random

from msgspec.structs import replace

from control_plane.allocator.task_directory import PlacedTask, TaskDirectory
from control_plane.api.job_changes import task_changes
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord, task_id

PHASES = (TaskPhase.RUNNING, TaskPhase.LOST, TaskPhase.STOPPING)
MACHINES = ("m0", "m1", "m2", "")


def a_job(tasks: list[TaskRecord], leaving: dict[str, list[str]]) -> JobRecord:
    spec = JobSpec(name="w", entitlement="e", tasks=1, image="sha256:" + "0" * 64, command=["a"])
    return JobRecord(name="w", spec=spec, version=1, tasks=tasks, leaving=leaving)


def drawn_task(rng: random.Random, index: int) -> TaskRecord:
    machine = rng.choice(MACHINES)
    placement = Placement(machine=machine) if machine else None
    return TaskRecord(
        index=index, version=1, generation=1, phase=rng.choice(PHASES), placement=placement
    )


def drawn(rng: random.Random, before: JobRecord | None) -> JobRecord | None:
    """Return a record that shares some task objects with the one before. Rarely return none."""
    if rng.random() < 0.1:
        return None
    known = {} if before is None else {task.index: task for task in before.tasks}
    tasks = [
        known[index] if index in known and rng.random() < 0.6 else drawn_task(rng, index)
        for index in range(6)
        if rng.random() < 0.8
    ]
    leaving = {
        machine: sorted(task_id("w", i) for i in rng.sample(range(6), rng.randrange(3)))
        for machine in MACHINES[:3]
        if rng.random() < 0.3
    }
    return a_job(tasks, leaving)


def expected(record: JobRecord | None) -> dict[str, dict[str, PlacedTask]]:
    found: dict[str, dict[str, PlacedTask]] = {name: {} for name in MACHINES[:3]}
    for task in record.tasks if record is not None else ():
        if task.placement is not None:
            lost = task.phase is TaskPhase.LOST
            found[task.placement.machine][task_id("w", task.index)] = PlacedTask("w", lost=lost)
    for machine, ids in record.leaving.items() if record is not None else ():
        found[machine] |= {name: PlacedTask("w", leaving=True) for name in ids}
    return found


def there(directory: TaskDirectory) -> dict[str, dict[str, PlacedTask]]:
    return {name: dict(directory.tasks(name)) for name in MACHINES[:3]}


def test_after_each_change_it_equals_the_record_and_names_the_machines() -> None:
    for seed in range(200):
        rng, directory, record = random.Random(seed), TaskDirectory(), None
        for _ in range(12):
            before, record = record, drawn(rng, record)
            was = there(directory)
            changed = directory.settle("w", before, record)
            assert there(directory) == expected(record), seed
            assert changed == [name for name in was if was[name] != there(directory)[name]]


def test_tasks_that_are_the_same_objects_are_no_changes() -> None:
    rng = random.Random(1)
    tasks = [drawn_task(rng, index) for index in range(4)]
    before = a_job(tasks, {})
    assert task_changes(before, replace(before, generation=9)) == []
    other = replace(tasks[2], generation=2)
    assert task_changes(before, a_job([*tasks[:2], other, tasks[3]], {})) == [(tasks[2], other)]
    fewer = a_job([*tasks[:1], *tasks[2:]], {})
    assert task_changes(before, fewer) == [(tasks[1], None)]
    assert task_changes(fewer, before) == [(None, tasks[1])]
    moved = replace(tasks[1], index=7)
    shifted = a_job([tasks[0], *tasks[2:], moved], {})
    assert task_changes(before, shifted) == [(None, moved), (tasks[1], None)]
    assert task_changes(None, fewer) == [(None, task) for task in fewer.tasks]
    assert task_changes(fewer, None) == [(task, None) for task in fewer.tasks]
