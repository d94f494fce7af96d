"""Single steps of a search for placements: may it be, what does it change, do it.

Each step is an exchange of two objects between two containers; the second may be nothing. Functions
here are scalar loops over flat tables, which cost as much as an object has dimensions, whatever the
model's size. They run as they are on memoryviews (tens of thousands of steps per second), and
compiled by numba on numpy arrays (millions). Both do the same arithmetic in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.step_tables import StepTables

EPS = 1e-9
_DRAWN = 24
"""Containers that are looked at for each of them."""
_COSTLY = 8
"""Containers that are drawn to find one that costs much; an object of it comes."""


def fits(t: StepTables, m: int, i: int, j: int) -> bool:
    """Return whether a container has room if one object comes and another leaves."""
    for d in range(t.leaves.shape[0]):
        more, less = t.need[i, d], t.need[j, d]
        if not t.leaves[d]:
            more = 0.0 if t.origin[i] == m else more
            less = 0.0 if t.origin[j] == m else less
        if more > less and t.held[m, d] + more - less > t.room[m, d]:
            return False
    return True


def cost_with(t: StepTables, m: int, i: int, j: int) -> float:
    """Return what a container costs if one object comes and another leaves."""
    found = 0.0
    for k in range(t.over_of.shape[0]):
        d = t.over_of[k]
        over = t.used[m, d] + t.need[i, d] - t.need[j, d] - t.level[m, k]
        if over > 0.0:
            found += t.weight[m, k] * over
    for p in range(t.one_of.shape[0]):
        one, two = t.one_of[p], t.two_of[p]
        free = t.offers[m, one] - t.used[m, one] - t.need[i, one] + t.need[j, one]
        other = t.offers[m, two] - t.used[m, two] - t.need[i, two] + t.need[j, two]
        missing = t.ratio[p] * free - other
        if missing > 0.0:
            found += t.pair_weight[p] * missing
    return found


def away(t: StepTables, i: int, a: int, b: int) -> int:
    """Return 1 if a move leads away from where an object was, -1 if it leads back, else 0."""
    return int(b != t.origin[i]) - int(a != t.origin[i])


def move_price(t: StepTables, i: int, a: int, b: int) -> float:
    """Return the change of one object's price when it moves."""
    found: float = t.price[i] * away(t, i, a, b)
    if t.distance.shape[0]:
        found += t.distance[t.origin[i], b] - t.distance[t.origin[i], a]
    return found


def most_moved(t: StepTables, g: int, by: int, h: int, and_by: int) -> int:
    """Return the most moved objects of a group after two groups gain `by` and `and_by`."""
    one, two = t.moved[g] + by, t.moved[h] + and_by
    if g == h:
        one = two = one + and_by
    most = t.marks[0]
    while most > 0 and t.with_moved[most] <= int(t.moved[g] == most) + int(
        g != h and t.moved[h] == most
    ):
        most -= 1
    return int(max(most, one, two))


def bins_change(t: StepTables, i: int, j: int, a: int, b: int) -> float:
    """Return what goals about bins change by."""
    found = 0.0
    for k in range(t.bin_of.shape[0]):
        here, there, d = t.bin_at[k, a], t.bin_at[k, b], t.bin_of[k]
        more = t.need[i, d] - t.need[j, d]
        if here != there and more != 0.0:
            left, come = t.in_bin[k, here], t.in_bin[k, there]
            low, high = t.bin_level[k, here], t.bin_level[k, there]
            change = max(left - more - low, 0.0) - max(left - low, 0.0)
            change += max(come + more - high, 0.0) - max(come - high, 0.0)
            found += t.bin_weight[k] * change
    return found


def change_of(t: StepTables, i: int, j: int, a: int, b: int) -> float:
    """Return what the sum of the goals changes by if `i` goes from `a` to `b`, and `j` back."""
    found: float = cost_with(t, a, j, i) - t.cost[a] + cost_with(t, b, i, j) - t.cost[b]
    found += move_price(t, i, a, b)
    nothing = t.where.shape[0]
    if j < nothing:
        found += move_price(t, j, b, a)
    else:
        if t.number[a] == 1:
            found -= t.used_weight[a]
        if t.number[b] == 0:
            found += t.used_weight[b]
    if t.bin_of.shape[0]:
        found += bins_change(t, i, j, a, b)
    if t.group_weight > 0.0:
        h = t.group[j] if j < nothing else t.group[i]
        back = away(t, j, b, a) if j < nothing else 0
        most = most_moved(t, t.group[i], away(t, i, a, b), h, back)
        found += t.group_weight * (most - t.marks[0])
    return found


