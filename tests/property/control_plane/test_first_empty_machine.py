"""The fast path to the first machine of a rack or row returns what the full search returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_search import Search
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.preferences import spread_by_default
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.api.policy import Preference
from control_plane.api.settings import PowerSettings
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity, Place

pytestmark = pytest.mark.behaviour("BUG-AL27")

GIB = 1 << 30
SIZES = (
    Capacity("small", 1.0, 4.0, 8 * GIB, power_w=100),
    Capacity("large", 2.0, 8.0, 16 * GIB, power_w=200),
    Capacity("scarce", 1.0, 4.0, 8 * GIB, gpus=2, gpu_type="a", power_w=300),
)
MACHINES = st.lists(
    st.tuples(
        st.sampled_from(["r1", "r2", "r3", "r4"]),
        st.sampled_from(SIZES),
        st.sampled_from(["e1", "e1", "e1", FREE]),
    ),
    min_size=1,
    max_size=24,
)
JOBS = st.lists(
    st.tuples(
        st.sampled_from(["rack", "row"]),
        st.integers(1, 6),
        st.sampled_from([Demand(GIB, 1.0), Demand(7 * GIB, 3.0), Demand(GIB, 0.1)]),
    ),
    min_size=1,
    max_size=4,
)


def _region(machines, watts: int | None) -> RegionIndex:
    budgets = {} if watts is None else {"dc1": watts}
    power = Power(PowerSettings(budgets_w=budgets, overcommit=1.0)) if budgets else None
    index = RegionIndex(power) if power else RegionIndex()
    for number, (rack, capacity, pool) in enumerate(machines):
        row = f"dc1/m/w{rack[1:] in '12'}"
        place = Place("r", "dc1", "dc1/m", row, f"{row}/{rack}")
        index.put_many([(f"m{number:02}", capacity, place, pool, "")])
    return index


def _placed(machines, jobs, watts: int | None) -> list[list[tuple[int, str]]]:
    index, found = _region(machines, watts), []
    for number, (kind, tasks, demand) in enumerate(jobs):
        group = Group(demand, tuple(range(tasks)))
        preferences = (Preference(property=kind),)
        request = Request(f"j{number}", "e1", (group,), spread_by_default(preferences))
        made = plan(index, request, Allowance(machines=3))
        assert index.reserve(made.change) == ()
        index.settle(made.change)
        found.append([(claim.task, claim.machine.name) for claim in made.change.claims])
    return found


@given(MACHINES, JOBS, st.sampled_from([None, 300, 1000]))
def test_each_task_gets_the_machine_that_a_whole_search_finds(machines, jobs, watts):
    short = _placed(machines, jobs, watts)
    first_empty = Search.first_empty
    Search.first_empty = lambda *_: None  # type: ignore[method-assign]
    try:
        assert short == _placed(machines, jobs, watts)
    finally:
        Search.first_empty = first_empty  # type: ignore[method-assign]


def test_the_fast_path_is_taken(mocker: MockerFixture):
    """Shows that the property test above exercises the fast path."""
    machines = [(f"r{n % 4 + 1}", SIZES[0], "e1") for n in range(24)]
    short = mocker.spy(Search, "first_empty")
    (placed,) = _placed(machines, [("rack", 4, Demand(GIB, 1.0))], None)
    assert len(placed) == 4
    assert [made.name for made in short.spy_return_list] == [name for _, name in placed]
