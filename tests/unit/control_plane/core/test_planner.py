"""Plans: which tasks stay or move, which free machines are taken, and why tasks wait."""

import pytest
from regions import (
    FREE,
    GIB,
    POOL,
    TASK,
    Allowance,
    Group,
    RegionIndex,
    Request,
    a_capacity,
    a_place,
    a_region,
    a_request,
    add,
    allocate,
    check,
    gains,
    per,
    plan,
    settle,
    state,
    where,
)

from control_plane.allocator.core import bin_source, feasibility, machine_search
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.preferences import DEFAULT
from control_plane.api.policy import Preference, Property
from control_plane.broker.core.capacity import micro

NONE = Allowance(machines=0)
BIG = Demand(3 * GIB, cpus=1)


def requiring(property_: Property, *values: str, memory: int = GIB) -> Demand:
    return Demand(memory, cpus=1, requires=((property_, frozenset(values)),))


# -- requests


@pytest.mark.behaviour("AL5")
@pytest.mark.parametrize("value", ["msb2", "dc2/msb2"])
def test_only_machines_that_are_required_get_tasks(value):
    index = a_region(datacenters=2, msbs=3)
    allocate(index, a_request(4, demand=requiring(Property.MSB, value)))
    assert {name.split("-")[1] for name in where(index).values()} == {"msb2"}
    assert per(index, "datacenter") == ([2, 2] if value == "msb2" else [0, 4])


@pytest.mark.behaviour("CP10")
def test_a_pinned_entitlement_gets_machines_of_one_data_center_only():
    index = a_region(datacenters=2, msbs=2, machines=1)
    add(index, "f1", "msb9", "dc1", FREE)
    add(index, "f2", "msb9", "dc2", FREE)
    pinned = requiring(Property.DATACENTER, "dc2")
    made = allocate(index, a_request(20, demand=pinned), Allowance(datacenter="dc2"))
    assert per(index, "datacenter") == [0, 12]
    assert [m.name for m in made.change.takes] == ["f2"]
    assert len(made.unplaced) == 8
    assert "2 machines: requirement not met: datacenter = dc2" in made.reasons
    assert "1 free machine: not in dc2, the data center of the entitlement" in made.reasons


@pytest.mark.behaviour("AL23")
def test_one_generation_can_be_demanded_for_a_part_of_the_job():
    index = RegionIndex()
    add(index, "old1 old2", generation="skylake")
    add(index, "new1 new2", generation="icelake")
    groups = (
        Group(requiring(Property.GENERATION, "icelake"), (0, 1)),
        Group(requiring(Property.GENERATION, "skylake"), (2, 3, 4)),
    )
    allocate(index, Request("web", POOL, groups))
    assert {where(index)[i][:3] for i in (0, 1)} == {"new"}
    assert {where(index)[i][:3] for i in (2, 3, 4)} == {"old"}


def test_the_emptiest_machine_of_an_msb_is_taken():
    index = a_region(msbs=1, machines=2)
    allocate(index, a_request(2, "other", demand=requiring(Property.MACHINE, "dc1-msb1-0")))
    allocate(index, a_request(1))
    assert where(index) == {0: "dc1-msb1-1"}


def test_within_an_msb_tasks_go_to_distinct_machines_as_long_as_there_are_any():
    index = a_region(msbs=2, machines=3)
    allocate(index, a_request(6))
    assert per(index, "machine") == [1] * 6
    allocate(index, a_request(7))
    assert per(index, "machine") == [1, 1, 1, 1, 1, 2]


def test_each_task_gets_the_ports_that_it_names():
    index = a_region(msbs=1, machines=1)
    demand = Demand(GIB, cpus=1, ports=("http", "admin"))
    allocate(index, a_request(3, demand=demand))
    check(index)
    assert all(set(c.ports or {}) == {"http", "admin"} for c in index.claims["web"])
    before = where(index)
    renamed = Demand(GIB, cpus=1, ports=("http", "debug"))
    assert plan(index, a_request(3, demand=renamed), NONE).change.claims
    settle(index, plan(index, a_request(3, demand=renamed), NONE))
    assert where(index) == before
    assert all(set(c.ports or {}) == {"http", "debug"} for c in index.claims["web"])
    turned = Demand(GIB, cpus=1, ports=("debug", "http"))
    assert plan(index, a_request(3, demand=turned), NONE).change.is_empty


