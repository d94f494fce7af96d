"""The CPU claim of a task whose job does not state one, and how claims are counted."""

import pytest
from msgspec.structs import replace
from regions import POOL, Allowance, a_capacity, a_place, a_region, a_request, allocate, check, plan

from agent.api import Limits, Resources
from control_plane.allocator.core.demand import Demand, demand_of
from control_plane.api.jobs import JobSpec, UpdatePolicy
from control_plane.api.policy import Overcommit
from control_plane.scheduler.core.job_check import claiming

pytestmark = pytest.mark.behaviour("BUG-CP15")

PLAIN = JobSpec(
    name="web", entitlement="front", tasks=3, image="sha256:" + "0" * 64, command=["/bin/serve"]
)


@pytest.mark.behaviour("BUG-CP15")
def test_a_job_without_a_cpu_key_claims_the_default():
    """Such a job claimed no CPU, and seven of its tasks were placed on two cores."""
    assert demand_of(claiming(PLAIN, None, 0.25)).cpus == 0.25


@pytest.mark.parametrize(
    ("changes", "cpus", "rru"),
    [
        ({"limits": Limits(cpu_max_cores=1.5)}, 1.5, 0.0),
        ({"limits": Limits(cpu_max_cores=1.5), "cpus": 0.5}, 0.5, 0.0),
        ({"cpus": 3.0}, 3.0, 0.0),
        ({"rru": 2.0}, 0.0, 2.0),
        ({"resources": Resources(exclusive_cpus=3)}, 3.0, 0.0),
        ({"resources": Resources(exclusive_cpus=3), "overcommit": Overcommit(cpu=4.0)}, 3.0, 0.0),
        ({"resources": Resources(exclusive_cpus=3), "limits": Limits(cpu_max_cores=1)}, 3.0, 0.0),
    ],
)
def test_the_setting_of_a_job_has_precedence(changes, cpus, rru):
    spec = replace(PLAIN, **changes)
    assert claiming(spec, None, 0.25) == spec
    demand = demand_of(spec)
    assert (demand.cpus, demand.rru) == (cpus, rru)


@pytest.mark.behaviour("BUG-CP15")
def test_a_job_of_an_earlier_release_keeps_its_claim_until_its_next_version():
    """An upgrade moves no task; applying the same file or a resize does not either."""
    assert claiming(PLAIN, PLAIN, 0.25) == PLAIN
    resized = replace(PLAIN, tasks=9, update=UpdatePolicy(drain_s=1))
    assert claiming(resized, PLAIN, 0.25) == resized
    changed = replace(PLAIN, command=["/bin/serve", "-v"])
    assert claiming(changed, PLAIN, 0.25).cpus == 0.25


def test_another_default_changes_no_job_that_has_one():
    known = claiming(PLAIN, None, 0.25)
    assert claiming(PLAIN, known, 0.5) == known


@pytest.mark.behaviour("BUG-AL5")
@pytest.mark.parametrize(
    ("cpus", "cores", "tasks"),
    [(0.1, 1, 10), (1.6, 8, 5), (0.3, 3, 10), (0.7, 7, 10), (1.1, 33, 30), (0.001, 1, 1000)],
)
def test_as_many_tasks_fit_as_their_cores_add_up_to(cpus, cores, tasks):
    """Ten tasks of 0.1 cores did not fit one core: rounding made each claim slightly larger."""
    index = a_region(msbs=1, machines=1, cpus=cores, rru=1.85, memory_bytes=1 << 40)
    made = allocate(index, a_request(tasks + 1, demand=Demand(1, cpus=cpus)))
    check(index)
    assert made.unplaced == (tasks,)
    assert index.machines["dc1-msb1-0"].free_cpu == 0
    assert f"1 machine: CPU: {cpus} cores wanted, at most 0 cores free" in made.reasons


@pytest.mark.behaviour("BUG-AL5")
def test_claims_have_no_tolerance():
    """A million tasks that each exceed their claim a little exceed it by much in total."""
    index = a_region(msbs=1, machines=1, cpus=1.0, rru=1.0, memory_bytes=1 << 40)
    made = allocate(index, a_request(2, demand=Demand(1, cpus=0.500001)))
    assert made.unplaced == (1,)
    assert "1 machine: CPU: 0.500001 cores wanted, at most 0.499999 cores free" in made.reasons
    allocate(index, a_request(1, demand=Demand(1, cpus=0.5)))
    assert allocate(index, a_request(1, "next", demand=Demand(1, cpus=0.500001))).unplaced


@pytest.mark.behaviour("BUG-AL5")
def test_cores_and_rru_are_claimed_of_one_machine_without_rounding():
    index = a_region(msbs=1, machines=1, cpus=36.0, rru=24.1, memory_bytes=1 << 40)
    allocate(index, a_request(18, "cores", demand=Demand(1, cpus=1.0)))
    made = allocate(index, a_request(6, "units", demand=Demand(1, rru=24.1 / 10)))
    assert made.unplaced == (5,)
    allocate(index, a_request(0, "cores"))
    allocate(index, a_request(10, "units", demand=Demand(1, rru=24.1 / 10)))
    assert index.machines["dc1-msb1-0"].free_cpu == 0
    check(index)


@pytest.mark.behaviour("BUG-AL5")
def test_tasks_that_share_a_core_by_overcommit_fit_it():
    spec = replace(PLAIN, cpus=1.0, overcommit=Overcommit(cpu=3.0))
    index = a_region(msbs=1, machines=1, cpus=2.0, rru=2.0, memory_bytes=1 << 40)
    assert not allocate(index, a_request(6, demand=demand_of(spec))).unplaced
    check(index)


@pytest.mark.behaviour("AL21")
def test_exclusive_and_shared_cpus_add_up_to_the_machine():
    """The host assigns whole cores to exclusive claims, so the claims of the others still fit."""
    own = demand_of(replace(PLAIN, resources=Resources(exclusive_cpus=3)))
    index = a_region(msbs=1, machines=1, cpus=8.0, rru=9.1, memory_bytes=1 << 40)
    assert not allocate(index, a_request(2, "own", demand=own)).unplaced
    made = allocate(index, a_request(3, "shared", demand=Demand(1, cpus=1.0)))
    assert made.unplaced == (2,)
    assert allocate(index, a_request(3, "own", demand=own)).unplaced == (2,)
    check(index)


@pytest.mark.behaviour("BUG-AL5")
def test_a_machine_may_turn_out_to_be_another_one_while_a_change_is_reserved():
    """The amount that the change frees there is also counted in the new units."""
    index = a_region(msbs=1, machines=1, memory_bytes=1 << 40)
    allocate(index, a_request(3))
    made = plan(index, a_request(4, demand=Demand(1, cpus=0.7)), Allowance(machines=0))
    assert index.reserve(made.change) == ()
    other = a_capacity(rru=9.1, cpus=7.0, memory_bytes=1 << 40)
    index.put("dc1-msb1-0", other, a_place(), POOL, "")
    index.settle(made.change)
    check(index)
    machine = index.machines["dc1-msb1-0"]
    assert other.cpus_of(machine.free_cpu) == 4.2
