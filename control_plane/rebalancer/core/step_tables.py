"""The arrays that single steps of a search for placements read and change.

`placement_state` makes them. Compiled code uses them as numpy arrays; interpreted code uses views,
whose items are plain numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from control_plane.rebalancer.core.arrays import Flags, Floats, Ints

EJECTED_MAX = 64
"""The most objects that leave a container for one that comes."""
MOST_MOVED, IS_BEST, NEXT_DRAW = 0, 1, 2
"""Indexes in `StepTables.registers`."""
CHANGE, BEST_CHANGE = 0, 1
"""Indexes in `StepTables.sums`."""


class StepTables(NamedTuple):
    """One model and its placement: N objects, M containers, D dimensions, G groups, S scopes.

    Object N is nothing: it needs nothing, and is the second object of a step with one object.
    """

    need: Floats
    """(N + 1, D)"""
    origin: Ints
    price: Floats
    group: Ints
    offers: Floats
    """(M, D)"""
    room: Floats
    """(M, D): what may be held; infinite without a constraint."""
    frees_at_once: Flags
    """(D): whether an object that moves frees at once what it held."""
    level_dimension: Ints
    """(T): dimension of each goal about a level."""
    level: Floats
    """(M, T)"""
    weight: Floats
    """(M, T)"""
    ratio_dimension: Ints
    """(P): dimension of each goal about a proportion."""
    ratio_other: Ints
    """(P): the dimension that should have `ratio` times as much free."""
    ratio: Floats
    ratio_weight: Floats
    goal_bin: Ints
    """(B, M): by goal about bins, the bin of each container."""
    bin_dimension: Ints
    """(B)"""
    bin_level: Floats
    """(B, bins)"""
    bin_weight: Floats
    distance: Floats
    """(M, M), or empty."""
    used_weight: Floats
    group_weight: float
    may_row: Ints
    """By object: its row in `may`; -1: it may be in any container."""
    may: Flags
    scope_bin: Ints
    """(S, M): by scope with constraints about groups, the bin of each container."""
    counts_from: Ints
    """By scope: where its counts begin in `group_counts`, which is by group and bin."""
    bins_in_scope: Ints
    most: Ints
    """(S, G): the most objects of a group in one bin."""
    least: Ints
    """(S, G): the least bins in which a group has objects."""
    needs_from: Ints
    """By scope and group: where the groups that it depends on begin in `needs`."""
    needs: Ints
    needed_from: Ints
    """By scope and group: where the groups that depend on it begin in `needed`."""
    needed: Ints
    # what a step changes
    where: Ints
    used: Floats
    held: Floats
    """(M, D): use, plus what moved objects still hold in their origin."""
    objects_in: Ints
    """By container: number of its objects."""
    cost: Floats
    moved: Ints
    """By group: number of objects that are not in their origin."""
    groups_with_moved: Ints
    """By number of moved objects: how many groups have that number."""
    group_counts: Ints
    bins_with_group: Ints
    """(S, G): bins of a scope in which a group has objects."""
    bin_used: Floats
    """(B, bins)"""
    first_object: Ints
    """By container: first object of its linked list, or N."""
    next_object: Ints
    previous_object: Ints
    ejected: Ints
    """(EJECTED_MAX, 2): objects that left in the present chain, and their new containers."""
    best: Ints
    """The best placement so far, unless `registers[IS_BEST]` says that it is the present one."""
    sums: Floats
    """The change of the sum of goals by all steps, and its value for the best placement."""
    registers: Ints
    """The most moved objects of a group; whether the present placement is the best one; the index
    of the last random container."""


def interpreted(t: StepTables) -> StepTables:
    """Return the same tables for interpreted code."""
    return StepTables._make(view(of) if isinstance(of, np.ndarray) else of for of in t)


def view(of: Any) -> Any:
    """Return a view of an array whose items are plain numbers."""
    return memoryview(of)
