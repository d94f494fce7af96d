"""Which CPUs become exclusive to a task, and why some are unavailable (docs/resources.md)."""

from __future__ import annotations

import pytest
from builders import a_record, a_spec, a_unit, seen
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Resources, TaskState
from agent.api.resources import contradiction
from agent.lease.core.lease import LeaseMoment
from agent.resources.core.exclusive_cpus import (
    CpusInUse,
    allowed_cpus,
    choose_cpus,
    exclusive_cpu_values,
    is_still_valid,
    refusal,
    shared_cpus,
    sharing_refusal,
    usable_cpus,
)
from agent.runtime.core.records import describe_change, key_of, status_of
from agent.runtime.core.slices import cgroup_of, is_shared_slice, slice_for
from agent.tasks.core.lifecycle import Action, decide
from agent.tasks.core.unit_properties import unit_properties
from wire.cpus import Core

NOW = LeaseMoment(wall=100.0, boot_s=100.0)
TWO_NODES = tuple(Core((n, n + 8), node=n // 4) for n in range(8))
"""Eight cores of two CPUs each, four in each of two nodes: CPUs 0 to 15."""


def own(count: int) -> Resources:
    return Resources(exclusive_cpus=count)


def test_whole_cores_of_one_node_are_chosen_and_cpu_0_goes_last() -> None:
    assert choose_cpus(TWO_NODES, (), 4) == (2, 3, 10, 11)
    # not the remaining CPUs of node 0
    assert choose_cpus(TWO_NODES, (1, 2, 3), 6) == (5, 6, 7, 13, 14, 15)
    assert choose_cpus(TWO_NODES, range(1, 8), 2) == (0, 8)


def test_the_tightest_numa_node_is_taken_and_several_only_if_none_fits() -> None:
    assert choose_cpus(TWO_NODES, (7,), 2) == (6, 14)  # node 1 has fewer free CPUs, and enough
    across = choose_cpus(TWO_NODES, (), 10)
    assert len(across) == 10
    assert {4, 5, 6, 7} <= set(across)


def test_a_core_is_never_cut_in_two_and_one_with_other_work_is_none() -> None:
    assert choose_cpus(TWO_NODES, (), 3) == ()
    served = (Core((0,), others=(8,)), Core((1, 9)))
    assert choose_cpus(served, (), 2) == (1, 9)
    assert choose_cpus(served, (1,), 1) == ()


def test_a_resized_task_keeps_its_cores() -> None:
    assert choose_cpus(TWO_NODES, (), 6, had=(1, 9, 2, 10)) == (1, 2, 3, 9, 10, 11)
    assert set(choose_cpus(TWO_NODES, (), 2, had=(1, 9, 2, 10))) < {1, 9, 2, 10}
    assert choose_cpus(TWO_NODES, (), 4, had=(1, 9, 2, 10)) == (1, 2, 9, 10)


@given(
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    threads=st.integers(1, 4),
    wanted=st.integers(1, 20),
    data=st.data(),
)
def test_a_choice_is_exact_free_whole_and_found_whenever_there_is_one(
    nodes: list[int], threads: int, wanted: int, data: st.DataObject
) -> None:
    cores, first = [], 0
    for node, many in enumerate(nodes):
        for _ in range(many):
            cores.append(Core(tuple(range(first, first + threads)), node))
            first += threads
    taken = data.draw(st.sets(st.integers(0, first - 1)))
    had = {cpu for core in data.draw(st.lists(st.sampled_from(cores))) for cpu in core.cpus}
    count = wanted * threads
    free = [core for core in cores if not taken.intersection(core.cpus)]

    found = set(choose_cpus(cores, taken, count, had))

    assert bool(found) == (len(free) * threads >= count)
    if found:
        assert len(found) == count
        assert not found & taken
        assert all(found.issuperset(c.cpus) or found.isdisjoint(c.cpus) for c in cores)
        kept = {cpu for core in free if had.issuperset(core.cpus) for cpu in core.cpus}
        assert kept <= found or found <= kept
        by_node = [sum(threads for c in free if c.node == n) for n in range(len(nodes))]
        if not kept and max(by_node) >= count:
            assert len({c.node for c in cores if found.issuperset(c.cpus)}) == 1
        assert is_still_valid(cores, tuple(found), count)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=30))
def test_no_two_tasks_ever_have_a_cpu_together(requests: list[tuple[int, int]]) -> None:
    have: dict[int, tuple[int, ...]] = {}
    for task, cores in requests:
        others = {cpu for other, cpus in have.items() if other != task for cpu in cpus}
        have[task] = choose_cpus(TWO_NODES, others, 2 * cores, have.get(task, ()))
        all_own = [cpu for cpus in have.values() for cpu in cpus]
        assert len(all_own) == len(set(all_own))
        assert set(shared_cpus(TWO_NODES, all_own)) == usable_cpus(TWO_NODES) - set(all_own)


