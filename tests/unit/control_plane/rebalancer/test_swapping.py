"""Which machines entitlements exchange, in regions small enough to read."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from control_plane.api.rebalancing import SwapView
from control_plane.rebalancer.core.model import Effort, PoweredPlace, RegionModel
from control_plane.rebalancer.core.solving import solve
from tests.rebalancer_models import a_model
from tests.unit.control_plane.rebalancer.test_solving import a_region

pytestmark = pytest.mark.behaviour("RE3", "WH8")


def swapped(model: RegionModel, most: int = 5) -> list[SwapView]:
    effort = Effort(steps=500, swaps=most, with_bound=False)
    return solve(model, effort, clock=lambda: 0.0).swaps


def mixed(*, loads: list[float] | None = None, **changes: object) -> RegionModel:
    """Return two entitlements of three machines. Each has one machine of the other's type."""
    tasks = [[load] for load in loads or [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    model = a_region(tasks, pools=[0, 0, 0, 1, 1, 1])
    given: dict[str, object] = {"machine_class": [0, 0, 1, 1, 1, 0], "swappable": bytes([1] * 6)}
    return replace(model, **(given | changes))


def test_two_entitlements_exchange_what_each_has_one_of() -> None:
    (step,) = swapped(mixed())

    assert {step.one, step.two} == {"m2", "m5"}
    assert step.gain > step.price
    assert step.why == (
        "pool0 has 1 machines of the type of m2; pool1 has 1 machines of the type of m5"
    )


def test_none_is_exchanged_where_that_is_not_wanted_or_not_possible() -> None:
    full = [9.0] * 6
    cases = {
        "not asked for": swapped(mixed(), most=0),
        "not allowed": swapped(mixed(swappable=bytes(6))),
        "no room for tasks": swapped(mixed(room_cpu=[0] * 6, loads=full)),
        "of one type": swapped(mixed(machine_class=[0] * 6)),
        "another size": swapped(
            mixed(sizes=[(s, 0.0, 0.0) for s in (10.0, 10.0, 90.0, 90.0, 90.0, 10.0)])
        ),
        "not admitted": swapped(mixed(admissions=[bytes([1, 1, 1, 1, 1, 0])])),
    }

    assert {case: steps for case, steps in cases.items() if steps} == {}


@pytest.mark.behaviour("RE6")
def test_a_busy_entitlement_leaves_a_place_without_power_for_an_idle_one() -> None:
    """All of its machines are in this place, so no move of a task relieves it."""
    model = a_region([[4.0], [], [0.5], []], pools=[0, 0, 1, 1])
    model = replace(
        model,
        machine_class=[0] * 4,
        swappable=bytes([1] * 4),
        places=[PoweredPlace("dc1/msb1", 210.0, 200.0, 100.0)],
        places_of=[[0, 0, -1, -1]],
        watts_per_rru=[10.0] * 4,
    )
    (step,) = swapped(model, most=1)

    assert step.one in {"m0", "m1"}
    assert step.two in {"m2", "m3"}
    assert step.why == "pool0 is busy in a place without power"


def two_of_each(*, free_cores: int) -> RegionModel:
    """Return two entitlements that gain from two exchanges: each then has one class instead of two.

    The machines of the first one have no room for the tasks of others, except `free_cores` on m0.
    """
    model = a_region([[1.0]] * 8, pools=[0, 0, 0, 0, 1, 1, 1, 1])
    million = 1_000_000
    return replace(
        model,
        machine_class=[0, 0, 1, 1, 1, 1, 0, 0],
        swappable=bytes([0, 0, 1, 1] * 2),
        room_cpu=[free_cores * million, 0, 0, 0, *[9 * million] * 4],
    )


@pytest.mark.behaviour("BUG-CP157")
def test_an_exchange_counts_no_room_on_machines_that_an_earlier_one_gives_away() -> None:
    """One exchange alone changes no number of classes, so it is not planned either."""
    steps = swapped(two_of_each(free_cores=2))

    assert [step.pool_one for step in steps] == ["pool0", "pool0"]
    assert {step.one for step in steps} == {"m2", "m3"}
    assert [step.gain for step in steps] == [0.0, 1.0]
    assert swapped(two_of_each(free_cores=1)) == []


@pytest.mark.behaviour("BUG-CP158")
def test_the_gain_of_an_exchange_counts_the_classes_that_it_adds() -> None:
    model = a_region([[4.0], [], [0.5], []], pools=[0, 0, 1, 1])
    model = replace(
        model,
        machine_class=[0, 0, 1, 1],
        swappable=bytes([1] * 4),
        places=[PoweredPlace("dc1/msb1", 210.0, 200.0, 100.0)],
        places_of=[[0, 0, -1, -1]],
        watts_per_rru=[10.0] * 4,
    )
    (step,) = swapped(model, most=1)

    assert step.gain == model.weights.power - 2 * model.weights.fragment


@pytest.mark.parametrize("seed", range(12))
def test_entitlements_keep_their_number_of_machines_and_most_of_their_capacity(seed: int) -> None:
    made = random.Random(seed)
    model = a_model(seed, 24, 200, pools=3)
    kinds = [int(size[0]) for size in model.sizes]
    model = replace(model, machine_class=kinds, swappable=bytes(made.random() < 0.8 for _ in kinds))
    number = {name: m for m, name in enumerate(model.machines)}
    pools, types = list(model.pool_of), [set(), set(), set()]
    for pool, kind in zip(pools, kinds, strict=True):
        types[pool].add(kind)
    before = [sum(model.sizes[m][0] for m in range(24) if pools[m] == p) for p in range(3)]
    seen = set()
    for step in swapped(model):
        one, two = number[step.one], number[step.two]
        assert not seen & {one, two}
        assert pools[one] != pools[two]
        assert model.swappable[one]
        assert model.swappable[two]
        seen |= {one, two}
        pools[one], pools[two] = pools[two], pools[one]
    after = [sum(model.sizes[m][0] for m in range(24) if pools[m] == p) for p in range(3)]
    had = sum(map(len, types))
    now = len({(pool, kind) for pool, kind in zip(pools, kinds, strict=True)})

    assert [pools.count(p) for p in range(3)] == [model.pool_of.count(p) for p in range(3)]
    assert now <= had
    if not seen:
        assert after == before