def may_go(t: StepTables, i: int, a: int, b: int) -> bool:
    """Return whether all rules but room let an object go."""
    if t.may_row[i] >= 0 and not t.may[t.may_row[i], b]:
        return False
    g, groups = t.group[i], t.most.shape[1]
    for s in range(t.most.shape[0]):
        here, there, wide = t.scope_at[s, a], t.scope_at[s, b], t.wide[s]
        if here == there:
            continue
        mine = t.first[s] + g * wide
        left, come = t.counted[mine + here], t.counted[mine + there]
        if come >= t.most[s, g]:
            return False
        least = t.least[s, g]
        if least > 0 and t.seen[s, g] - int(left == 1) + int(come == 0) < least:
            return False
        k = s * groups + g
        for e in range(t.needs_from[k], t.needs_from[k + 1]):
            if t.counted[t.first[s] + t.needs[e] * wide + there] == 0:
                return False
        for e in range(t.needed_from[k], t.needed_from[k + 1] if left == 1 else 0):
            if t.counted[t.first[s] + t.needed[e] * wide + here] > 0:
                return False
    return True


def count_group(t: StepTables, i: int, a: int, b: int) -> None:
    """Count an object of its group elsewhere."""
    g = t.group[i]
    for s in range(t.most.shape[0]):
        mine = t.first[s] + g * t.wide[s]
        here, there = mine + t.scope_at[s, a], mine + t.scope_at[s, b]
        t.counted[here] -= 1
        t.seen[s, g] -= int(t.counted[here] == 0)
        t.seen[s, g] += int(t.counted[there] == 0)
        t.counted[there] += 1


def may_exchange(t: StepTables, i: int, j: int, a: int, b: int) -> bool:
    """Return whether all rules but room let two objects change places, one after the other."""
    if not may_go(t, i, a, b):
        return False
    if j == t.where.shape[0]:
        return True
    count_group(t, i, a, b)
    found = may_go(t, j, b, a)
    count_group(t, i, b, a)
    return found


def relink(t: StepTables, i: int, a: int, b: int) -> None:
    """Take an object from the list of one container into that of another."""
    after, before, nothing = t.after[i], t.before[i], t.where.shape[0]
    if before == nothing:
        t.head[a] = after
    else:
        t.after[before] = after
    if after != nothing:
        t.before[after] = before
    first = t.head[b]
    t.head[b], t.after[i], t.before[i] = i, first, nothing
    if first != nothing:
        t.before[first] = i


def place(t: StepTables, i: int, a: int, b: int) -> None:
    """Bring one object elsewhere; the costs of both containers are left as they were."""
    for d in range(t.leaves.shape[0]):
        need = t.need[i, d]
        t.used[a, d] -= need
        t.used[b, d] += need
        if t.leaves[d] or t.origin[i] != a:
            t.held[a, d] -= need
        if t.leaves[d] or t.origin[i] != b:
            t.held[b, d] += need
    for k in range(t.bin_of.shape[0]):
        t.in_bin[k, t.bin_at[k, a]] -= t.need[i, t.bin_of[k]]
        t.in_bin[k, t.bin_at[k, b]] += t.need[i, t.bin_of[k]]
    t.number[a] -= 1
    t.number[b] += 1
    t.where[i] = b
    relink(t, i, a, b)
    count_group(t, i, a, b)
    by = away(t, i, a, b)
    if by != 0:
        t.marks[0] = most_moved(t, t.group[i], by, t.group[i], 0)
        t.with_moved[t.moved[t.group[i]]] -= 1
        t.moved[t.group[i]] += by
        t.with_moved[t.moved[t.group[i]]] += 1


def exchange(t: StepTables, i: int, j: int, a: int, b: int) -> None:
    """Bring one object from `a` to `b`, and the other one back."""
    place(t, i, a, b)
    if j < t.where.shape[0]:
        place(t, j, b, a)
    t.cost[a] = cost_with(t, a, t.where.shape[0], t.where.shape[0])
    t.cost[b] = cost_with(t, b, t.where.shape[0], t.where.shape[0])


def drawn(t: StepTables, lots: Ints) -> int:
    """Return the next of the drawn containers."""
    t.marks[2] = (t.marks[2] + 1) % len(lots)
    return int(lots[t.marks[2]])


def member(t: StepTables, m: int, lots: Ints) -> int:
    """Return an object of a container, by chance; N if it has none."""
    found = t.head[m]
    for _ in range(drawn(t, lots) % max(1, t.number[m])):
        found = t.after[found]
    return int(found)


def costly(t: StepTables, lots: Ints) -> int:
    """Return an object of the costliest of some containers, by chance; N if it has none."""
    found = drawn(t, lots)
    for _ in range(_COSTLY):
        m = drawn(t, lots)
        found = m if t.cost[m] > t.cost[found] else found
    return member(t, found, lots)


def refuge(t: StepTables, j: int, b: int, a: int, lots: Ints) -> int:
    """Return where an object may go that leaves `b`, the cheapest of some containers, or -1.

    Those are `a`, where the object was at first, and some by chance.
    """
    nothing, found, least = t.where.shape[0], -1, 0.0
    for k in range(_DRAWN):
        c = drawn(t, lots) if k > 1 else t.origin[j] if k else a
        if c != b and fits(t, c, j, nothing):
            change = change_of(t, j, nothing, b, c)
            if (found < 0 or change < least) and may_go(t, j, b, c):
                found, least = c, change
    return found


