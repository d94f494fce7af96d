"""Intents composed into one specification: properties at every size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.intents import (
    CanaryIntent,
    Dimension,
    HoldIntent,
    InfrastructureIntent,
    PushIntent,
    SizeIntent,
    part_of,
)
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.job_control.core.compose import (
    NOWHERE,
    SERVES,
    Infrastructure,
    JobWants,
    Pushed,
    TaskSeen,
    UnifiedSpec,
    Why,
    compose,
)
from control_plane.job_control.core.intents import sized, wanted_of, written

pytestmark = pytest.mark.behaviour("JC5", "JC15", "JC17")

STABLE, TARGET, TRIAL = 1, 2, 3
TYPES = ("t1", "t2")
NOW = 1.8e9

shares = st.integers(0, 100).map(lambda n: n / 100)
sizes = st.integers(0, 60)


class Trial(NamedTuple):
    """A canary, and when it ends."""

    intent: CanaryIntent
    ends_at: float | None


canary_intents = st.builds(
    CanaryIntent,
    version=st.just(TRIAL),
    tasks=st.integers(1, 5),
    share=st.none() | st.sampled_from((0.02, 0.1, 0.5)),
    machine_type=st.sampled_from(("", *TYPES)),
)
canaries = st.builds(Trial, canary_intents, st.none() | st.sampled_from((NOW - 1, NOW + 1)))
seen = st.builds(
    TaskSeen,
    index=st.integers(0, 80),
    version=st.sampled_from((STABLE, TARGET, TRIAL, 9)),
    missed=st.integers(0, 3),
    rank=st.integers(0, 3),
)
crowds = st.lists(seen, max_size=60, unique_by=lambda task: task.index)
machines = st.builds(
    Infrastructure,
    st.dictionaries(st.integers(0, 80), st.sampled_from(TYPES)),
    st.frozensets(st.integers(0, 80), max_size=5),
)


def want(
    size: int,
    share: float,
    canary: Trial | None = None,
    held: float | None = None,
    number: int | None = None,
) -> JobWants:
    intent, ends_at = canary or (None, None)
    push = Pushed(TARGET, STABLE, share, tasks=number)
    return JobWants(push, SizeIntent(tasks=size), intent, ends_at, held_until=held)


def counts(spec: UnifiedSpec) -> Counter[int]:
    return Counter(task.version for task in spec.tasks.values())


def settled(spec: UnifiedSpec) -> list[TaskSeen]:
    """Return the tasks once all operations have been carried out."""
    return [TaskSeen(index, task.version) for index, task in spec.tasks.items()]


@pytest.mark.behaviour("JC5")
@given(crowds, machines, sizes, shares, st.none() | canaries)
def test_exactly_the_share_runs_the_target_at_every_size(tasks, where, size, share, canary):
    spec = compose(want(size, share, canary), tasks, where, NOW)
    trial = sum(1 for task in spec.tasks.values() if task.why is Why.CANARY)
    assert len(spec.tasks) == spec.size == size
    assert counts(spec)[TARGET] == min(part_of(share, size), size - trial)
    assert counts(spec)[STABLE] == size - counts(spec)[TARGET] - trial
    assert not spec.removed & spec.tasks.keys()


@pytest.mark.behaviour("JC7", "CV2")
@given(crowds, machines, sizes, st.integers(0, 20), st.none() | canaries)
def test_exactly_the_given_number_runs_the_target_at_every_size(tasks, where, size, number, canary):
    spec = compose(want(size, 1.0, canary, number=number), tasks, where, NOW)
    trial = sum(1 for task in spec.tasks.values() if task.why is Why.CANARY)
    assert counts(spec)[TARGET] == min(number, size - trial)
    assert counts(spec)[STABLE] == size - counts(spec)[TARGET] - trial


@pytest.mark.behaviour("JC5", "JC17")
@given(sizes, sizes, shares, machines)
def test_a_resize_in_a_push_removes_in_proportion_and_changes_no_version(size, later, share, where):
    first = compose(want(size, share), [], where, NOW)
    spec = compose(want(later, share), settled(first), where, NOW)
    after = {index: task.version for index, task in spec.tasks.items()}
    changed = [i for i, task in first.tasks.items() if i in after and after[i] != task.version]
    if later < size:
        assert not changed
        gone = Counter(first.tasks[index].version for index in spec.removed)
        assert gone[TARGET] == part_of(share, size) - part_of(share, later)
        assert abs(gone[TARGET] - share * (size - later)) <= 1
    else:
        assert len(changed) <= abs(min(0, part_of(share, later) - part_of(share, size)))
    assert counts(spec)[TARGET] == part_of(share, later)


@given(crowds, machines, sizes, shares, st.none() | canaries)
def test_as_few_tasks_as_possible_change(tasks, where, size, share, canary):
    spec = compose(want(size, share, canary), tasks, where, NOW)
    stays = [task for task in tasks if task.index in spec.tasks]
    changed = sum(1 for task in stays if spec.tasks[task.index].version != task.version)
    trial = {i for i, task in spec.tasks.items() if task.why is Why.CANARY}
    others = [task for task in stays if task.index not in trial]
    of = Counter(task.version for task in others)
    most = counts(spec)
    fits = min(of[TARGET], most[TARGET]) + min(of[STABLE], most[STABLE])
    to_trial = sum(1 for task in stays if task.index in trial and task.version != TRIAL)
    free = sum(1 for task in others if task.missed == NOWHERE)
    assert changed - to_trial <= len(others) - fits + free


@given(crowds, machines, sizes, shares, st.none() | canaries)
def test_composing_again_after_completion_changes_nothing(tasks, where, size, share, canary):
    if canary is not None:
        canary = Trial(msgspec.structs.replace(canary.intent, machine_type=""), canary.ends_at)
    spec = compose(want(size, share, canary), tasks, where, NOW)
    again = compose(want(size, share, canary), settled(spec), where, NOW)
    assert again.tasks == spec.tasks
    assert not again.removed


@pytest.mark.behaviour("JC6", "JC7", "JC10")
@given(crowds, machines, sizes, shares, canaries)
def test_canaries_are_timed_tied_and_no_part_of_the_push(tasks, where, size, share, canary):
    spec = compose(want(size, share, canary), tasks, where, NOW)
    trial = {i for i, task in spec.tasks.items() if task.why is Why.CANARY}
    assert counts(spec)[TRIAL] == len(trial)
    if canary.ends_at is not None and canary.ends_at <= NOW:
        assert not trial
        return
    canary = canary.intent
    wanted = canary.tasks if canary.share is None else max(1, part_of(canary.share, size))
    assert len(trial) <= min(wanted, size)
    assert len(trial) == min(wanted, size) or canary.machine_type
    known = {task.index: task.version for task in tasks}
    for index in trial:
        if canary.machine_type and known[index] != TRIAL:
            assert where.machine_types[index] == canary.machine_type
        if canary.machine_type:
            assert where.machine_types.get(index, canary.machine_type) == canary.machine_type
    on_stable = {i for i in spec.tasks if known.get(i) == STABLE and i not in trial}
    usable = {
        i
        for i in on_stable - where.leaving
        if not canary.machine_type or where.machine_types.get(i) == canary.machine_type
    }
    if usable:
        assert not any(known.get(index) == TARGET for index in trial)


@pytest.mark.behaviour("JC8")
@given(crowds, machines, sizes, shares, st.none() | canaries)
def test_under_a_hold_nothing_changes(tasks, where, size, share, canary):
    spec = compose(want(size, share, canary, held=NOW + 1), tasks, where, NOW)
    assert {i: t.version for i, t in spec.tasks.items()} == {t.index: t.version for t in tasks}
    assert not spec.removed
    over = compose(want(size, share, canary, held=NOW), tasks, where, NOW)
    assert over == compose(want(size, share, canary), tasks, where, NOW)


@given(crowds, machines, sizes, shares, st.none() | canaries, st.randoms(use_true_random=False))
def test_ties_are_broken_by_the_tasks_alone(tasks, where, size, share, canary, chance):
    shuffled = list(tasks)
    chance.shuffle(shuffled)
    wanted = want(size, share, canary)
    assert compose(wanted, tasks, where, NOW) == compose(wanted, shuffled, where, NOW)


@given(crowds, sizes)
def test_nothing_that_serves_goes_for_what_does_not(tasks, size):
    spec = compose(want(size, 0.5), tasks, Infrastructure(), NOW)
    gone = [task for task in tasks if task.index in spec.removed]
    stays = [task for task in tasks if task.index not in spec.removed]
    if any(task.missed == SERVES for task in gone):
        assert all(task.missed == SERVES for task in stays)


@pytest.mark.behaviour("JC9", "CV6")
@given(crowds, sizes, shares)
def test_a_push_keeps_the_runtime_that_it_started_with(tasks, size, share):
    wanted = replace(
        want(size, share), push=Pushed(TARGET, STABLE, share, runtime="r1"), runtime="r2"
    )
    spec = compose(wanted, tasks, Infrastructure(), NOW)
    assert spec.runtime == "r1"
    assert "infrastructure" in spec.waits


@given(st.integers(0, 15_000), shares)
def test_half_a_task_is_rounded_up_and_a_part_and_its_rest_differ_by_one_at_most(size, share):
    part = part_of(share, size)
    hundredths = round(share * 100) * size
    assert part == hundredths // 100 + (hundredths % 100 >= 50)
    assert 0 <= part <= size


def writes() -> st.SearchStrategy[list[tuple[Dimension, int]]]:
    """Writes of all dimensions, each by its own writer."""
    return st.lists(st.tuples(st.sampled_from(list(Dimension)), st.integers(0, 40)), max_size=12)


def value_of(dimension: Dimension, number: int) -> msgspec.Struct | None:
    match dimension:
        case Dimension.PUSH:
            return PushIntent(version=1, share=number / 40)
        case Dimension.SIZE:
            return SizeIntent(tasks=number)
        case Dimension.CANARY:
            return CanaryIntent(version=2, tasks=number) if number else None
        case Dimension.INFRASTRUCTURE:
            return InfrastructureIntent(runtime=f"r{number}")
        case Dimension.HOLD:
            return HoldIntent() if number % 2 else None


@pytest.mark.behaviour("JC15")
@given(writes(), st.randoms(use_true_random=False))
def test_the_last_write_of_each_dimension_survives_in_any_order(made, chance):
    spec = JobSpec(name="web", entitlement="front", tasks=3, image="sha256:" + "0" * 64)
    record = JobRecord(name="web", spec=spec, version=1, specs={1: spec})

    def stored(order: list[tuple[Dimension, int]]) -> JobRecord:
        after = record
        for dimension, number in order:
            after = written(after, dimension, value_of(dimension, number), str(dimension), NOW)
        return sized(after)

    queues = {d: [w for w in made if w[0] is d] for d in Dimension}
    mixed = []
    while waiting := [d for d in Dimension if queues[d]]:
        mixed.append(queues[chance.choice(waiting)].pop(0))
    one, other = stored(made), stored(mixed)
    assert one.intents == other.intents
    assert wanted_of(one) == wanted_of(other)
    for dimension in Dimension:
        last = [number for its, number in made if its is dimension][-1:]
        for number in last:
            value = value_of(dimension, number)
            there = one.intents[dimension].value
            assert there == (None if value is None else msgspec.to_builtins(value))