# -- tasks that stay


@pytest.mark.behaviour("AL13")
def test_the_same_request_again_changes_nothing():
    index = a_region()
    allocate(index, a_request(5))
    assert plan(index, a_request(5), Allowance()).change.is_empty


def test_a_plan_changes_nothing():
    index = a_region()
    add(index, "f1 f2", "msb7", pool=FREE)
    allocate(index, a_request(5))
    before, gain = state(index), gains(index)
    plan(index, a_request(20, demand=BIG), Allowance())
    assert (state(index), gains(index)) == (before, gain)


@pytest.mark.behaviour("AL8")
def test_tasks_that_stay_count_for_the_spread():
    index = a_region(msbs=3, machines=2)
    allocate(index, a_request(3, demand=requiring(Property.MSB, "msb1")))
    allocate(index, a_request(6))
    assert per(index, "msb") == [1, 2, 3]
    assert [where(index)[i].split("-")[1] for i in range(3)] == ["msb1"] * 3


@pytest.mark.behaviour("AL4")
def test_tasks_that_are_not_named_give_their_machines_back():
    index = a_region()
    allocate(index, a_request(5))
    allocate(index, a_request([1, 3]))
    assert sorted(where(index)) == [1, 3]
    check(index)
    allocate(index, a_request([]))
    assert index.claims == {}


def test_only_tasks_that_changed_move():
    index = a_region(msbs=3, machines=2)
    allocate(index, a_request(6))
    before = where(index)
    groups = (Group(TASK, (0, 1, 2)), Group(Demand(2 * GIB, cpus=1), (3, 4, 5)))
    made = allocate(index, Request("web", POOL, groups))
    assert {c.task for c in made.change.claims} == {3, 4, 5}
    assert {t: where(index)[t] for t in range(3)} == {t: before[t] for t in range(3)}
    check(index)
    assert plan(index, Request("web", POOL, groups), NONE).change.is_empty


@pytest.mark.behaviour("MO12")
def test_a_machine_that_went_to_another_entitlement_keeps_no_task():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4))
    index.put("dc1-msb1-0", a_capacity(), a_place("msb1"), "e2", "")
    made = allocate(index, a_request(4))
    assert made.unplaced == ()
    assert set(where(index).values()) == {"dc1-msb2-0"}
    check(index)


def test_a_job_may_move_to_another_entitlement():
    index = a_region(msbs=2, machines=1)
    add(index, "other", pool="e2")
    allocate(index, a_request(4))
    allocate(index, a_request(4, pool="e2"))
    assert set(where(index).values()) == {"other"}
    check(index)


@pytest.mark.behaviour("MO12", "CP7")
def test_jobs_never_stack_across_entitlements():
    index = RegionIndex()
    add(index, "mine")
    add(index, "theirs", pool="e2")
    made = allocate(index, a_request(5), Allowance())
    assert set(where(index).values()) == {"mine"}
    assert made.unplaced == (4,)


# -- leave and avoid


def test_tasks_leave_a_machine_as_far_as_there_is_room_elsewhere():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4))
    leaving = [t for t, name in where(index).items() if name == "dc1-msb1-0"]
    staying = [t for t in range(4) if t not in leaving]
    allocate(index, a_request(1, "other", demand=requiring(Property.MACHINE, "dc1-msb2-0")))
    groups = (
        Group(TASK, tuple(staying)),
        Group(TASK, tuple(leaving), leave=frozenset({"dc1-msb1-0"})),
    )
    made = allocate(index, Request("web", POOL, groups))
    assert made.unplaced == (leaving[1],)
    assert "1 machine: is to be emptied" in made.reasons
    assert where(index)[leaving[0]] == "dc1-msb2-0"
    assert where(index)[leaving[1]] == "dc1-msb1-0"  # the task keeps its claim meanwhile
    check(index)


