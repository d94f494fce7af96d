"""The examples of the article on the job control plane, each compared with the old way."""

from __future__ import annotations

from collections import Counter

import pytest

from control_plane.api.intents import CanaryIntent, SizeIntent
from control_plane.job_control.core.compose import (
    Infrastructure,
    JobWants,
    Pushed,
    TaskSeen,
    UnifiedSpec,
    Why,
    compose,
)

OLD, NEW, TRIAL = 1, 2, 3
NOW = 1.8e9


def want(size: int, share: float = 0.5, canary: CanaryIntent | None = None, **push) -> JobWants:
    return JobWants(Pushed(NEW, OLD, share, **push), SizeIntent(tasks=size), canary)


def composed(wanted: JobWants, tasks: list[TaskSeen], **where) -> UnifiedSpec:
    return compose(wanted, tasks, Infrastructure(**where), NOW)


def counts(spec: UnifiedSpec) -> Counter[int]:
    return Counter(task.version for task in spec.tasks.values())


def carried_out(spec: UnifiedSpec) -> list[TaskSeen]:
    return [TaskSeen(index, task.version) for index, task in spec.tasks.items()]


def the_old_way(tasks: list[TaskSeen], size: int) -> list[TaskSeen]:
    """A push to the first half, task by task, and an autoscaler that keeps the first `size`."""
    half = len(tasks) // 2
    pushed = [TaskSeen(t.index, NEW if t.index < half else OLD) for t in tasks]
    return pushed[:size]


@pytest.mark.behaviour("JC5")
def test_figure_4_and_6_half_of_a_push_stays_half_when_the_job_is_made_smaller() -> None:
    before = [TaskSeen(index, OLD) for index in range(100)]
    left = the_old_way(before, 50)
    assert Counter(task.version for task in left) == {NEW: 50}  # the whole job, not half of it
    spec = composed(want(100), before)
    assert counts(spec) == {NEW: 50, OLD: 50}
    for size in (99, 50, 51, 7, 100):
        tasks = carried_out(spec)
        spec = composed(want(size), tasks)
        assert counts(spec)[NEW] == (size + 1) // 2
        kept = {task.index: task.version for task in tasks}
        if size <= len(tasks):
            assert all(kept[i] == task.version for i, task in spec.tasks.items())


@pytest.mark.behaviour("JC6")
def test_figure_6_a_canary_in_addition_to_a_push_keeps_both_shares() -> None:
    spec = composed(want(100), [TaskSeen(index, OLD) for index in range(100)])
    spec = composed(want(100, canary=CanaryIntent(version=TRIAL, tasks=2)), carried_out(spec))
    assert counts(spec) == {NEW: 50, TRIAL: 2, OLD: 48}
    spec = composed(want(50, canary=CanaryIntent(version=TRIAL, tasks=2)), carried_out(spec))
    assert counts(spec) == {NEW: 25, TRIAL: 2, OLD: 23}


@pytest.mark.behaviour("JC9")
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_figure_7_a_runtime_does_not_enter_in_a_later_stage(share: float) -> None:
    wanted = JobWants(Pushed(NEW, OLD, share, runtime="r1"), SizeIntent(tasks=10), runtime="r2")
    spec = composed(wanted, [TaskSeen(index, OLD) for index in range(10)])
    assert spec.runtime == "r1"
    assert spec.waits == {"infrastructure": "it enters with the next push"}


@pytest.mark.behaviour("JC7")
def test_table_1_a_canary_on_a_type_of_machine_is_tied_to_it() -> None:
    types = {0: "gpu", 1: "cpu", 2: "gpu", 3: "cpu"}
    tasks = [TaskSeen(index, OLD) for index in range(4)]
    canary = CanaryIntent(version=TRIAL, tasks=2, machine_type="gpu")
    spec = composed(want(4, 0.0, canary), tasks, machine_types=types)
    assert {i for i, t in spec.tasks.items() if t.why is Why.CANARY} == {0, 2}
    moved = types | {0: "cpu"}  # its machine failed, and the task was placed elsewhere
    spec = composed(want(4, 0.0, canary), carried_out(spec), machine_types=moved)
    assert {i for i, t in spec.tasks.items() if t.why is Why.CANARY} == {2}
    assert spec.waits == {"canary": "1 more task on machines of type gpu"}


@pytest.mark.behaviour("JC10")
def test_canaries_of_any_type_are_alike_for_a_fair_comparison() -> None:
    types = {0: "old", 1: "new", 2: "new", 3: "old", 4: "new"}
    tasks = [TaskSeen(index, OLD) for index in range(5)]
    spec = composed(want(5, 0.0, CanaryIntent(version=TRIAL, tasks=2)), tasks, machine_types=types)
    assert {i for i, t in spec.tasks.items() if t.why is Why.CANARY} == {1, 2}


def test_a_smaller_size_takes_a_push_under_way_no_further() -> None:
    """10 of 100 tasks have the push, of 50 in the end. After the resize 5 of 50 have it, not 10 of
    50."""
    tasks = [TaskSeen(index, NEW if index < 10 else OLD) for index in range(100)]
    spec = composed(want(50), tasks)
    gone = Counter(task.version for task in tasks if task.index in spec.removed)
    assert gone == {NEW: 5, OLD: 45}