def overfull(t: StepTables, m: int) -> bool:
    """Return whether a container has less room than its objects hold."""
    lacks = 0
    for d in range(t.leaves.shape[0]):
        lacks += int(t.held[m, d] > t.room[m, d])
    return lacks > 0


def eject(t: StepTables, i: int, b: int, lots: Ints, bar: float) -> float:
    """Bring `i` to `b`, which may be too full then; others leave it until that costs too much more.

    Others go to where there is room, which may be where `i` was. Return what all of it changed;
    infinite if that is above the bar, and all are back.
    """
    a, nothing, length = t.where[i], t.where.shape[0], 0
    j, total = member(t, b, lots), change_of(t, i, nothing, a, b)
    exchange(t, i, nothing, a, b)
    for _ in range(t.number[b]):
        j = t.head[b] if j == nothing else j
        if length == t.chain.shape[0] or total - t.cost[b] > bar:
            break
        after, c = t.after[j], -1 if j == i else refuge(t, j, b, a, lots)
        if c >= 0:
            change = change_of(t, j, nothing, b, c)
            if change < 0.0 or overfull(t, b):
                total += change
                exchange(t, j, nothing, b, c)
                t.chain[length, 0], t.chain[length, 1] = j, c
                length += 1
        j = after
    if total <= bar and not overfull(t, b):
        return total
    for k in range(length - 1, -1, -1):
        exchange(t, t.chain[k, 0], nothing, t.chain[k, 1], b)
    exchange(t, i, nothing, b, a)
    return np.inf


def keep(t: StepTables) -> None:
    """Copy the present placement if it is the best one."""
    if t.marks[1]:
        for i in range(t.where.shape[0]):
            t.best[i] = t.where[i]


def try_chain(t: StepTables, i: int, b: int, lots: Ints, bar: float) -> float:
    """Bring an object to a container that others leave first; return what that changed, or 0."""
    if i == t.where.shape[0] or t.where[i] == b or not may_go(t, i, t.where[i], b):
        return 0.0
    for d in range(t.leaves.shape[0]):
        if t.need[i, d] > t.room[b, d]:
            return 0.0
    keep(t)
    change = eject(t, i, b, lots, bar)
    return 0.0 if change == np.inf else change


def try_exchange(t: StepTables, i: int, j: int, b: int, bar: float) -> float:
    """Do a step if it is allowed and within the bar; return what that changed, or 0."""
    a = t.where[i]
    if a == b or not fits(t, b, i, j) or not fits(t, a, j, i):
        return 0.0
    change = change_of(t, i, j, a, b)
    if change > bar or not may_exchange(t, i, j, a, b):
        return 0.0
    if change > 0.0:
        keep(t)
    exchange(t, i, j, a, b)
    return change


def walk(t: StepTables, firsts: Ints, seconds: Ints, lots: Ints, bars: Floats) -> None:
    """Try steps, and do those that are allowed and change the sum by their bar at most.

    `seconds` are objects for an exchange, N + the container to which the first may go, or
    N + M + one that others may leave for it, to some of `lots`.
    """
    nothing, containers = t.where.shape[0], t.number.shape[0]
    for s in range(len(firsts)):
        i, j = firsts[s], seconds[s]
        if j >= nothing + containers:
            change = try_chain(t, costly(t, lots), j - nothing - containers, lots, bars[s])
        else:
            b = t.where[j] if j < nothing else j - nothing
            change = try_exchange(t, i, min(j, nothing), b, bars[s])
        t.sums[0] += change
        if change > 0.0:
            t.marks[1] = 0
        if t.sums[0] < t.sums[1] - EPS:
            t.sums[1] = t.sums[0]
            t.marks[1] = 1


Walk = Callable[[StepTables, Any, Any, Any, Any], None]


_COMPILED = (
    *(fits, cost_with, away, move_price, most_moved, bins_change, change_of, may_go, count_group),
    *(
        may_exchange,
        relink,
        place,
        exchange,
        drawn,
        member,
        costly,
        refuge,
        overfull,
        eject,
        keep,
        try_chain,
        try_exchange,
        walk,
    ),
)
"""Each after those that it calls."""


@functools.cache
def compiled() -> Walk | None:
    """Return `walk` compiled, which takes seconds the first time; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    njit: Any = numba.njit
    # Counting references to tables takes three quarters of the time, calls most of the rest.
    faster = {"_nrt": False, "error_model": "numpy", "forceinline": True}
    names: dict[str, Any] = dict(globals())
    for each in _COMPILED:
        inner = FunctionType(each.__code__, names, each.__name__)
        names[each.__name__] = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **faster)(inner)
    outer = FunctionType(walk.__code__, names, walk.__name__)
    try:
        return cast(Walk, njit(cache=True, **faster)(outer))
    except RuntimeError:  # no folder can be written to
        return cast(Walk, njit(**faster)(outer))