def test_a_machine_is_avoided_unless_there_is_no_other():
    index = a_region(msbs=2, machines=1)
    made = plan(index, a_request(4, avoid="dc1-msb1-0"), NONE)
    assert {c.machine.name for c in made.change.claims} == {"dc1-msb2-0"}
    made = plan(index, a_request(6, avoid="dc1-msb1-0"), NONE)
    assert made.unplaced == ()
    assert sum(c.machine.name == "dc1-msb1-0" for c in made.change.claims) == 2


def test_a_task_on_a_machine_to_avoid_moves_only_if_there_is_room():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(2, demand=requiring(Property.MACHINE, "dc1-msb1-0")))
    again = a_request(2, avoid="dc1-msb1-0")
    allocate(index, a_request(3, "other", demand=requiring(Property.MACHINE, "dc1-msb2-0")))
    made = allocate(index, again)
    assert made.unplaced == ()
    assert sorted(where(index).values()) == ["dc1-msb1-0", "dc1-msb2-0"]
    assert plan(index, again, NONE).change.is_empty


def test_a_task_that_does_not_run_leaves_a_blocked_machine():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4))
    index.block("dc1-msb1-0", "is down")
    assert plan(index, a_request(4), NONE).change.is_empty
    made = allocate(index, a_request(4, running=False))
    assert made.unplaced == ()
    assert set(where(index).values()) == {"dc1-msb2-0"}
    index.block("dc1-msb2-0", "is down")
    index.block("dc1-msb1-0", "is down, too")
    made = allocate(index, a_request(4, running=False))
    assert made.unplaced == (0, 1, 2, 3)
    assert "1 machine: is down, too" in made.reasons
    assert len(where(index)) == 4


# -- gang


def test_a_gang_gets_all_machines_or_none():
    index = a_region(msbs=2, machines=1)
    made = plan(index, a_request(9, gang=True), NONE)
    assert made.change.is_empty
    assert made.unplaced == tuple(range(9))
    assert made.reasons[0] == "all or nothing was requested, and 1 lack room"
    assert allocate(index, a_request(8, gang=True)).unplaced == ()


def test_a_gang_that_does_not_fit_takes_no_machine():
    index = RegionIndex()
    add(index, "f1 f2", pool=FREE)
    made = plan(index, a_request(9, gang=True), Allowance())
    assert made.change.is_empty
    assert len(plan(index, a_request(8, gang=True), Allowance()).change.takes) == 2


def test_a_gang_without_room_to_grow_keeps_its_tasks():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(6))
    allocate(index, a_request(9, gang=True))
    assert sorted(where(index)) == list(range(6))
    assert allocate(index, a_request(8, gang=True)).unplaced == ()


@pytest.mark.parametrize("changed", [TASK, Demand(2 * GIB, cpus=1)])
def test_a_gang_that_moves_in_vain_keeps_its_claims(changed):
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(6))
    before = state(index)
    leaving = tuple(t for t, name in where(index).items() if name == "dc1-msb1-0")
    staying = tuple(t for t in range(6) if t not in leaving)
    groups = (Group(TASK, staying), Group(changed, leaving, leave=frozenset({"dc1-msb1-0"})))
    made = allocate(index, Request("web", POOL, groups, gang=True))
    assert made.unplaced == leaving
    assert state(index) == before


def test_a_gang_does_not_fail_for_tasks_that_may_stay():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(2))
    groups = (Group(TASK, (0, 1), avoid="dc1-msb1-0"), Group(TASK, (2, 3)))
    made = allocate(index, Request("web", POOL, groups, gang=True))
    assert made.unplaced == ()
    assert sorted(where(index)) == [0, 1, 2, 3]


