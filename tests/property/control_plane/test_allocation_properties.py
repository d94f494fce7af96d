"""Properties of allocations on any small region, under any requests, failures and recoveries."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from regions import FREE, Allowance, RegionIndex, a_capacity, a_place, check, gains, plan, state

from control_plane.allocator.core.claims import Change
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.group_placement import GroupPlacement
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.allocator.core.preferences import DEFAULT
from control_plane.allocator.core.request import Group, Plan, Request
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.broker.core.capacity import micro

pytestmark = pytest.mark.behaviour("MO9", "MO12", "AL21")

POOLS = ["e1", "e2"]
JOBS = ["a", "b", "c"]
PLACES = [a_place(f"msb{1 + i % 3}", f"dc{1 + i // 3}", f"rack{r}") for i in range(5) for r in "12"]
CAPACITIES = [
    a_capacity("small", memory_bytes=4),
    a_capacity("small", memory_bytes=6, rru=5.3, generation="new"),
    a_capacity("large", memory_bytes=9, cpus=8.0, rru=11.1, gpus=1, disk_bytes=9),
    a_capacity("wide", memory_bytes=60),
]
DEMANDS = st.builds(
    Demand,
    memory_bytes=st.integers(0, 4),
    cpus=st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]),
    rru=st.sampled_from([0.0, 0.0, 0.7]),
    gpus=st.sampled_from([0, 0, 0, 0.25, 0.5, 1]),
    disk_bytes=st.sampled_from([0, 0, 0, 1, 5]),
    ports=st.sampled_from([(), (), ("http",)]),
    requires=st.sampled_from(
        [
            (),
            (),
            (),
            ((Property.MACHINE_TYPE, frozenset({"small"})),),
            ((Property.DATACENTER, frozenset({"dc1"})),),
            ((Property.RACK, frozenset({"msb1/row1/rack1", "rack2"})),),
        ]
    ),
)
PREFERENCES = st.one_of(
    st.just(DEFAULT),
    st.lists(
        st.builds(
            Preference,
            property=st.sampled_from(list(Property)),
            strategy=st.sampled_from(list(Strategy)),
            values=st.lists(
                st.sampled_from(["dc1", "msb2", "dc2/msb1", "rack1", "m3", "new", "small"]),
                max_size=2,
            ),
            at_most=st.sampled_from([None, None, 1, 3]),
        ),
        max_size=3,
    ).map(tuple),
)
GROUPS = st.lists(
    st.tuples(DEMANDS, st.integers(0, 6), st.sampled_from(["", "", "m1", "m4"]), st.booleans()),
    max_size=2,
)
ALLOWANCES = st.builds(
    Allowance,
    machines=st.sampled_from([None, 0, 1, 3]),
    micro_rru=st.sampled_from([None, None, 9_000_000]),
    per_type=st.sampled_from([None, None, {"small": 1}, {"large": 1, "small": 1}]),
    datacenter=st.sampled_from([None, None, "dc1"]),
)


def a_request_of(job: str, pool: str, groups, preferences, gang: bool) -> Request:
    found, first = [], 0
    for demand, tasks, leave, avoids in groups:
        named = {"avoid": leave} if avoids else {"leave": frozenset({leave} - {""})}
        found.append(Group(demand, tuple(range(first, first + tasks)), **named))
        first += tasks
    return Request(job, pool, tuple(found), preferences, gang)


@st.composite
def regions(draw, most: int = 10) -> RegionIndex:
    index = RegionIndex()
    for i in range(draw(st.integers(0, most))):
        index.put(
            f"m{i}",
            draw(st.sampled_from(CAPACITIES)),
            draw(st.sampled_from(PLACES)),
            draw(st.sampled_from([*POOLS, FREE])),
            draw(st.sampled_from(["", "", "", "is down"])),
        )
    return index


REQUESTS = st.builds(
    a_request_of,
    st.sampled_from(JOBS),
    st.sampled_from(POOLS),
    GROUPS,
    PREFERENCES,
    st.sampled_from([False, False, True]),
)


class Region(RuleBasedStateMachine):
    """Jobs come, change and end; machines fail, return, move and leave; plans run concurrently."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RegionIndex()
        self.waiting: dict[str, tuple[Request, Plan]] = {}
        """Changes that are planned and not reserved."""
        self.reserved: dict[str, Change] = {}
        self.added = 0

    @rule(
        capacity=st.sampled_from(CAPACITIES),
        place=st.sampled_from(PLACES),
        pool=st.sampled_from([*POOLS, FREE, FREE]),
        count=st.integers(1, 4),
    )
    def join(self, capacity, place, pool, count) -> None:
        for _ in range(count if self.added < 12 else 0):
            self.index.put(f"m{self.added}", capacity, place, pool, "")
            self.added += 1

    def machine(self, number: int):
        names = sorted(self.index.machines)
        return self.index.machines[names[number % len(names)]] if names else None

    @rule(number=st.integers(0, 99), why=st.sampled_from(["", "is down"]))
    def block(self, number, why) -> None:
        if machine := self.machine(number):
            self.index.block(machine.name, why)

    @rule(number=st.integers(0, 99))
    def leave(self, number) -> None:
        if machine := self.machine(number):
            self.index.remove(machine.name)

    @rule(number=st.integers(0, 99), place=st.sampled_from(PLACES))
    def carry(self, number, place) -> None:
        if machine := self.machine(number):
            self.index.put(machine.name, machine.capacity, place, machine.pool, machine.blocked)

    @rule(number=st.integers(0, 99), pool=st.sampled_from([*POOLS, FREE]))
    def assign(self, number, pool) -> None:
        machine = self.machine(number)
        if machine and not machine.jobs:
            self.index.put(machine.name, machine.capacity, machine.place, pool, machine.blocked)

    @rule(request=REQUESTS, allowance=ALLOWANCES)
    def plan(self, request, allowance) -> None:
        if request.job in self.reserved:
            return  # one change of a job at a time
        before, left = state(self.index), gains(self.index)
        made = plan(self.index, request, allowance)
        assert (state(self.index), gains(self.index)) == (before, left)
        self.waiting[request.job] = request, made
        self.check_plan(request, made)

    def check_plan(self, request: Request, made: Plan) -> None:
        change = made.change
        had = {c.task for c in self.index.claims.get(request.job, ())}
        wanted = {task for group in request.groups for task in group.tasks}
        after = had - {c.task for c in change.freed} | {c.task for c in change.claims}
        assert after | set(made.unplaced) == wanted | (after - wanted)
        assert after <= wanted
        assert bool(made.reasons) == bool(made.unplaced)
        if request.gang and made.unplaced:
            assert not change.claims
            assert not change.takes
        used = {c.machine for c in change.claims}
        assert set(change.takes) <= used
        assert len({c.task for c in change.claims}) == len(change.claims)
        groups = {task: group for group in request.groups for task in group.tasks}
        assert all(c.machine.name not in groups[c.task].leave for c in change.claims)
        for machine in change.takes:
            assert machine.pool == FREE
            assert not machine.jobs

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 2), fresh=st.booleans())
    def reserve(self, number, fresh) -> None:
        job = sorted(self.waiting)[number % len(self.waiting)]
        request, made = self.waiting.pop(job)
        if fresh:
            made = plan(self.index, request, Allowance())
        before = state(self.index)
        conflicts = self.index.reserve(made.change)
        note(f"{job}: {conflicts}")
        if conflicts:
            assert not fresh  # planner and committer agree
            assert state(self.index) == before
        else:
            self.reserved[job] = made.change

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 2))
    def settle(self, number) -> None:
        job = sorted(self.reserved)[number % len(self.reserved)]
        emptied = self.index.settle(self.reserved.pop(job))
        assert all(not machine.jobs for machine in emptied)

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 2))
    def roll_back(self, number) -> None:
        job = sorted(self.reserved)[number % len(self.reserved)]
        self.index.rollback(self.reserved.pop(job))

    @rule(job=st.sampled_from(JOBS))
    def release(self, job) -> None:
        if job not in self.reserved:
            self.waiting.pop(job, None)
            made = plan(self.index, Request(job, "e1"), Allowance(machines=0))
            assert self.index.reserve(made.change) == ()
            self.index.settle(made.change)
            assert job not in self.index.claims

    @invariant()
    def all_agrees(self) -> None:
        check(self.index, self.reserved.values())


