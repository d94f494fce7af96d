"""Single steps of a search for placements: whether a step is allowed, what it changes, doing it.

A step exchanges object `i` in container `a` for object `j` in container `b`; `j` may be nothing
(object N of `StepTables`). Other short names: `d` a dimension, `g` and `h` groups, `s` a scope, `m`
and `c` containers, `t` the tables. The functions are scalar loops over flat tables, so a step costs
the same in models of any size. They run interpreted on memoryviews (tens of thousands of steps per
second), or compiled by numba on numpy arrays (millions). Both compute the same in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.step_tables import (
    BEST_CHANGE,
    CHANGE,
    IS_BEST,
    MOST_MOVED,
    NEXT_DRAW,
    StepTables,
)

EPS = 1e-9
_REFUGES = 24
"""Containers that are checked for an object that must leave another one."""
_COSTLY = 8
"""Containers that are compared; an object of the costliest one starts a chain."""


def has_room(t: StepTables, m: int, i: int, j: int) -> bool:
    """Return whether container `m` has room if `i` comes and `j` leaves."""
    for d in range(t.frees_at_once.shape[0]):
        more, less = t.need[i, d], t.need[j, d]
        if not t.frees_at_once[d]:
            more = 0.0 if t.origin[i] == m else more
            less = 0.0 if t.origin[j] == m else less
        if more > less and t.held[m, d] + more - less > t.room[m, d]:
            return False
    return True


def cost_after(t: StepTables, m: int, i: int, j: int) -> float:
    """Return the cost of container `m` if `i` comes and `j` leaves."""
    cost = 0.0
    for k in range(t.level_dimension.shape[0]):
        d = t.level_dimension[k]
        over = t.used[m, d] + t.need[i, d] - t.need[j, d] - t.level[m, k]
        if over > 0.0:
            cost += t.weight[m, k] * over
    for p in range(t.ratio_dimension.shape[0]):
        d, e = t.ratio_dimension[p], t.ratio_other[p]
        free = t.offers[m, d] - t.used[m, d] - t.need[i, d] + t.need[j, d]
        other_free = t.offers[m, e] - t.used[m, e] - t.need[i, e] + t.need[j, e]
        missing = t.ratio[p] * free - other_free
        if missing > 0.0:
            cost += t.ratio_weight[p] * missing
    return cost


def moved_change(t: StepTables, i: int, a: int, b: int) -> int:
    """Return 1 if a move leads away from the origin of `i`, -1 if it leads back, else 0."""
    return int(b != t.origin[i]) - int(a != t.origin[i])


def move_price(t: StepTables, i: int, a: int, b: int) -> float:
    """Return the change of the price of moves if `i` goes from `a` to `b`."""
    price: float = t.price[i] * moved_change(t, i, a, b)
    if t.distance.shape[0]:
        price += t.distance[t.origin[i], b] - t.distance[t.origin[i], a]
    return price


def most_moved(t: StepTables, g: int, by: int, h: int, and_by: int) -> int:
    """Return the most moved objects of any group after `g` gains `by` and `h` gains `and_by`."""
    of_g, of_h = t.moved[g] + by, t.moved[h] + and_by
    if g == h:
        of_g = of_h = of_g + and_by
    most = t.registers[MOST_MOVED]
    while most > 0 and t.groups_with_moved[most] <= int(t.moved[g] == most) + int(
        g != h and t.moved[h] == most
    ):
        most -= 1
    return int(max(most, of_g, of_h))


def bin_cost_change(t: StepTables, i: int, j: int, a: int, b: int) -> float:
    """Return the change of the goals about bins."""
    change = 0.0
    for k in range(t.bin_dimension.shape[0]):
        left, entered, d = t.goal_bin[k, a], t.goal_bin[k, b], t.bin_dimension[k]
        more = t.need[i, d] - t.need[j, d]
        if left != entered and more != 0.0:
            used_a, used_b = t.bin_used[k, left], t.bin_used[k, entered]
            level_a, level_b = t.bin_level[k, left], t.bin_level[k, entered]
            over = max(used_a - more - level_a, 0.0) - max(used_a - level_a, 0.0)
            over += max(used_b + more - level_b, 0.0) - max(used_b - level_b, 0.0)
            change += t.bin_weight[k] * over
    return change


def cost_change(t: StepTables, i: int, j: int, a: int, b: int) -> float:
    """Return the change of the sum of the goals if `i` goes from `a` to `b`, and `j` back."""
    change: float = cost_after(t, a, j, i) - t.cost[a] + cost_after(t, b, i, j) - t.cost[b]
    change += move_price(t, i, a, b)
    nothing = t.where.shape[0]
    if j < nothing:
        change += move_price(t, j, b, a)
    else:
        if t.objects_in[a] == 1:
            change -= t.used_weight[a]
        if t.objects_in[b] == 0:
            change += t.used_weight[b]
    if t.bin_dimension.shape[0]:
        change += bin_cost_change(t, i, j, a, b)
    if t.group_weight > 0.0:
        h = t.group[j] if j < nothing else t.group[i]
        back = moved_change(t, j, b, a) if j < nothing else 0
        most = most_moved(t, t.group[i], moved_change(t, i, a, b), h, back)
        change += t.group_weight * (most - t.registers[MOST_MOVED])
    return change


def may_move(t: StepTables, i: int, a: int, b: int) -> bool:
    """Return whether all constraints except room permit that `i` goes from `a` to `b`."""
    if t.may_row[i] >= 0 and not t.may[t.may_row[i], b]:
        return False
    g, groups = t.group[i], t.most.shape[1]
    for s in range(t.most.shape[0]):
        left, entered, bins = t.scope_bin[s, a], t.scope_bin[s, b], t.bins_in_scope[s]
        if left == entered:
            continue
        row = t.counts_from[s] + g * bins
        in_left, in_entered = t.group_counts[row + left], t.group_counts[row + entered]
        if in_entered >= t.most[s, g]:
            return False
        least = t.least[s, g]
        if least > 0 and t.bins_with_group[s, g] - int(in_left == 1) + int(in_entered == 0) < least:
            return False
        k = s * groups + g
        for e in range(t.needs_from[k], t.needs_from[k + 1]):
            if t.group_counts[t.counts_from[s] + t.needs[e] * bins + entered] == 0:
                return False
        for e in range(t.needed_from[k], t.needed_from[k + 1] if in_left == 1 else 0):
            if t.group_counts[t.counts_from[s] + t.needed[e] * bins + left] > 0:
                return False
    return True


def count_group(t: StepTables, i: int, a: int, b: int) -> None:
    """Update the counts of groups after `i` went from `a` to `b`."""
    g = t.group[i]
    for s in range(t.most.shape[0]):
        row = t.counts_from[s] + g * t.bins_in_scope[s]
        left, entered = row + t.scope_bin[s, a], row + t.scope_bin[s, b]
        t.group_counts[left] -= 1
        t.bins_with_group[s, g] -= int(t.group_counts[left] == 0)
        t.bins_with_group[s, g] += int(t.group_counts[entered] == 0)
        t.group_counts[entered] += 1


def may_exchange(t: StepTables, i: int, j: int, a: int, b: int) -> bool:
    """Return whether all constraints except room permit that `i` goes to `b`, then `j` to `a`."""
    if not may_move(t, i, a, b):
        return False
    if j == t.where.shape[0]:
        return True
    count_group(t, i, a, b)
    is_allowed = may_move(t, j, b, a)
    count_group(t, i, b, a)
    return is_allowed


def relink(t: StepTables, i: int, a: int, b: int) -> None:
    """Move an object from the linked list of one container to that of another."""
    following, previous, nothing = t.next_object[i], t.previous_object[i], t.where.shape[0]
    if previous == nothing:
        t.first_object[a] = following
    else:
        t.next_object[previous] = following
    if following != nothing:
        t.previous_object[following] = previous
    first = t.first_object[b]
    t.first_object[b], t.next_object[i], t.previous_object[i] = i, first, nothing
    if first != nothing:
        t.previous_object[first] = i


def move_object(t: StepTables, i: int, a: int, b: int) -> None:
    """Move one object, without an update of the costs of both containers."""
    for d in range(t.frees_at_once.shape[0]):
        need = t.need[i, d]
        t.used[a, d] -= need
        t.used[b, d] += need
        if t.frees_at_once[d] or t.origin[i] != a:
            t.held[a, d] -= need
        if t.frees_at_once[d] or t.origin[i] != b:
            t.held[b, d] += need
    for k in range(t.bin_dimension.shape[0]):
        t.bin_used[k, t.goal_bin[k, a]] -= t.need[i, t.bin_dimension[k]]
        t.bin_used[k, t.goal_bin[k, b]] += t.need[i, t.bin_dimension[k]]
    t.objects_in[a] -= 1
    t.objects_in[b] += 1
    t.where[i] = b
    relink(t, i, a, b)
    count_group(t, i, a, b)
    by = moved_change(t, i, a, b)
    if by != 0:
        t.registers[MOST_MOVED] = most_moved(t, t.group[i], by, t.group[i], 0)
        t.groups_with_moved[t.moved[t.group[i]]] -= 1
        t.moved[t.group[i]] += by
        t.groups_with_moved[t.moved[t.group[i]]] += 1


def exchange(t: StepTables, i: int, j: int, a: int, b: int) -> None:
    """Move `i` from `a` to `b`, and `j` back."""
    move_object(t, i, a, b)
    if j < t.where.shape[0]:
        move_object(t, j, b, a)
    t.cost[a] = cost_after(t, a, t.where.shape[0], t.where.shape[0])
    t.cost[b] = cost_after(t, b, t.where.shape[0], t.where.shape[0])


def draw_container(t: StepTables, draws: Ints) -> int:
    """Return the next of the random containers `draws`."""
    t.registers[NEXT_DRAW] = (t.registers[NEXT_DRAW] + 1) % len(draws)
    return int(draws[t.registers[NEXT_DRAW]])


def draw_object(t: StepTables, m: int, draws: Ints) -> int:
    """Return a random object of a container; N if it has none."""
    i = t.first_object[m]
    for _ in range(draw_container(t, draws) % max(1, t.objects_in[m])):
        i = t.next_object[i]
    return int(i)


def draw_costly_object(t: StepTables, draws: Ints) -> int:
    """Return a random object of the costliest of some containers; N if it has none."""
    costliest = draw_container(t, draws)
    for _ in range(_COSTLY):
        m = draw_container(t, draws)
        costliest = m if t.cost[m] > t.cost[costliest] else costliest
    return draw_object(t, costliest, draws)


def cheapest_refuge(t: StepTables, j: int, b: int, a: int, draws: Ints) -> int:
    """Return the cheapest of some containers to which `j` may leave `b`; -1: there is none.

    The candidates are `a`, the origin of `j`, and random containers.
    """
    nothing, cheapest, least = t.where.shape[0], -1, 0.0
    for k in range(_REFUGES):
        c = draw_container(t, draws) if k > 1 else t.origin[j] if k else a
        if c != b and has_room(t, c, j, nothing):
            change = cost_change(t, j, nothing, b, c)
            if (cheapest < 0 or change < least) and may_move(t, j, b, c):
                cheapest, least = c, change
    return cheapest


def is_overfull(t: StepTables, m: int) -> bool:
    """Return whether the objects of a container hold more than its room."""
    lacks = 0
    for d in range(t.frees_at_once.shape[0]):
        lacks += int(t.held[m, d] > t.room[m, d])
    return lacks > 0


def insert_ejecting(t: StepTables, i: int, b: int, draws: Ints, max_change: float) -> float:
    """Move `i` to `b`, and eject other objects from `b` until it has room and gains nothing more.

    Ejected objects go where there is room, for example where `i` was. Return the change of the sum
    of the goals. Infinity: it was above `max_change`, and all moves were undone.
    """
    a, nothing, length = t.where[i], t.where.shape[0], 0
    j, total = draw_object(t, b, draws), cost_change(t, i, nothing, a, b)
    exchange(t, i, nothing, a, b)
    for _ in range(t.objects_in[b]):
        j = t.first_object[b] if j == nothing else j
        if length == t.ejected.shape[0] or total - t.cost[b] > max_change:
            break
        following, c = t.next_object[j], -1 if j == i else cheapest_refuge(t, j, b, a, draws)
        if c >= 0:
            change = cost_change(t, j, nothing, b, c)
            if change < 0.0 or is_overfull(t, b):
                total += change
                exchange(t, j, nothing, b, c)
                t.ejected[length, 0], t.ejected[length, 1] = j, c
                length += 1
        j = following
    if total <= max_change and not is_overfull(t, b):
        return total
    for k in range(length - 1, -1, -1):
        exchange(t, t.ejected[k, 0], nothing, t.ejected[k, 1], b)
    exchange(t, i, nothing, b, a)
    return np.inf


def save_best(t: StepTables) -> None:
    """Save the present placement if it is the best one."""
    if t.registers[IS_BEST]:
        for i in range(t.where.shape[0]):
            t.best[i] = t.where[i]


def try_chain(t: StepTables, i: int, b: int, draws: Ints, max_change: float) -> float:
    """Move `i` to `b`, and eject others from there, if allowed; return the change."""
    if i == t.where.shape[0] or t.where[i] == b or not may_move(t, i, t.where[i], b):
        return 0.0
    for d in range(t.frees_at_once.shape[0]):
        if t.need[i, d] > t.room[b, d]:
            return 0.0
    save_best(t)
    change = insert_ejecting(t, i, b, draws, max_change)
    return 0.0 if change == np.inf else change


def try_exchange(t: StepTables, i: int, j: int, b: int, max_change: float) -> float:
    """Exchange two objects if it is allowed and changes at most `max_change`; return the change."""
    a = t.where[i]
    if a == b or not has_room(t, b, i, j) or not has_room(t, a, j, i):
        return 0.0
    change = cost_change(t, i, j, a, b)
    if change > max_change or not may_exchange(t, i, j, a, b):
        return 0.0
    if change > 0.0:
        save_best(t)
    exchange(t, i, j, a, b)
    return change


def run_steps(t: StepTables, firsts: Ints, seconds: Ints, draws: Ints, max_changes: Floats) -> None:
    """Try steps, and do those that are allowed and change the sum by at most their `max_changes`.

    `firsts` are objects. Each of `seconds` is an object for an exchange, N + a container to which
    the first object goes, or N + M + a container from which a costly object ejects others, to
    containers of `draws`.
    """
    nothing, containers = t.where.shape[0], t.objects_in.shape[0]
    for s in range(len(firsts)):
        i, j = firsts[s], seconds[s]
        if j >= nothing + containers:
            change = try_chain(
                t, draw_costly_object(t, draws), j - nothing - containers, draws, max_changes[s]
            )
        else:
            b = t.where[j] if j < nothing else j - nothing
            change = try_exchange(t, i, min(j, nothing), b, max_changes[s])
        t.sums[CHANGE] += change
        if change > 0.0:
            t.registers[IS_BEST] = 0
        if t.sums[CHANGE] < t.sums[BEST_CHANGE] - EPS:
            t.sums[BEST_CHANGE] = t.sums[CHANGE]
            t.registers[IS_BEST] = 1


RunSteps = Callable[[StepTables, Any, Any, Any, Any], None]


_COMPILED = [
    function
    for function in list(globals().values())
    if isinstance(function, FunctionType) and function.__module__ == __name__
]
"""All functions above, each after those that it calls."""


@functools.cache
def compiled() -> RunSteps | None:
    """Return `run_steps` compiled, which takes seconds the first time; None without numba."""
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
    outer = FunctionType(run_steps.__code__, names, run_steps.__name__)
    try:
        return cast(RunSteps, njit(cache=True, **faster)(outer))
    except RuntimeError:  # no folder can be written to
        return cast(RunSteps, njit(**faster)(outer))