@pytest.mark.parametrize(
    ("count", "taken", "why"),
    [
        (3, CpusInUse(), "3 is not a number of whole cores: each has 2 CPUs here; request 4 or 2"),
        (1, CpusInUse(), "each has 2 CPUs here; request 2"),
        (18, CpusInUse(), "18 does not fit: tasks may use 16 CPUs (0-15)"),
        (14, CpusInUse(frozenset({0, 8, 1, 9})), "4 CPUs (0-1,8-9) exclusive CPUs of other tasks"),
        (16, CpusInUse(pinned=frozenset({5})), "CPU 5 requested by number"),
        (16, CpusInUse(sharing=3), "would leave no CPU of 16 for 3 other tasks"),
        (14, CpusInUse(frozenset({0, 8}), sharing=1), "would leave no CPU of 16 for another task"),
    ],
)
def test_missing_resources_are_refused_with_the_numbers(
    count: int, taken: CpusInUse, why: str
) -> None:
    assert why in refusal(TWO_NODES, taken, count)


def test_all_cpus_are_available_without_shared_tasks() -> None:
    assert refusal(TWO_NODES, CpusInUse(), 16) == ""
    assert refusal(TWO_NODES, CpusInUse(frozenset({0, 8}), sharing=2), 12) == ""


def test_a_task_that_shares_needs_a_cpu_that_is_left() -> None:
    everything = usable_cpus(TWO_NODES)
    assert sharing_refusal(TWO_NODES, frozenset(), [3]) == ""
    assert sharing_refusal(TWO_NODES, frozenset({3, 11}), [4]) == ""
    assert "CPU 3 is exclusive to another task" in sharing_refusal(TWO_NODES, frozenset({3}), [3])
    assert "all 16 CPUs" in sharing_refusal(TWO_NODES, everything, [])


def test_cpus_are_chosen_again_after_the_host_has_changed() -> None:
    assert is_still_valid(TWO_NODES, (1, 9), 2)
    assert not is_still_valid(TWO_NODES, (1, 9), 4)
    assert not is_still_valid(TWO_NODES, (1, 2), 2)  # halves of two cores
    assert not is_still_valid((Core((1,), others=(9,)),), (1, 9), 2)
    assert not is_still_valid((), (1, 9), 2)


def test_conflicting_settings_are_reported() -> None:
    odd = Resources(exclusive_cpus=2, cpus=[1])
    assert contradiction(odd, None) is not None
    assert contradiction(own(2), 3.0) == (
        "limits.cpu_max_cores",
        "3 exceeds its 2 exclusive CPUs",
    )
    assert contradiction(own(2), 2.0) is None
    assert contradiction(Resources(cpus=[1]), 8.0) is None


def test_a_task_with_exclusive_cpus_is_in_a_sibling_slice() -> None:
    one, other = a_spec(entitlement="web-a"), a_spec(entitlement="web-a", resources=own(2))

    assert slice_for(one) == r"workload-web\x2da.slice"
    assert slice_for(other) == r"workload-web\x2da_own.slice"
    assert slice_for(other).count("-") == 1  # a second dash would be another level of slices
    assert unit_properties("web", other, "/r")["Slice"] == slice_for(other)
    assert slice_for(other) in cgroup_of("web", other)
    assert is_shared_slice(slice_for(one))
    assert not is_shared_slice(slice_for(other))
    assert not is_shared_slice("twine-task-web.service")


def test_only_the_first_and_the_last_exclusive_cpu_need_another_unit() -> None:
    assert key_of(a_spec()) != key_of(a_spec(resources=own(2)))
    assert key_of(a_spec(resources=own(4))) == key_of(a_spec(resources=own(2)))
    assert key_of(a_spec(resources=Resources(io_weight=3))) == key_of(a_spec())


def test_exclusive_cpus_are_reported_once_the_kernel_confirms_them() -> None:
    spec = a_spec(resources=own(2))
    task = a_record(spec=spec, own_cpus=[2, 3], state=TaskState.STARTING)
    begun = decide(task, seen(), NOW)
    assert begun.action is Action.START
    assert begun.task.resources is None  # no value is assumed yet

    unit = a_unit(begun.task)
    up = decide(begun.task, seen(unit), NOW)
    assert up.action is Action.LIMIT
    assert status_of(up.task).cpus == []

    done = replace(up.task, resources=spec.resources)
    assert status_of(done).cpus == [2, 3]
    reported = describe_change(status_of(replace(done, resources=None)), status_of(done))
    assert reported == "task web: CPUs 2-3 are its own"
    assert status_of(replace(done, state=TaskState.STOPPED)).cpus == []


def test_a_bound_on_cpus_is_lifted_by_naming_all() -> None:
    pinned, free = Resources(cpus=[1]), a_spec()
    assert allowed_cpus([], pinned, free, (0, 1, 2)) == {"AllowedCPUs": (0, 1, 2)}
    assert allowed_cpus([], None, free, (0, 1, 2)) == {}
    assert allowed_cpus([], pinned, a_spec(resources=pinned), (0, 1)) == {}
    assert allowed_cpus([1, 2], None, a_spec(resources=own(2)), (0, 1, 2)) == {
        "AllowedCPUs": (1, 2)
    }
    assert exclusive_cpu_values([1, 2]) == {"cpuset.cpus.effective": "1-2"}