Region.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_a_region_agrees_with_itself_whatever_happens = Region.TestCase


@pytest.mark.behaviour("MO9", "MO12", "AL11", "AL21")
@given(regions(), st.lists(st.tuples(REQUESTS, ALLOWANCES), max_size=6))
def test_the_committer_agrees_with_the_planner(index, requests):
    for request, allowance in requests:
        made = plan(index, request, allowance)
        assert index.reserve(made.change) == ()
        index.settle(made.change)
        check(index)


PLAIN = st.builds(
    a_request_of,
    st.sampled_from(["a", "a", "b"]),
    st.just("e1"),
    st.lists(
        st.tuples(DEMANDS, st.integers(0, 9), st.just(""), st.just(False)), min_size=1, max_size=2
    ),
    st.just(DEFAULT),
    st.just(False),
)


def placed(made: Plan) -> tuple[object, ...]:
    claims = [(c.task, c.machine.name, c.ports) for c in made.change.claims]
    return claims, made.change.freed, made.change.takes, made.unplaced


@pytest.mark.behaviour("AL7", "AL24")
@settings(max_examples=300, deadline=None)
@given(
    regions(most=20),
    st.lists(st.tuples(st.one_of(PLAIN, PLAIN, REQUESTS), ALLOWANCES, st.booleans()), max_size=8),
)
def test_the_fast_placement_equals_that_of_a_full_search(index, turns):
    """Most new jobs take the fast path. It chooses the same machines as a whole search."""
    for request, allowance, first in turns:
        found = {}
        for short in (first, not first):
            with pytest.MonkeyPatch.context() as patch:
                if not short:
                    patch.setattr(GroupPlacement, "_begin", lambda *_: [])
                    patch.setattr(GroupPlacement, "_place_quickly", lambda *_: 0)
                made = found[short] = plan(index, request, replace(allowance, _taken={}))
        assert placed(found[True]) == placed(found[False])
        assert index.reserve(made.change) == ()
        index.settle(made.change)


