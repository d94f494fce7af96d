"""For every order of bins, the next bin is a best one by the plain rule."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.allocator.core.bin_order import (
    EvenOrder,
    HeapOrder,
    LazyOrder,
    bin_order,
    first_bins,
)
from control_plane.allocator.core.fine_bins import FineBins
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.partition import Partition
from control_plane.allocator.core.preferences import DEFAULT, Ranking
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.broker.core.capacity import Capacity, Place

MSBS = [(f"dc{dc}/msb{msb}", f"dc{dc}") for dc in range(3) for msb in range(4)]
WHERE = st.lists(st.sampled_from(MSBS), unique=True, max_size=12)
THREE = (*DEFAULT, Preference(property=Property.REGION, strategy=Strategy.EVEN))


def a_machine(bins) -> Machine:
    msb, dc = bins[:2]
    return Machine("m", Capacity("small", 1.0, 1.0, 1), Place("r", dc, msb, "", ""), "")


def partition(bins) -> Partition:
    made = Partition()
    made.update((b, ()) for b in bins)
    return made


@given(
    WHERE,
    WHERE,
    st.sampled_from([DEFAULT, THREE]),
    st.integers(0, 2**32),
    st.integers(0, 1),
    st.lists(st.sampled_from(MSBS), max_size=4),
    st.lists(st.sampled_from(["placed", "placed", "drop", "grow"]), max_size=60),
)
def test_the_best_bins_are_next(own, free, preferences, begin, growing, before, outcomes):
    ranking = Ranking(preferences)
    last = () if preferences is DEFAULT else ("r",)
    own, free = [(*b, *last) for b in own], [(*b, *last) for b in free]
    tasks = Counter[tuple[str, ...]]()
    for bins in before:
        ranking.count_task(a_machine(bins))
        tasks.update([bins[0], bins[1]])
    order = bin_order(ranking, partition(own), partition(free), begin, growing=growing)
    even = not before and preferences is DEFAULT and (growing or not free)
    assert isinstance(order, EvenOrder if even else HeapOrder)
    left = dict.fromkeys(free, growing) | dict.fromkeys(own, 0)

    def score(bins):
        return tasks[bins[0]], tasks[bins[1]], left[bins]

    for outcome in outcomes:
        if not left:
            break
        assert order.bins is not None
        assert left[order.bins] == order.growing
        assert score(order.bins) == min(map(score, left))
        bins = order.bins
        if outcome == "placed":
            ranking.count_task_in(bins, a_machine(bins))
            tasks.update([bins[0], bins[1]])
            left[bins] = 0
            order.placed()
        elif outcome == "grow" and not order.growing:
            left[bins] = 1
            order.take_later()
        else:
            del left[bins]
            order.drop()
    if not left:
        assert order.bins is None


@pytest.mark.behaviour("AL7", "AL8")
@given(WHERE, WHERE, st.integers(0, 2**32), st.integers(0, 1))
def test_the_first_bins_are_known_before(own, free, begin, growing):
    """The order announces the same first bins that it returns while each of them has room."""
    mine, others, ranking = partition(own), partition(free), Ranking(DEFAULT)
    known = first_bins(ranking, mine, others, begin, growing=growing)
    order = bin_order(ranking, mine, others, begin, growing=growing)
    if not growing and free:
        assert not known
        return
    for bins in known:
        assert (order.bins, order.growing) == (bins, 0)
        ranking.count_task_in(bins, a_machine(bins))
        order.placed()
    assert order.growing or order.bins is None or len(known) == len(own)


ZONES, RACKS = ("", "a", "b"), ("r1", "r2", "r3")
KINDS = st.tuples(st.sampled_from(ZONES), st.sampled_from(RACKS), st.sampled_from(["x", "y"]))
PREFERENCES = st.one_of(
    st.builds(
        Preference,
        property=st.sampled_from(["label.zone", "rack", "gpu_type", "msb", "gpus"]),
        weights=st.dictionaries(
            st.sampled_from(["a", "b", "r1", "x", "dc1/m"]), st.integers(1, 1000), max_size=3
        ),
    ),
    st.builds(
        Preference,
        property=st.sampled_from(["label.zone", "rack", "gpu_type"]),
        strategy=st.just(Strategy.PACK),
    ),
    st.builds(
        Preference,
        property=st.sampled_from(["label.zone", "rack", "gpu_type"]),
        strategy=st.sampled_from([Strategy.PREFER, Strategy.AVOID]),
        values=st.lists(st.sampled_from(["a", "b", "r2", "y"]), min_size=1, max_size=3),
    ),
)


def one_of(kind: tuple[str, str, str]) -> Machine:
    zone, rack, gpu = kind
    labels = (("zone", zone),) if zone else ()
    capacity = Capacity("small", 1.0, 1.0, 1, len(gpu), gpu_type=gpu, labels=labels)
    return Machine("m", capacity, Place("r", "dc1", "dc1/m", "dc1/m/w", f"dc1/m/w/{rack}"), "")


@pytest.mark.behaviour("AL7")
@given(
    st.lists(KINDS, unique=True, min_size=1, max_size=12),
    st.lists(PREFERENCES, min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["placed", "placed", "placed", "drop"]), max_size=40),
)
def test_the_best_bins_are_next_for_every_preference(kinds, preferences, begin, outcomes):
    """Covers labels, sizes and weights. No remaining bin has a better score than the next one."""
    ranking = Ranking(preferences)
    samples = {ranking.common_bins(one_of(kind)): one_of(kind) for kind in kinds}
    own: dict[tuple[str, ...], tuple[()]] = dict.fromkeys(samples, ())
    order = bin_order(ranking, own, {}, begin, growing=1)
    left = set(samples)
    for outcome in outcomes:
        if not left:
            break
        bins = order.bins
        assert bins in left
        assert ranking.score(bins) == min(map(ranking.score, left))
        if outcome == "placed":
            ranking.count_task_in(bins, samples[bins])
            order.placed()
        else:
            left.remove(bins)
            order.drop()
    if not left:
        assert order.bins is None


RACKED = st.tuples(st.sampled_from(ZONES), st.sampled_from("xy"), st.sampled_from(RACKS))
FINE = (("rack",), ("rack", "msb", "datacenter"), ("msb", "rack"), ("label.zone", "msb"))


def in_rack(kind: tuple[str, str, str]) -> Machine:
    zone, msb, rack = kind
    place = Place("r", "dc1", f"dc1/{msb}", f"dc1/{msb}/w", f"dc1/{msb}/w/{rack}")
    labels = (("zone", zone),) if zone else ()
    return Machine("m", Capacity("small", 1.0, 1.0, 1, labels=labels), place, "")


@pytest.mark.behaviour("BUG-AL27")
@given(
    st.lists(RACKED, unique=True, max_size=12),
    st.lists(RACKED, unique=True, max_size=12),
    st.sampled_from(FINE),
    st.integers(0, 2**32),
    st.integers(0, 1),
    st.lists(st.sampled_from(["placed", "placed", "drop", "grow"]), max_size=80),
)
def test_the_best_bins_are_next_although_few_are_examined(
    own, free, properties, begin, growing, outcomes
):
    """Racks, rows and labels are returned one after the other, in a correct order."""
    ranking = Ranking([Preference(property=p) for p in properties])
    samples = {ranking.common_bins(in_rack(k)): in_rack(k) for k in (*own, *free)}
    pools = [FineBins(ranking, 0), FineBins(ranking, 0)]
    for pool, kinds in zip(pools, (own, free), strict=True):
        made_of: dict[tuple[str, ...], list[dict]] = {}
        for kind in kinds:
            bins = ranking.common_bins(in_rack(kind))
            made_of.setdefault(ranking.group(bins), [{}])[0][bins] = ()
        pool.fill(made_of, None)
    order = bin_order(ranking, *pools, begin, growing=growing)
    assert isinstance(order, LazyOrder)
    left = dict.fromkeys(pools[1], growing) | dict.fromkeys(pools[0], 0)
    for outcome in outcomes:
        if not left:
            break
        bins = order.bins
        assert bins is not None
        assert left[bins] == order.growing
        assert (ranking.score(bins), left[bins]) == min((ranking.score(b), left[b]) for b in left)
        if outcome == "placed":
            ranking.count_task_in(bins, samples[bins])
            left[bins] = 0
            order.placed()
        elif outcome == "grow" and not order.growing:
            left[bins] = 1
            order.take_later()
        else:
            del left[bins]
            order.drop()
    if not left:
        assert order.bins is None
