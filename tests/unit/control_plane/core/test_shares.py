"""How much the jobs of a reservation may request together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Limits, Location
from control_plane.allocator.core.demand import demand_of
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, TaskRecord
from control_plane.api.policy import Property, Requirement
from control_plane.api.updates import UpdatePolicy
from control_plane.broker.core.capacity import Capacity, Place
from control_plane.scheduler.core.shares import check_share, is_shared

pytestmark = pytest.mark.behaviour("MO16")

GIB = 1 << 30
SMALL = Capacity("small", rru=4.0, cpus=4.0, memory_bytes=8 * GIB, gpus=1, network_mbps=1000)
LARGE = Capacity("large", rru=16.0, cpus=8.0, memory_bytes=64 * GIB)
HERE = Place.of(Location(datacenter="dc1", msb="msb1"))
KINDS = [Machine("m1", SMALL, HERE, ""), Machine("m2", LARGE, HERE, "")]


def a_job(name="web", tasks=1, memory=GIB, entitlement="one", **fields) -> JobSpec:
    return JobSpec(
        name=name,
        entitlement=entitlement,
        tasks=tasks,
        image="sha256:" + "a" * 64,
        command=["/x"],
        limits=Limits(memory_max_bytes=memory, **fields.pop("limits", {})),
        **fields,
    )


def a_record(placed: JobSpec, **fields) -> JobRecord:
    tasks = [TaskRecord(index=i, version=1, generation=1) for i in range(placed.tasks)]
    return JobRecord(
        **{
            "name": placed.name,
            "spec": placed,
            "version": 1,
            "specs": {1: placed},
            "tasks": tasks,
            **fields,
        }
    )


def granted(**quota) -> dict[str, EntitlementSpec]:
    """Return an entitlement for small machines and two reservations with this quota on it."""
    base = {"machine_types": ["small"]} if "per_type" not in quota else {}
    reserved = EntitlementSpec(**quota, materialization="base")
    return {"base": EntitlementSpec(**quota, **base), "one": reserved, "two": reserved}


def refused(specs, spec, *others, known=None) -> list[str]:
    records = [a_record(o) if isinstance(o, JobSpec) else o for o in others]
    return [e.reason for e in check_share(spec, known, records, specs, KINDS)]


def test_the_jobs_of_a_reservation_together_want_no_more_than_its_own_quota():
    specs = granted(machines=3)
    assert refused(specs, a_job("a", 12, 2 * GIB)) == []
    other = a_job("a", 8, 2 * GIB)  # as much as two of three machines
    assert refused(specs, a_job("b", 4, 2 * GIB), other) == []
    assert refused(specs, a_job("b", 5, 2 * GIB), other) == [
        "its tasks need 1.25 machines by memory, the other jobs of 'one' 2, and its own quota is 3"
    ]


@pytest.mark.behaviour("JC12")
def test_extra_tasks_that_are_shared_count_once_for_all_jobs():
    """The number of jobs that may be updated at once determines the size of the buffer."""
    models = [
        a_job(f"m{n}", 1, GIB, update=UpdatePolicy(max_unavailable=0, surge=1)) for n in range(12)
    ]
    own = granted(machines=2)  # room for 16 tasks of 1 GiB
    shared = {name: replace(spec, surge_tasks=3) for name, spec in own.items()}
    assert refused(own, models[8], *models[:7]) == []
    assert refused(own, models[8], *models[:8]) != []  # two tasks for each job
    assert refused(shared, models[11], *models[:11]) == []  # 12, and 3 for all jobs
    more = [replace(models[0], name=f"n{n}") for n in range(2)]
    assert refused(shared, more[0], *models) == []
    assert refused(shared, more[1], *models, more[0]) == [
        "its tasks need 0.125 machines by memory, the other jobs of 'one' 2, and its own quota is 2"
    ]


def test_a_version_that_is_only_kept_to_go_back_to_counts_nothing():
    specs = granted(machines=3)
    dear, cheap = a_job("a", 8, 2 * GIB), a_job("a", 8, GIB)
    on_the_way = a_record(cheap, version=2, specs={1: dear, 2: cheap})  # its tasks run version 1
    tasks = [TaskRecord(index=i, version=2, generation=2) for i in range(8)]
    done = a_record(cheap, version=2, specs={1: dear, 2: cheap}, tasks=tasks)

    assert refused(specs, a_job("b", 8, 2 * GIB), on_the_way) != []
    assert refused(specs, a_job("b", 8, 2 * GIB), done) == []


@pytest.mark.parametrize(
    ("more", "tasks"),
    [
        ({"memory": 4 * GIB}, 4),
        ({"limits": {"cpu_max_cores": 2.0}}, 4),
        ({"rru": 2.0}, 4),
        ({"gpus": 1}, 2),
        ({"network_mbps": 500}, 4),
    ],
)
def test_each_resource_is_a_separate_bound(more, tasks):
    specs = granted(machines=2)
    assert refused(specs, a_job(tasks=tasks, **more)) == []
    assert refused(specs, a_job(tasks=tasks + 1, **more)) != []


@pytest.mark.behaviour("MO6")
def test_a_quota_in_rru_counts_what_of_a_machine_is_used_up_in_rru():
    specs = granted(rru=8.0)
    assert refused(specs, a_job(tasks=8, rru=1.0)) == []
    assert refused(specs, a_job(tasks=9, rru=1.0)) != []
    assert refused(specs, a_job(tasks=4, memory=4 * GIB)) == []  # half a machine is 2 RRU
    (reason,) = refused(specs, a_job(tasks=5, memory=4 * GIB))
    assert "need 10 RRU by memory" in reason
    assert "own quota is 8" in reason


@pytest.mark.behaviour("MO6")
def test_a_quota_by_type_counts_machines_of_these_types():
    specs = granted(per_type={"small": 1, "large": 1})
    assert refused(specs, a_job(tasks=16, memory=8 * GIB)) == []  # each uses 1/8 of a large one
    assert refused(specs, a_job(tasks=17, memory=8 * GIB)) != []
    only = {"machine_types": ["small"]}
    assert refused(specs, a_job(tasks=2, memory=8 * GIB, **only)) == []
    assert refused(specs, a_job(tasks=3, memory=8 * GIB, **only)) != []


def test_the_shared_entitlement_is_bound_by_its_own_quota_too_and_no_other_is():
    specs = granted(machines=1)
    specs["alone"] = EntitlementSpec(machines=1)
    assert [n for n in specs if is_shared(n, specs)] == ["base", "one", "two"]
    assert refused(specs, a_job(tasks=9, entitlement="base")) != []
    assert refused(specs, a_job(tasks=900, entitlement="alone")) == []  # tasks wait for room


def test_a_smaller_quota_refuses_growth_and_nothing_that_is_wanted_already():
    known = a_record(a_job(tasks=16))
    specs = granted(machines=1)
    for tasks in (16, 15, 9):
        assert refused(specs, a_job(tasks=tasks), known=known) == []
    assert refused(specs, a_job(tasks=17), known=known) != []
    assert refused(specs, a_job(tasks=16, memory=2 * GIB), known=known) != []
    assert refused(specs, a_job("b", 0), known) == []
    assert refused(specs, a_job("b", 1), known) != []


def test_tasks_that_are_on_their_way_out_count_until_they_are_gone():
    specs = granted(machines=1)
    stopping = a_record(a_job(tasks=8), stopping=True)
    assert refused(specs, a_job("b", 1), stopping) != []
    shrinking = a_record(a_job(tasks=8), spec=a_job(tasks=1))
    assert refused(specs, a_job("b", 1), shrinking) != []
    large = a_job(tasks=2, memory=4 * GIB)
    rolling = a_record(large, spec=a_job(tasks=2), version=2, specs={1: large, 2: a_job(tasks=2)})
    assert refused(specs, a_job("b", 1), rolling) != []
    done = a_record(a_job(tasks=2), version=2, specs={2: a_job(tasks=2)})
    assert refused(specs, a_job("b", 6), done) == []


def test_a_requirement_of_a_place_does_not_get_a_job_around_its_share():
    specs = granted(machines=1)
    there = Requirement(property=Property.MSB, values=["msb9"])  # msb9 has no machine yet
    assert refused(specs, a_job(tasks=9, requires=[there])) != []


def test_in_a_region_without_such_machines_nothing_is_known():
    assert check_share(a_job(tasks=900), None, [], granted(machines=1), []) == []


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(0, 1)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_tasks_with_room_within_the_quota_are_never_refused(tasks, quota):
    """Every task that has room on the machines of the quota is accepted as a separate job."""
    rooms = [PlannedRoom.whole(SMALL) for _ in range(quota)]
    placed: list[JobSpec] = []
    for number, (memory, rru, gpus) in enumerate(tasks):
        spec = a_job(f"j{number}", 1, memory * GIB, rru=rru or None, gpus=gpus)
        demand = demand_of(spec)
        room = next((r for r in rooms if not judge(demand, KINDS[0], r)), None)
        if room is not None:
            room.take(demand, SMALL)
            assert refused(granted(machines=quota), spec, *placed) == []
            assert refused(granted(rru=quota * SMALL.rru), spec, *placed) == []
            placed.append(spec)
