"""Searches machines for equal tasks: which kinds come first, and which machine is found quickly.

`bin_source` offers all machines of a bin; it is needed only where no quick answer exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import cast

from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import admits, is_large_enough, judge
from control_plane.allocator.core.free_space_classes import EMPTY
from control_plane.allocator.core.machine_pools import BucketOrder, Cell, Machine, Part
from control_plane.allocator.core.request import Group
from control_plane.allocator.core.stranding import Totals, Traits
from control_plane.api.policy import Fit
from control_plane.broker.core.capacity import Capacity
from control_plane.broker.core.matching import holds

_QUICK_MACHINES = 16
"""Machines that are tried before a `Source` is made, which keeps its position."""


class Search:
    """The tasks for which machines are searched, with properties that hold for all bins."""

    __slots__ = (
        *("_totals", "_traits", "demand", "group", "is_simple", "judged", "may_be_avoided"),
        *("plain", "tight"),
    )

    def __init__(
        self, draft: Draft, group: Group, totals: Totals, *, may_be_avoided: bool = False
    ) -> None:
        """Search for tasks of a group; with `may_be_avoided` also on the machine to avoid."""
        ranking = draft.ranking
        self.group = group
        self.demand = group.demand
        self.may_be_avoided = may_be_avoided
        self.plain = not (group.leave or group.avoid or group.among)
        """Whether every machine with room is fit."""
        self.tight = draft.request.fit is Fit.TIGHT or ranking.packs_machines
        """Whether machines with the least room come first, not those with the most."""
        self.is_simple = (
            self.plain
            and ranking.is_plain
            and not (self.tight or self.demand.requires or ranking.capped)
        )
        """Whether the first machine of a bin that has room is the best there."""
        self.judged = 0
        """Machines that did not fit since the last checkpoint."""
        self._totals = totals
        self._traits: dict[int, Traits] = {}

    def _traits_of(self, capacity: Capacity) -> Traits:
        found = self._traits.get(id(capacity))
        if found is None:
            found = Traits.of(self.demand, capacity, self._totals)
            self._traits[id(capacity)] = found
        return found

    def fills_one_by_one(self, capacity: Capacity) -> bool:
        """Return whether machines of this kind are filled one by one, because they are rare."""
        return self._traits_of(capacity).is_rare

    def reserves(self, part: Part) -> bool:
        """Return whether machines are reserved for tasks that need their rare resource."""
        return self._traits_of(part.capacity).is_kept

    def could_run(self, machine: Machine) -> bool:
        """Return whether a machine could run the tasks if it were empty."""
        group, demand = self.group, self.demand
        return (
            machine.name not in group.leave
            and is_large_enough(demand, machine.capacity)
            and admits(demand, machine)
            and all(holds(term, machine) for term in group.among)
        )

    def least_stranding_first(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return machines by kind; the kind on which a task strands least comes first."""
        if len(parts) < 2:
            return parts
        return sorted(parts, key=lambda part: self._traits_of(part.capacity).strands)

    def bucket_order(self, buckets: Sequence[Part]) -> BucketOrder:
        """Return the unreserved buckets in order, and whether each is filled one by one."""
        return tuple(
            [
                (part.bucket, self.fills_one_by_one(part.capacity))
                for part in self.least_stranding_first(buckets)
                if not (part.is_scarce or self.reserves(part))
            ]
        )

    def quick_fit(self, draft: Draft, order: BucketOrder) -> Machine | None:
        """Return the machine that a `Source` of whole buckets would offer first.

        Return None if that is not quick to find: the search is not simple, or the first machines
        have no room.
        """
        demand, tasks_on, rooms = self.demand, draft.tasks_on, draft.planned_rooms
        freeing_buckets, powered, tried = draft.freeing_buckets, draft.power is not None, 0
        for bucket, tight in order:
            # space classes lack the room that the request itself frees
            is_freeing = bucket in freeing_buckets
            if not is_freeing and bucket.is_no_fit(demand):
                continue
            gain_count, moves, no_fit = bucket.gain_count, bucket.moves, not (powered or rooms)
            if not tight:
                machine = bucket.first()
                if machine is None:
                    continue
                if machine not in tasks_on and not judge(
                    demand, machine, rooms.get(machine, machine) if rooms else machine
                ):
                    return None if powered and draft.is_short(machine) else machine
            supply = draft if powered else None
            wanted = None if is_freeing else demand
            for machine in bucket.usable(wanted, tight=tight, supply=supply):
                if machine in tasks_on:
                    no_fit = False
                elif not judge(demand, machine, rooms.get(machine, machine)):
                    return None if powered and draft.is_short(machine) else machine
                tried += 1
                if tried > _QUICK_MACHINES:
                    return None
            if no_fit:
                bucket.note_no_fit(demand, gain_count, moves)
        return None

    def first_empty(self, draft: Draft, parts: Sequence[Part]) -> Machine | None:
        """Return the machine without tasks that a `Source` of one cell would offer first.

        Return None if it is unknown. Preferences over racks and rows begin with such a machine in
        each bin. A `Source` for each would cost more than the rest of the plan (BUG-AL27).
        """
        demand, tasks_on = self.demand, draft.tasks_on
        if len(parts) != 1 or not self.plain or self.tight or demand.gpus or demand.requires:
            return None
        cell, bucket = parts[0], parts[0].bucket
        if cell is bucket or cell.size * 2 > bucket.size or draft.with_own_bins:
            return None
        if cell.is_scarce or self.fills_one_by_one(cell.capacity) or self.reserves(cell):
            return None
        if bucket in draft.freeing_buckets or bucket.is_no_fit(demand):
            return None
        for machine in islice(cast("Cell", cell).machines, _QUICK_MACHINES):
            if (
                machine.space_class == EMPTY
                and machine.bucket is bucket
                and machine not in tasks_on
            ):
                fails = judge(demand, machine, draft.room(machine)) or draft.is_short(machine)
                return None if fails else machine
        return None
