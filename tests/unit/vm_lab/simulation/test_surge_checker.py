"""The rule about extra tasks counts the right tasks, and reports an excess."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from agent import api
from control_plane.api.jobs import JobSpec
from control_plane.api.operations import Cause, Operation, OperationKind, OperationState
from control_plane.api.stored_jobs import StoredTask, TaskChunk
from control_plane.api.updates import UpdatePolicy
from control_plane.store import Put
from vm_lab.region.clients import OwnedJob
from vm_lab.region.machine import Copy
from vm_lab.region.surge_checker import SurgeChecker

IMAGE = "sha256:" + "1" * 64
SPEC = JobSpec(
    name="web",
    entitlement="ent0",
    tasks=3,
    image=IMAGE,
    command=["x"],
    update=UpdatePolicy(max_unavailable=1, surge=1),
)
TASK_SPEC = api.TaskSpec(
    generation=1,
    epoch=1,
    image=IMAGE,
    command=["x"],
    job="web",
    limits=api.Limits(memory_max_bytes=1 << 20),
)


def copies(tasks: int, wanted: bool = True) -> dict[str, dict[str, Copy]]:
    return {f"web-{n}": {"m1": Copy(f"web-{n}", TASK_SPEC, wanted=wanted)} for n in range(tasks)}


def removal(index: int, kind: OperationKind, extra: bool) -> StoredTask:
    state = OperationState.RUNNING
    operation = Operation(id="web:1", task=index, kind=kind, cause=Cause.RELEASE, state=state)
    return StoredTask(index=index, version=1, generation=1, extra=extra, operation=operation)


def stored(*tasks: StoredTask) -> SurgeChecker:
    checker = SurgeChecker()
    value = msgspec.json.encode(TaskChunk(number=0, tasks=list(tasks)))
    checker.stored([Put("tasks/web/000", value)])
    return checker


@pytest.mark.parametrize(
    ("tasks", "most", "wrong"),
    [(4, 3, ""), (5, 3, "web has 5 tasks, at most 4 may be"), (5, 4, "")],
    ids=["one extra", "two extra", "it was larger before"],
)
def test_an_excess_is_reported(tasks: int, most: int, wrong: str) -> None:
    assert SurgeChecker().excess("web", OwnedJob(SPEC, largest_size=most), copies(tasks)) == wrong


def test_a_job_without_extra_tasks_or_with_a_pending_stop_is_not_checked() -> None:
    plain = replace(SPEC, update=UpdatePolicy(max_unavailable=1))
    assert SurgeChecker().excess("web", OwnedJob(plain, largest_size=3), copies(9)) == ""
    assert SurgeChecker().excess("web", OwnedJob(None, largest_size=3), copies(9)) == ""
    assert SurgeChecker().excess("web", None, copies(9)) == ""


def test_a_copy_that_was_requested_to_stop_does_not_count() -> None:
    assert (
        SurgeChecker().excess("web", OwnedJob(SPEC, largest_size=3), copies(9, wanted=False)) == ""
    )


def test_tasks_that_a_smaller_size_removes_do_not_count() -> None:
    """Seed 135 of `roles`: a job was shrunk, and grown again before its tasks stopped."""
    checker = stored(*(removal(n, OperationKind.REMOVE, extra=False) for n in range(2)))
    assert checker.excess("web", OwnedJob(SPEC, largest_size=3), copies(6)) == ""
    assert checker.excess("web", OwnedJob(SPEC, largest_size=3), copies(7)) != ""


@pytest.mark.parametrize(
    ("kind", "extra"),
    [(OperationKind.UPDATE, False), (OperationKind.REMOVE, True)],
    ids=["an update", "an extra task's removal"],
)
def test_other_operations_count(kind: OperationKind, extra: bool) -> None:
    checker = stored(removal(0, kind, extra))
    assert checker.excess("web", OwnedJob(SPEC, largest_size=3), copies(5)) != ""
