"""Offers the machines of equal bins, best first, for equal tasks of a job."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import cast

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import admits, admits_any_of, is_large_enough, judge
from control_plane.allocator.core.free_space_classes import EMPTY, scarcity
from control_plane.allocator.core.machine_pools import Cell, Kinds, Machine, Part
from control_plane.allocator.core.request import Group
from control_plane.allocator.core.stranding import Totals, Traits
from control_plane.api.policy import Fit
from control_plane.broker.core.capacity import Capacity
from control_plane.broker.core.matching import holds

_PAUSE_AFTER = 2_000
"""Machines that are judged between two checkpoints of the loop."""
_MANY = 1 << 30
_QUICK_MACHINES = 16
"""Machines that are tried before a `Source` is made, which keeps its position."""


class Search:
    """The tasks for which machines are searched, with properties that hold for all bins."""

    __slots__ = (
        *("_totals", "_traits", "demand", "group", "is_simple", "judged", "may_be_avoided"),
        *("plain", "tight"),
    )

    def __init__(
        self, work: Draft, group: Group, totals: Totals, *, may_be_avoided: bool = False
    ) -> None:
        """Search for tasks of a group; with `may_be_avoided` also on the machine to avoid."""
        ranking = work.ranking
        self.group = group
        self.demand = group.demand
        self.may_be_avoided = may_be_avoided
        self.plain = not (group.leave or group.avoid or group.among)
        """Whether every machine with room is fit."""
        self.tight = work.request.fit is Fit.TIGHT or ranking.packs_machines
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

    def fills(self, capacity: Capacity) -> bool:
        """Return whether machines of a kind are always filled one by one."""
        return self._traits_of(capacity).is_rare

    def keeps(self, part: Part) -> bool:
        """Return whether machines are kept for tasks that need a rare resource."""
        return self._traits_of(part.capacity).is_kept

    def suits(self, machine: Machine) -> bool:
        """Return whether a machine could run the tasks if it were empty."""
        group, demand = self.group, self.demand
        return (
            machine.name not in group.leave
            and is_large_enough(demand, machine.capacity)
            and admits(demand, machine)
            and all(holds(term, machine) for term in group.among)
        )

    def ordered(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return machines of several kinds; the kind where a task strands least comes first."""
        if len(parts) < 2:
            return parts
        return sorted(parts, key=lambda part: self._traits_of(part.capacity).strands)

    def kinds(self, buckets: Sequence[Part]) -> Kinds:
        """Return the buckets that are not kept, in order, and whether each is filled one by one."""
        return tuple(
            [
                (part.bucket, self.fills(part.capacity))
                for part in self.ordered(buckets)
                if not (part.is_scarce or self.keeps(part))
            ]
        )

    def quick_fit(self, work: Draft, kinds: Kinds) -> Machine | None:
        """Return the machine that a `Source` of whole buckets would offer first.

        Return None if that is not quick to find: the search is not simple, or the first machines
        have no room.
        """
        demand, mine, spaces, gained = self.demand, work.mine, work.spaces, work.gained
        powered, tried = work.power is not None, 0
        for bucket, tight in kinds:
            frees = bucket in gained  # space classes lack the room that the request itself frees
            if not frees and bucket.is_no_fit(demand):
                continue
            news, moves, no_fit = bucket.news, bucket.moves, not (powered or spaces)
            if not tight:
                machine = bucket.first()
                if machine is None:
                    continue
                if machine not in mine and not judge(
                    demand, machine, spaces.get(machine, machine) if spaces else machine
                ):
                    return None if powered and work.is_short(machine) else machine
            supply = work if powered else None
            for machine in bucket.usable(None if frees else demand, tight=tight, supply=supply):
                if machine in mine:
                    no_fit = False
                elif not judge(demand, machine, spaces.get(machine, machine)):
                    return None if powered and work.is_short(machine) else machine
                tried += 1
                if tried > _QUICK_MACHINES:
                    return None
            if no_fit:
                bucket.note_no_fit(demand, news, moves)
        return None

    def first_empty(self, work: Draft, parts: Sequence[Part]) -> Machine | None:
        """Return the machine without tasks that a `Source` of one cell would offer first.

        Return None if it is unknown. Preferences over racks and rows begin with such a machine in
        each bin, and a `Source` for each would cost more than the rest of the plan (BUG-AL27).
        """
        demand, mine = self.demand, work.mine
        if len(parts) != 1 or not self.plain or self.tight or demand.gpus or demand.requires:
            return None
        cell, bucket = parts[0], parts[0].bucket
        if cell is bucket or cell.size * 2 > bucket.size or work.apart:
            return None
        if cell.is_scarce or self.fills(cell.capacity) or self.keeps(cell):
            return None
        if bucket in work.gained or bucket.is_no_fit(demand):
            return None
        for machine in islice(cast("Cell", cell).machines, _QUICK_MACHINES):
            if machine.space_class == EMPTY and machine.bucket is bucket and machine not in mine:
                fails = judge(demand, machine, work.room(machine)) or work.is_short(machine)
                return None if fails else machine
        return None