# -- the free pool


@pytest.mark.behaviour("AL10", "CP3")
def test_machines_come_from_the_free_pool_when_those_held_do_not_do():
    index = a_region(msbs=2, machines=1)
    add(index, "f1 f2", "msb1", pool=FREE)
    add(index, "f3", "msb3", pool=FREE)
    made = allocate(index, a_request(3), Allowance())
    assert [m.name for m in made.change.takes] == ["f3"]  # for the spread
    made = allocate(index, a_request(12), Allowance())
    assert made.change.takes == []
    made = allocate(index, a_request(13), Allowance())
    assert len(made.change.takes) == 1
    check(index)


@pytest.mark.behaviour("AL8", "AL10")
def test_an_entitlement_takes_one_machine_per_msb_first():
    index = a_region(msbs=3, machines=2, pool=FREE)
    made = plan(index, a_request(6), Allowance(machines=3))
    assert {m.place.msb for m in made.change.takes} == {"dc1/msb1", "dc1/msb2", "dc1/msb3"}
    assert len(plan(index, a_request(6), Allowance(machines=2)).change.takes) == 2
    assert len(plan(index, a_request(6, demand=BIG), Allowance()).change.takes) == 6


@pytest.mark.behaviour("CP3", "MO6")
@pytest.mark.parametrize(
    ("allowance", "taken", "reason"),
    [
        (Allowance(machines=2), 2, "2 free machines: the quota of machines is used up"),
        (
            Allowance(per_type={"small": 1, "large": 2}),
            3,
            "1 free machine: the quota of small machines is used up",
        ),
        (Allowance(per_type={"large": 1}), 1, "the quota of small machines is used up"),
        (Allowance(micro_rru=micro(9.0)), 2, "2 free machines: the quota of RRU is used up"),
        (
            Allowance(types=frozenset({"large"})),
            2,
            "2 free machines: type small is not among the entitlement's types",
        ),
        (
            Allowance(refuses=lambda m: "is held back" if m.name != "f1" else ""),
            1,
            "3 free machines: is held back",
        ),
        (Allowance(datacenter="dc2"), 1, "3 free machines: not in dc2"),
        (Allowance(), 4, "the free pool is empty"),
    ],
)
def test_the_allowed_number_of_takes_is_never_exceeded(allowance, taken, reason):
    index = RegionIndex()
    add(index, "f1", pool=FREE)
    add(index, "f2", pool=FREE, msb="msb2")
    add(index, "f3", pool=FREE, machine_type="large")
    add(index, "f4", pool=FREE, dc="dc2", machine_type="large")
    made = plan(index, a_request(20), allowance)
    assert len(made.change.takes) == taken
    assert len(made.unplaced) == 20 - 4 * taken
    if taken < 4:
        assert any(reason in found for found in made.reasons)
    settle(index, made)
    check(index)


@pytest.mark.behaviour("MO6")
def test_small_machines_fit_a_quota_of_rru_that_is_too_small_for_larger_ones():
    index = RegionIndex()
    add(index, "big", pool=FREE, rru=8.0)
    add(index, "little", pool=FREE, rru=4.0)
    made = plan(index, a_request(1), Allowance(micro_rru=micro(5.0)))
    assert [m.name for m in made.change.takes] == ["little"]


@pytest.mark.behaviour("MO6")
def test_a_quota_of_rru_can_be_used_to_its_end():
    index = RegionIndex()
    add(index, [f"f{i}" for i in range(9)], pool=FREE, rru=5.3)
    made = plan(index, a_request(40), Allowance(micro_rru=micro(7 * 5.3)))
    assert len(made.change.takes) == 7


def test_blocked_machines_are_neither_used_nor_taken():
    index = RegionIndex()
    add(index, "a", blocked="is down")
    add(index, "f", pool=FREE, blocked="is in maintenance")
    made = plan(index, a_request(1), Allowance())
    assert made.change.is_empty
    assert made.reasons == ("1 machine: is down", "1 free machine: is in maintenance")


