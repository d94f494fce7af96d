"""Placement and capacity: what holds for every region, job and load."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.api import Location
from control_plane.core.capacity import Held, Need, plan_capacity
from control_plane.core.placement import (
    FIRST_PORT,
    LAST_PORT,
    Demand,
    Host,
    Load,
    fits,
    place,
    room,
)

TYPES = ("small", "large")


@st.composite
def hosts(draw, most: int = 9) -> list[Host]:
    found = []
    for i in range(draw(st.integers(0, most))):
        msb = draw(st.integers(1, 4))
        capacity = draw(st.integers(1, 8))
        found.append(
            Host(
                name=f"m{i}",
                location=Location(datacenter=f"dc{1 + msb % 2}", msb=f"msb{msb}"),
                machine_type=draw(st.sampled_from(TYPES)),
                memory_bytes=capacity,
                cpu_cores=float(draw(st.integers(1, 8))),
                load=Load(memory_bytes=draw(st.integers(0, capacity))),
                blocked=draw(st.sampled_from(["", "", "", "is down"])),
            )
        )
    return found


DEMANDS = st.builds(
    Demand,
    memory_bytes=st.integers(1, 3),
    cpu_cores=st.sampled_from([0.0, 0.5, 2.0]),
    ports=st.sampled_from([(), ("http",), ("http", "admin")]),
    machine_types=st.sampled_from([(), ("small",)]),
)


@given(hosts(), DEMANDS, st.integers(0, 20))
def test_the_committer_agrees_with_the_planner(region, demand, tasks):
    """Placing one task after another, each still fits; so never over capacity (MO9, AL21)."""
    plan = place(demand, range(tasks), region, {})
    now = {host.name: host for host in region}
    for placement in plan.placements.values():
        host = now[placement.machine]
        assert fits(demand, host) == ()
        assert set(placement.ports) == set(demand.ports)
        taken = set(placement.ports.values())
        assert len(taken) == len(demand.ports)
        assert not taken & host.load.ports
        assert all(FIRST_PORT <= port <= LAST_PORT for port in taken)
        now[host.name] = replace(host, load=host.load.plus(demand, taken))
    if plan.unplaced:
        assert all(fits(demand, host) for host in now.values())
        assert plan.reasons
    assert len(plan.placements) + len(plan.unplaced) == tasks


@given(hosts(), DEMANDS, st.integers(0, 20))
def test_msbs_with_room_never_differ_by_more_than_one(region, demand, tasks):  # AL8
    plan = place(demand, range(tasks), region, {})
    count = Counter({host.msb: 0 for host in region})
    now = {host.name: host for host in region}
    for placement in plan.placements.values():
        host = now[placement.machine]
        count[host.msb] += 1
        now[host.name] = replace(host, load=host.load.plus(demand, placement.ports.values()))
    for msb in count:
        has_room = any(not fits(demand, h) for h in now.values() if h.msb == msb)
        if has_room:
            assert max(count.values()) - count[msb] <= 1


@given(hosts(), DEMANDS, st.integers(1, 12), st.data())
def test_tasks_that_stay_count_for_the_spread(region, demand, tasks, data):
    first = place(demand, range(tasks), region, {})
    mine = Counter(p.machine for p in first.placements.values())
    if not mine:
        return
    lost = data.draw(st.sampled_from(sorted(mine)))
    again = place(
        demand,
        range(mine[lost]),
        [replace(h, blocked="is down") if h.name == lost else h for h in region],
        {name: n for name, n in mine.items() if name != lost},
    )
    assert lost not in {p.machine for p in again.placements.values()}


@given(hosts(), hosts(), DEMANDS, st.integers(0, 12), st.integers(1, 8))
def test_growth_keeps_to_quota_and_pool_and_comes_to_rest(held_hosts, free, demand, tasks, quota):
    free = [replace(h, name=f"free-{h.name}", blocked="", load=Load()) for h in free]
    empty = [replace(h, load=Load()) for h in held_hosts]
    held = [Held(h, empty=True, idle=True) for h in empty]
    need = Need("job", demand, tasks, unplaced=tasks, mine={})
    plan = plan_capacity(quota, held, free, [need])
    assert set(plan.take) <= {h.name for h in free}
    assert len(held) + len(plan.take) <= max(quota, len(held))
    assert set(plan.give_back) <= {h.host.name for h in held}
    taken = [h for h in free if h.name in plan.take]
    after = [h for h in held if h.host.name not in plan.give_back]
    after += [Held(h, empty=True, idle=True) for h in taken]
    left = [h for h in free if h.name not in plan.take]
    placed = place(demand, range(tasks), [h.host for h in after], {})
    if placed.unplaced:
        assert plan.reasons or plan.give_back
    mine = Counter(p.machine for p in placed.placements.values())
    settled = [
        Held(
            replace(h.host, load=Load(memory_bytes=mine[h.host.name] * demand.memory_bytes)),
            empty=not mine[h.host.name],
            idle=not mine[h.host.name],
        )
        for h in after
    ]
    need = replace(need, unplaced=len(placed.unplaced), mine=dict(mine))
    second = plan_capacity(quota, settled, left, [need])
    if not placed.unplaced:
        assert second.take == ()


@given(hosts(), DEMANDS, st.integers(0, 10))
def test_room_counts_what_can_be_placed(region, demand, most):
    for host in region:
        assert room(demand, host, most) == len(place(demand, range(most), [host], {}).placements)