class Source:
    """Offers the machines of equal bins: those of the entitlement, and free ones it may take."""

    __slots__ = (
        *("_again", "_broken", "_fresh", "_last", "_order", "_own_first", "_own_kept", "_parts"),
        *("_search", "_work", "has_kept", "paused"),
    )

    def __init__(
        self, work: Draft, search: Search, own: Sequence[Part], free: Sequence[Part]
    ) -> None:
        """Offer the machines of some buckets, or of parts of them."""
        self._work = work
        self._search = search
        self.paused = False
        """Whether the search stopped for a checkpoint; the next call continues it."""
        self._order = 0
        self._again: list[tuple[int, int, Machine]] = []
        """Machines with tasks of the job, fewest first: (tasks, order, machine)."""
        kept = [part for part in own if search.keeps(part)]
        self._own_kept = kept
        self._own_first = self._own([p for p in own if not search.keeps(p)] if kept else own)
        self._fresh = self._with_few_gpus() if search.demand.gpus and free else self._own_first
        self._broken: Machine | None = None
        """A machine of the pool that has more GPUs left than a free one."""
        self.has_kept = bool(kept)
        """Whether the pool has machines that are kept for tasks with a rare need."""
        self._last: Iterator[tuple[Machine | None, bool]] | None = None
        self._parts = free
        if work.taken_in:
            for part in free:
                for machine in work.taken_in.get(part.bucket, ()):
                    if not isinstance(part, Cell) or machine in part.machines:
                        self.used(machine)

    def pick(self) -> Machine | None:
        """Return the best machine of the pool that has room."""
        machine = next(self._fresh, None)
        if machine is None and not self.paused:
            machine = self._pick_again()
        return machine

    def pick_last(self) -> Machine | None:
        """Return the best free or kept machine; a free one is taken."""
        if self._last is None:
            self._last = self._beyond()
        machine, is_free = next(self._last, (None, False))
        if machine is None and not self.paused and self._own_kept:
            return self._pick_again()
        if machine is not None and is_free:
            self._work.take(machine)
        return machine

    def _beyond(self) -> Iterator[tuple[Machine | None, bool]]:
        """Yield free machines, then kept machines of the pool, then kept free machines."""
        keeps = self._search.keeps
        if self._search.demand.gpus:
            yield from self._by_gpus()
            return
        for machine in self._takeable([part for part in self._parts if not keeps(part)]):
            yield machine, True
        for machine in self._own(self._own_kept):
            yield machine, False
        for machine in self._takeable([part for part in self._parts if keeps(part)]):
            yield machine, True

    def _with_few_gpus(self) -> Iterator[Machine | None]:
        """Yield machines of the pool that have at most as many GPUs left as each free one."""
        lacks = self._work.allowance.lacks
        samples = (next(part.usable(), None) for part in self._parts)
        free = [m.capacity.gpus for m in samples if m and self._fits(m) and not lacks(m)]
        least = min(free, default=_MANY)
        for machine in self._own_first:
            if machine is not None and self._work.room(machine).free_gpus > least:
                self._broken = machine
                return
            yield machine

    def _by_gpus(self) -> Iterator[tuple[Machine | None, bool]]:
        """Yield free machines and those of the pool, those with the fewest GPUs left first."""
        kinds: dict[int, list[Part]] = {}
        for part in self._parts:
            kinds.setdefault(part.capacity.gpus, []).append(part)
        waiting = sorted(kinds)
        own = chain(filter(None, [self._broken]), self._own_first)
        for machine in own:
            while machine is not None and waiting:
                if waiting[0] >= self._work.room(machine).free_gpus:
                    break
                for free in self._takeable(kinds[waiting.pop(0)]):
                    yield free, True
            if machine is None or self._fits(machine):
                yield machine, False
        for gpus in waiting:
            for free in self._takeable(kinds[gpus]):
                yield free, True

    def used(self, machine: Machine) -> None:
        """Offer a machine again, after machines with fewer tasks of the job."""
        if self._work.ranking.counts_machines:
            return  # the machine has its own bins
        self._order += 1
        heapq.heappush(self._again, (self._work.mine[machine], self._order, machine))

    def _pick_again(self) -> Machine | None:
        while self._again:
            machine = heapq.heappop(self._again)[2]
            if self._fits(machine):
                return machine
        return None

    def _fits(self, machine: Machine) -> bool:
        work, search = self._work, self._search
        if judge(search.demand, machine, work.room(machine)) or work.is_short(machine):
            return False
        if search.plain:
            return True
        group = search.group
        if machine.name in group.leave or not all(holds(t, machine) for t in group.among):
            return False
        if machine.name == group.avoid and not search.may_be_avoided:
            work.gave_up = True
            return False
        return True

    def _pauses(self) -> bool:
        """Count a machine that does not fit; return whether a checkpoint is due."""
        search = self._search
        search.judged += 1
        self.paused = search.judged >= _PAUSE_AFTER
        if self.paused:
            search.judged = 0
        return self.paused

    def _may_have_room(self, part: Part, demand: Demand) -> bool:
        if not part.size:
            return False
        if demand.requires and not admits_any_of(demand, part):
            return False
        return part.is_apart or not part.bucket.is_closed(demand)

    def _own(self, parts: Sequence[Part]) -> Iterator[Machine | None]:
        """Yield fitting machines of the pool; those without a task of the job come first.

        Machines with GPUs are filled one by one; those with the fewest GPUs left come first.
        """
        search = self._search
        plenty = [part for part in parts if not part.is_scarce]
        scarce = [part for part in parts if part.is_scarce]
        if not search.demand.gpus:
            for part in search.ordered(plenty):
                yield from self._offered([part], again=search.tight)
        alone = [part for part in scarce if part.is_apart]
        for part in alone:
            yield from self._offered([part], again=search.tight)
        many = [part for part in scarce if not part.is_apart]
        yield from self._offered(many, again=search.tight or search.demand.gpus > 0)

    def _offered(self, parts: Sequence[Part], *, again: bool) -> Iterator[Machine | None]:
        """Yield the fitting machines of parts that share one order.

        With `again`, each machine comes as often as tasks fit, also those with tasks of the job.
        """
        work, search, mine = self._work, self._search, self._work.mine
        demand, plain, apart = search.demand, search.plain, work.apart
        simple = plain and work.power is None
        gained = work.gained  # space classes lack the room that the request itself frees
        parts = [p for p in parts if p.bucket in gained or self._may_have_room(p, demand)]
        if not parts:
            return
        no_fit = plain and all(part is part.bucket for part in parts)
        seen = [(part.bucket, part.bucket.news, part.bucket.moves) for part in parts]
        work.lacks_own = False
        if work.ranking.counts_machines:
            again = parts[0].is_apart
        skips = apart and not parts[0].is_apart
        for machine in self._in_order(parts):
            if skips and machine in apart:
                no_fit = False
                continue
            if machine in mine and not again:
                no_fit = False
                self.used(machine)
                continue
            if not judge(demand, machine, work.room(machine)) if simple else self._fits(machine):
                no_fit = False
                yield machine
                while again and self._fits(machine):
                    yield machine
                continue
            no_fit = no_fit and machine not in work.spaces and not work.is_short(machine)
            if self._pauses():
                yield None
                self.paused = False
        if no_fit and not work.lacks_own:
            for bucket, news, moves in seen:
                bucket.note_no_fit(demand, news, moves)

    def _in_order(self, parts: Sequence[Part]) -> Iterator[Machine]:
        """Return the machines of parts that share one order."""
        work, search = self._work, self._search
        orders = [
            part.usable(
                None if part.bucket in work.gained else search.demand,
                tight=search.tight or search.fills(part.capacity),
                supply=None if work.power is None else work,
            )
            for part in parts
        ]
        return orders[0] if len(orders) == 1 else heapq.merge(*orders, key=scarcity)

    def _takeable(self, parts: Sequence[Part]) -> Iterator[Machine | None]:
        """Yield fitting machines of the free pool that the entitlement may take."""
        work, allowance, search = self._work, self._work.allowance, self._search
        demand = search.demand
        for part in search.ordered(parts):
            if not self._may_have_room(part, demand):
                continue
            bucket = part.bucket
            news, moves, no_fit = bucket.news, bucket.moves, part is bucket and search.plain
            work.lacks_own, supply = False, None if work.power is None else work
            if work.refuses_all(bucket):
                continue
            for machine in part.usable(tight=search.tight, supply=supply):
                if allowance.lacks(machine):  # the same holds for all machines of this bucket
                    no_fit = False
                    break
                if machine in work.apart and not part.is_apart:
                    no_fit = False
                    continue
                if machine in work.taken or machine.jobs or work.refuses(machine):
                    no_fit = False
                elif self._fits(machine):
                    no_fit = False
                    yield machine
                    continue
                no_fit = no_fit and not work.is_short(machine)
                if self._pauses():
                    yield None
                    self.paused = False
            if no_fit and not work.lacks_own:
                bucket.note_no_fit(demand, news, moves)