# -- reasons


@pytest.mark.behaviour("BUG-UX7")
def test_a_note_explains_machines_that_count_for_several_reasons():
    """2 + 1 + 1 machines count for the reasons, of 3 machines."""
    index = RegionIndex()
    add(index, "a", memory_bytes=GIB, blocked="is down")
    add(index, "b", memory_bytes=GIB)
    add(index, "c", blocked="is in maintenance")
    made = plan(index, a_request(1, demand=Demand(2 * GIB)), NONE)
    assert made.reasons == (
        "2 machines: memory: 2048 MiB wanted, at most 1024 MiB free",
        "1 machine: is down",
        "1 machine: is in maintenance",
        "of 3 machines in all: each counts once per reason",
        "the free pool is empty",
    )


def test_every_reason_is_given_at_once():
    index = RegionIndex()
    add(index, "a b", memory_bytes=GIB)
    add(index, "c", blocked="is in maintenance")
    add(index, "d", "msb2")
    add(index, "e", "msb3", generation="old")
    add(index, "f1", "msb4", pool=FREE)
    add(index, "f2", "msb4", pool=FREE, memory_bytes=GIB, machine_type="gpu")
    demand = Demand(2 * GIB, requires=((Property.GENERATION, frozenset({"", "new"})),))
    made = plan(
        index,
        a_request(
            9,
            demand=demand,
            preferences=(Preference(property=Property.MSB, at_most=1), *DEFAULT),
        ),
        Allowance(per_type={"small": 0, "gpu": 1}),
    )
    assert len(made.change.claims) == 1
    assert made.reasons == (
        "2 machines: memory: 2048 MiB wanted, at most 1024 MiB free",
        '1 machine: requirement not met: generation in ("", new)',
        "1 machine: is in maintenance",
        "1 machine: msb would get 2 tasks > 1",
        "1 free machine: the quota of small machines is used up",
        "1 free machine: memory: 2048 MiB wanted, at most 1024 MiB free",
    )


def test_an_entitlement_without_machines_is_named_as_the_reason():
    made = plan(RegionIndex(), a_request(1), Allowance())
    assert made.reasons == ("the entitlement holds no machine yet", "the free pool is empty")


def test_nothing_is_explained_when_all_have_room():
    assert plan(a_region(), a_request(3), NONE).reasons == ()


@pytest.mark.behaviour("AL23")
def test_a_limit_per_bin_counts_the_tasks_that_are_there_already():
    index = RegionIndex()
    for msb in ("msb1", "msb2"):
        add(index, [f"{msb}-{i}" for i in range(6)], msb)
    limit = (Preference(property=Property.MSB, at_most=2), *DEFAULT[1:])
    allocate(index, a_request(4, preferences=limit))
    made = allocate(index, a_request(6, preferences=limit))
    assert made.unplaced == (4, 5)
    assert per(index, "msb") == [2, 2]


# -- bounded time


@pytest.mark.behaviour("AL17")
def test_machines_without_room_do_not_hide_a_machine_that_fits():
    """One search skips 256 such machines and then searches the rest completely."""
    index = RegionIndex()
    add(index, [f"cpu{i}" for i in range(400)], cpus=0.5, rru=0.5)
    add(index, ["memory"], memory_bytes=GIB)
    made = allocate(index, a_request(2))
    assert made.unplaced == (1,)
    assert where(index) == {0: "memory"}


@pytest.mark.behaviour("AL17")
def test_a_long_search_yields_to_other_work():
    index = RegionIndex()
    for msb in range(10):
        add(index, [f"m{msb}-{i}" for i in range(500)], f"msb{msb}", memory_bytes=GIB)
        add(index, [f"f{msb}-{i}" for i in range(500)], f"msb{msb}", pool=FREE, memory_bytes=GIB)
    nowhere = requiring(Property.RACK, "rack9")
    assert len(list(planning(index, a_request(3, demand=nowhere), Allowance()))) >= 5
    assert len(list(planning(index, a_request(3), Allowance()))) == 0
    assert len(list(planning(index, a_request(1500), NONE))) == 2


