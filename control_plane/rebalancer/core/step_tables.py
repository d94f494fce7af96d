"""The arrays that single steps of a search for placements read and change.

`placement_state` makes them. Compiled code uses them as numpy arrays; interpreted code uses views,
whose items are plain numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from control_plane.rebalancer.core.arrays import Flags, Floats, Ints

CHAINED = 64
"""Objects that leave a container for one that comes, at most."""


class StepTables(NamedTuple):
    """One model and its placement: N objects, M containers, D dimensions, G groups, S scopes.

    Object N is nothing: it needs nothing, and stands for the second of a step with one object.
    """

    need: Floats
    """(N + 1, D)"""
    origin: Ints
    price: Floats
    group: Ints
    offers: Floats
    """(M, D)"""
    room: Floats
    leaves: Flags
    """(D): whether an object that moves gives back at once what it held."""
    over_of: Ints
    """Goals about what is above a level (T): their dimension; level and weight are (M, T)."""
    level: Floats
    weight: Floats
    one_of: Ints
    """Goals about proportions (P)."""
    two_of: Ints
    ratio: Floats
    pair_weight: Floats
    bin_at: Ints
    """Goals about bins (B, M): the bin of each container; levels and use are (B, bins)."""
    bin_of: Ints
    bin_level: Floats
    bin_weight: Floats
    distance: Floats
    """(M, M), or empty."""
    used_weight: Floats
    group_weight: float
    may_row: Ints
    """By object: its row in `may`; -1: it may be anywhere."""
    may: Flags
    scope_at: Ints
    """Rules about groups (S, M): the bin of each container."""
    first: Ints
    """By scope: where its counts begin in `counted`, which is by group and bin."""
    wide: Ints
    most: Ints
    """(S, G), as `least`."""
    least: Ints
    needs_from: Ints
    """By scope and group: begin of the groups in `needs` that it depends on."""
    needs: Ints
    needed_from: Ints
    needed: Ints
    # what a step changes
    where: Ints
    used: Floats
    held: Floats
    number: Ints
    cost: Floats
    moved: Ints
    with_moved: Ints
    """By number of moved objects: how many groups have that number."""
    counted: Ints
    seen: Ints
    """(S, G): bins of a scope in which a group has objects."""
    in_bin: Floats
    head: Ints
    """By container: an object in it, or N; `after` and `before` link it with the others there."""
    after: Ints
    before: Ints
    chain: Ints
    """(CHAINED, 2): objects that left in the present chain, and where to."""
    best: Ints
    """The best placement so far, unless `marks` says that it is the present one."""
    sums: Floats
    """What all steps changed, and what it was for the best placement."""
    marks: Ints
    """The most moved objects of a group; whether the present placement is the best one; the next
    of the drawn containers."""


def interpreted(t: StepTables) -> StepTables:
    """Return the same tables for code that is not compiled."""
    return StepTables._make(view(of) if isinstance(of, np.ndarray) else of for of in t)


def view(of: Any) -> Any:
    """Return a view of an array whose items are plain numbers."""
    return memoryview(of)
