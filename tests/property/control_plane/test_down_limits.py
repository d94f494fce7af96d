"""No part of a region loses more machines than its share before its delay is over."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api import Location
from control_plane.health.core.parts import Level, Part, Parts, Standing
from control_plane.health.core.verdict import Brakes, verdict

DOWN_AFTER_S, WORRY_S, WINDOW_S = 10.0, 5.0, 60.0
BRAKES = Brakes(
    share=0.4,
    delays_s={Level.RACK: 30, Level.MSB: 30, Level.DATACENTER: 300, Level.REGION: 300},
)
PLACES = st.builds(
    Location,
    datacenter=st.sampled_from(["dc1", "dc2"]),
    msb=st.sampled_from(["a", "b"]),
    rack=st.sampled_from(["r1", "r2"]),
)
MACHINES = st.lists(
    st.tuples(PLACES, st.one_of(st.none(), st.floats(0, 200), st.just(50.0))), max_size=40
)


@pytest.mark.behaviour("BUG-CP16", "F-51")
@settings(deadline=None, max_examples=100)
@given(MACHINES)
def test_a_brake_limits_machines_down_in_a_part_before_its_delay(machines):
    """`None` marks a machine that always answers. The others become silent for good at a time."""
    parts = Parts()
    racks = [parts.rack(place) for place, _ in machines]
    standings = [Standing.WELL for _ in machines]
    for rack in racks:
        rack.count_change(None, Standing.WELL)
    total = {part: part.machines for rack in racks for part in rack.path}
    fallen: dict[Part, list[tuple[float, int]]] = {part: [] for part in total}
    turn = itertools.count()
    queue = [
        (since + WORRY_S, next(turn), number)
        for number, (_, since) in enumerate(machines)
        if since is not None
    ]
    heapq.heapify(queue)
    while queue:
        now, _, number = heapq.heappop(queue)
        rack, silent_s = racks[number], now - (machines[number][1] or 0.0)
        again = 1.0
        if standings[number] is Standing.WELL:
            set_standing(racks, standings, number, Standing.LOST)
            again = DOWN_AFTER_S - WORRY_S
        elif verdict(rack, silent_s, BRAKES) is None:
            for part in rack.path:
                fallen[part].append((now, number))
            check(rack, silent_s, now, fallen, total)
            continue
        heapq.heappush(queue, (now + again, next(turn), number))
    assert sum(len(found) for part, found in fallen.items() if part.level is Level.REGION) == sum(
        since is not None for _, since in machines
    )


def set_standing(
    racks: list[Part], standings: list[Standing], number: int, standing: Standing
) -> None:
    racks[number].count_change(standings[number], standing)
    standings[number] = standing


def check(
    rack: Part,
    silent_s: float,
    now: float,
    fallen: dict[Part, list[tuple[float, int]]],
    total: dict[Part, int],
) -> None:
    """Assert that a window's losses, without those of the worst part below, are within
    the share.
    """
    for part in rack.path:
        if silent_s >= BRAKES.delays_s[part.level]:
            continue
        lately = sum(now - at < WINDOW_S for at, _ in fallen[part])
        below = [child for child in part.below.values() if total[child]]
        if len(below) == 1:
            continue  # the part below has the same machines
        if below:
            worst = max(below, key=lambda child: len(fallen[child]))
            lately -= sum(now - at < WINDOW_S for at, _ in fallen[worst])
        assert lately <= max(1, BRAKES.share * total[part])