@pytest.mark.behaviour("AL17")
def test_a_large_job_is_compared_with_its_tasks_in_steps():
    index = a_region(msbs=2, machines=200)
    allocate(index, a_request(1500))
    assert len(list(planning(index, a_request(1500), NONE))) == 7
    assert len(list(planning(index, a_request([]), NONE))) == 3
    assert len(list(planning(index, a_request(400, "other"), NONE))) == 0


def test_a_machine_without_fit_for_one_allocation_may_fit_another():
    """A plan's own claims are not recorded as a machine's lack of room."""
    index = a_region(msbs=1, machines=1)
    assert plan(index, a_request(5), NONE).unplaced == (4,)
    assert plan(index, a_request(4, "other"), NONE).unplaced == ()


# -- the first machine that is judged


@pytest.mark.behaviour("AL7")
def test_machines_with_far_more_memory_than_others_are_filled_one_by_one():
    """This also holds for the first task of a new job, which takes the fast path."""
    index = a_region(msbs=1, machines=20)
    wide = Demand(10 * GIB, cpus=0.1)
    add(index, "w1 w2 w3", machine_type="wide", memory_bytes=64 * GIB)
    allocate(index, a_request(1, "first", demand=wide))
    used = where(index, "first")[0]
    allocate(index, a_request(1, "second", demand=wide))
    assert where(index, "second") == {0: used}


@pytest.mark.behaviour("AL11")
@pytest.mark.parametrize("missed", [False, True])
def test_a_new_version_may_have_the_room_that_its_old_one_frees(missed):
    """The task stays on its machine, although it looks full and another job found no room there."""
    index = RegionIndex()
    add(index, "small used")
    add(index, "large", machine_type="large", memory_bytes=7 * GIB)
    allocate(index, a_request(1, "web", demand=Demand(int(3.9 * GIB), cpus=3.9)))
    allocate(index, a_request(1, "next"))
    assert where(index, "next") == {0: "used"}
    assert where(index, "web") == {0: "small"}
    new = Demand(int(3.8 * GIB), cpus=3.8)
    if missed:
        allocate(index, a_request(2, "other", demand=new))
        allocate(index, Request("other", POOL))
    allocate(index, a_request(1, "web", demand=new))
    assert where(index, "web") == {0: "small"}


# -- refusals


@pytest.mark.behaviour("AL17")
def test_a_refusal_judges_no_machine_twice_for_requests_that_are_alike(monkeypatch):
    """The reasons are computed once for each kind of request, and again once room was gained."""
    index = a_region(msbs=3, machines=50)
    allocate(index, a_request(600, "all"))
    first = plan(index, a_request(5, "one"), Allowance())
    judged = []

    def counting(demand, machine, room, judge=feasibility.judge):
        judged.append(machine)
        return judge(demand, machine, room)

    for module in (feasibility, bin_source, machine_search):
        monkeypatch.setattr(module, "judge", counting)
    again = plan(index, a_request(7, "two"), Allowance())
    assert (again.unplaced, again.reasons) == (tuple(range(7)), first.reasons)
    assert judged == []
    add(index, "another", memory_bytes=1)
    assert "151 machines: memory" in str(plan(index, a_request(7, "two"), Allowance()).reasons)
    judged.clear()
    allocate(index, a_request(599, "all"))
    assert len(plan(index, a_request(7, "two"), Allowance()).unplaced) == 6
    assert judged


@pytest.mark.behaviour("CP6")
def test_temporary_refusals_are_not_cached():
    index = RegionIndex()
    add(index, "f1 f2", pool=FREE)
    kept = Allowance(refuses=lambda machine: "kept for others")
    assert "2 free machines: kept for others" in plan(index, a_request(1), kept).reasons
    assert not plan(index, a_request(1), Allowance()).unplaced
