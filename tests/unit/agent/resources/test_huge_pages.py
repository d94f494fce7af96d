"""Huge pages of a task: availability, and the values for the kernel (docs/resources.md)."""

from __future__ import annotations

import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Resources, TaskSpec
from agent.machine.unit_properties import encode
from agent.resources.core.huge_pages import (
    bounds,
    command,
    file_of,
    no_pages_steps,
    pages_of,
    refusal,
    unlimited,
    with_page_limits,
    zero_limits,
)
from agent.runtime.core.records import key_of
from agent.runtime.core.slices import is_shared_slice, is_without_pages, slice_for
from agent.tasks.core.inside import InsideCommand, inside_properties
from agent.tasks.core.unit_properties import unit_properties

SMALL, LARGE = 2 << 20, 1 << 30


def with_pages(small: int = 0, large: int = 0, **fields: int) -> TaskSpec:
    return a_spec(resources=Resources(hugepages_2mib=small, hugepages_1gib=large, **fields))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (with_pages(5), ""),
        (
            with_pages(6),
            (
                "hugepages_2mib 6 does not fit: the machine has 8 pages of 2MiB, and other "
                "tasks hold 3"
            ),
        ),
        (
            with_pages(0, 1),
            "has 0 pages of 1GiB, and other tasks hold 0; its host profile sets them up",
        ),
        (a_spec(), ""),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_the_numbers(spec: TaskSpec, why: str) -> None:
    others = [with_pages(1), a_spec(), with_pages(2)]
    found = refusal(spec, others, {SMALL: 8, LARGE: 0}, controller=True)
    assert why in found
    assert bool(why) == bool(found)


def test_huge_pages_are_refused_if_the_kernel_cannot_limit_them() -> None:
    assert "no hugetlb controller" in refusal(with_pages(1), [], {SMALL: 8}, controller=False)
    assert refusal(a_spec(), [], {}, controller=False) == ""


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20),
    st.integers(0, 20),
    st.integers(0, 4),
)
def test_admitted_tasks_never_exceed_the_pools(
    requests: list[tuple[int, int]], small: int, large: int
) -> None:
    pools, have = {SMALL: small, LARGE: large}, list[TaskSpec]()
    for pages in requests:
        spec = with_pages(*pages)
        before = {size: sum(pages_of(o.resources).get(size, 0) for o in have) for size in pools}
        fits = before[SMALL] + pages[0] <= small and before[LARGE] + pages[1] <= large
        assert (refusal(spec, have, pools, controller=True) == "") == fits
        have += [spec] if fits else []


def test_the_kernels_files_are_named_by_size() -> None:
    assert file_of(SMALL) == "hugetlb.2MB.max"
    assert file_of(LARGE, "rsvd.max") == "hugetlb.1GB.rsvd.max"
    assert file_of(64 << 10) == "hugetlb.64KB.max"
    assert file_of(16 << 30) == "hugetlb.16GB.max"


def test_a_task_gets_its_huge_pages_and_none_of_other_sizes() -> None:
    found = bounds(with_pages(3), [SMALL, LARGE])
    assert found == {
        "hugetlb.2MB.rsvd.max": str(3 * SMALL),
        "hugetlb.2MB.max": str(3 * SMALL),
        "hugetlb.1GB.rsvd.max": "0",
        "hugetlb.1GB.max": "0",
    }
    assert set(zero_limits([SMALL]).values()) == {"0"}
    assert set(unlimited([SMALL]).values()) == {"max"}


def test_the_limit_is_written_before_all_else_and_a_unit_without_one_stays_as_it_is() -> None:
    whole = unit_properties("web", with_pages(1), "/r") | {"ExecStartPre": [["/bin/mount", "x"]]}
    unit = with_page_limits(whole, bounds(with_pages(1), [SMALL]))
    assert unit["ExecStartPre"] == [
        command("", bounds(with_pages(1), [SMALL])),
        ["/bin/mount", "x"],
    ]
    assert unit["RootDirectoryStartOnly"] is True
    assert encode(unit)
    assert with_page_limits(whole, {}) == whole


def test_a_command_inside_has_none() -> None:
    whole = unit_properties("web", with_pages(1), "/r") | {"ExecStartPre": [["/bin/mount", "x"]]}
    unit = with_page_limits(whole, bounds(with_pages(1), [SMALL]))
    requests = InsideCommand(("/bin/true",), 1.0)
    inside = inside_properties(unit, "web", "/g", "twine-in-web.x.service", requests)
    assert inside["ExecStartPre"] == [command("", zero_limits([SMALL]))]
    assert "ExecStartPre" not in inside_properties(whole, "web", "/g", "x.service", requests)
    assert no_pages_steps(()) == []


def test_tasks_with_huge_pages_are_in_sibling_slices() -> None:
    both = with_pages(1, exclusive_cpus=2)
    names = [slice_for(spec) for spec in (a_spec(), with_pages(1), both)]
    assert names == [
        "workload-local.slice",
        "workload-local_huge.slice",
        "workload-local_own_huge.slice",
    ]
    assert [is_shared_slice(name) for name in names] == [True, True, False]
    assert [is_without_pages(name) for name in names] == [True, False, False]
    assert not is_without_pages("cgroup.procs")


def test_only_the_first_and_the_last_huge_page_need_another_unit() -> None:
    assert key_of(a_spec()) != key_of(with_pages(1))
    assert key_of(with_pages(1)) == key_of(with_pages(9, 2))