@pytest.mark.behaviour("AL13")
@given(regions(), REQUESTS, ALLOWANCES.filter(lambda a: a.machines != 1))
def test_the_same_request_again_changes_nothing(index, request, allowance):
    made = plan(index, request, allowance)
    assert index.reserve(made.change) == ()
    index.settle(made.change)
    again = plan(index, request, Allowance(machines=0))
    assert again.change.is_empty
    assert again.unplaced == made.unplaced


FREELY = st.builds(Demand, st.integers(1, 3), cpus=st.sampled_from([0.0, 0.3, 1.0]))


@pytest.mark.behaviour("AL8")
@given(regions(), FREELY, st.lists(st.integers(0, 25), min_size=1, max_size=4), st.booleans())
def test_no_msb_with_room_has_two_tasks_fewer_than_another(index, demand, sizes, grows):
    """Holds when a new job arrives and when it grows. Room is on machines that the entitlement
    holds and, if it may take machines, on free ones. An MSB may be behind only if it has no room
    for one more task.
    """
    allowance = Allowance(machines=None if grows else 0)
    for tasks in sorted(sizes):
        made = plan(index, Request("a", "e1", (Group(demand, tuple(range(tasks))),)), allowance)
        assert index.reserve(made.change) == ()
        index.settle(made.change)
        count = Counter(claim.machine.place.msb for claim in index.claims.get("a", ()))
        for machine in index.machines.values():
            usable = machine.pool == "e1" or (grows and machine.pool == FREE and not machine.jobs)
            if usable and not judge(demand, machine, machine):
                assert max(count.values(), default=0) - count[machine.place.msb] <= 1


def most_by_hand(index: RegionIndex, demand: Demand, pool: str, *, grows: bool) -> int:
    """Return how many such tasks fit; tries all machines."""
    found = 0
    for machine in index.machines.values():
        if machine.pool != pool and not (grows and machine.pool == FREE and not machine.jobs):
            continue
        room = PlannedRoom(machine)
        while found < 100 and not judge(demand, machine, room):
            room.take(demand, machine.capacity)
            found += 1
    return found


@pytest.mark.behaviour("AL17")
@given(regions(), st.lists(st.tuples(REQUESTS, DEMANDS, st.booleans()), min_size=1, max_size=6))
def test_earlier_results_hide_no_machine_that_fits(index, turns):
    """Despite any results of earlier searches, as many tasks are placed as fit by hand."""
    for request, demand, grows in turns:
        allowance = Allowance(machines=None if grows else 0)
        for _ in range(2):
            many = Request("probe", "e1", (Group(demand, tuple(range(100))),))
            made = plan(index, many, allowance)
            most = most_by_hand(index, demand, "e1", grows=grows)
            assert len(made.change.claims) == min(100, most)
        check(index)
        assert not made.unplaced or made.reasons
        made = plan(index, request, Allowance())
        assert index.reserve(made.change) == ()
        index.settle(made.change)


@pytest.mark.behaviour("CP3", "MO6")
@given(regions(), REQUESTS, ALLOWANCES)
def test_no_more_is_taken_than_allowed(index, request, allowance):
    machines, rru, per_type = allowance.machines, allowance.micro_rru, allowance.per_type
    takes = plan(index, request, allowance).change.takes
    assert machines is None or len(takes) <= machines
    assert rru is None or sum(micro(m.capacity.rru) for m in takes) <= rru
    kinds = Counter(m.capacity.machine_type for m in takes)
    assert per_type is None or all(n <= per_type.get(kind, 0) for kind, n in kinds.items())
    assert allowance.datacenter is None or all(
        m.place.datacenter == allowance.datacenter for m in takes
    )


@pytest.mark.behaviour("AL5")
@given(regions(), REQUESTS, ALLOWANCES)
def test_no_bin_gets_more_than_at_most_and_requirements_hold(index, request, allowance):
    made = plan(index, request, allowance)
    for preference in request.preferences:
        if preference.at_most is None:
            continue
        count = Counter(_bin(preference.property, c.machine) for c in made.change.claims)
        assert max(count.values(), default=0) <= preference.at_most
    for claim in made.change.claims:
        assert not judge(claim.demand, claim.machine, PlannedRoom(claim.machine))


def _bin(property_: Property, machine) -> str:
    if property_ is Property.MACHINE:
        return machine.name
    found = getattr(machine.place, property_, None)
    return found if found is not None else getattr(machine.capacity, property_)
