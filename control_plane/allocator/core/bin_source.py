"""Offers the machines of equal bins, best first, for equal tasks of a job."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import admits_any_of, judge
from control_plane.allocator.core.free_space_classes import scarcity
from control_plane.allocator.core.machine_pools import Cell, Machine, Part
from control_plane.allocator.core.machine_search import Search
from control_plane.broker.core.matching import holds

_PAUSE_AFTER = 2_000
"""Machines that are judged between two checkpoints of the loop."""
_MANY = 1 << 30


class Source:
    """Offers the machines of equal bins: those of the entitlement, and free ones it may take."""

    __slots__ = (
        *(
            "_with_tasks",
            "_deferred",
            "_first_choice",
            "_rest",
            "_order",
            "_own_now",
            "_own_reserved",
            "_parts",
        ),
        *("_search", "_draft", "has_reserved", "paused"),
    )

    def __init__(
        self, draft: Draft, search: Search, own: Sequence[Part], free: Sequence[Part]
    ) -> None:
        """Offer the machines of some buckets, or of parts of them."""
        self._draft = draft
        self._search = search
        self.paused = False
        """Whether the search stopped for a checkpoint; the next call continues it."""
        self._order = 0
        self._with_tasks: list[tuple[int, int, Machine]] = []
        """Machines with tasks of the job, fewest first: (tasks, order, machine)."""
        reserved = [part for part in own if search.reserves(part)]
        self._own_reserved = reserved
        self._own_now = self._fitting_own(
            [p for p in own if not search.reserves(p)] if reserved else own
        )
        self._first_choice = self._with_few_gpus() if search.demand.gpus and free else self._own_now
        self._deferred: Machine | None = None
        """A machine of the pool with more free GPUs than a free machine, which comes first."""
        self.has_reserved = bool(reserved)
        """Whether the pool has machines that are reserved for tasks with a rare need."""
        self._rest: Iterator[tuple[Machine | None, bool]] | None = None
        self._parts = free
        if draft.taken_by_bucket:
            for part in free:
                for machine in draft.taken_by_bucket.get(part.bucket, ()):
                    if not isinstance(part, Cell) or machine in part.machines:
                        self.offer_again(machine)

    def pick(self) -> Machine | None:
        """Return the best machine of the pool that has room."""
        machine = next(self._first_choice, None)
        if machine is None and not self.paused:
            machine = self._pick_again()
        return machine

    def pick_last(self) -> Machine | None:
        """Return the best machine that is free or reserved; a free one is taken."""
        if self._rest is None:
            self._rest = self._free_and_reserved()
        machine, is_free = next(self._rest, (None, False))
        if machine is None and not self.paused and self._own_reserved:
            return self._pick_again()
        if machine is not None and is_free:
            self._draft.take(machine)
        return machine

    def _free_and_reserved(self) -> Iterator[tuple[Machine | None, bool]]:
        """Yield free machines, then reserved ones of the pool, then reserved free ones."""
        reserves = self._search.reserves
        if self._search.demand.gpus:
            yield from self._by_gpus()
            return
        for machine in self._takeable([part for part in self._parts if not reserves(part)]):
            yield machine, True
        for machine in self._fitting_own(self._own_reserved):
            yield machine, False
        for machine in self._takeable([part for part in self._parts if reserves(part)]):
            yield machine, True

    def _with_few_gpus(self) -> Iterator[Machine | None]:
        """Yield machines of the pool that have at most as many GPUs left as each free one."""
        lacks = self._draft.allowance.lacks
        samples = (next(part.usable(), None) for part in self._parts)
        free = [m.capacity.gpus for m in samples if m and self._fits(m) and not lacks(m)]
        least = min(free, default=_MANY)
        for machine in self._own_now:
            if machine is not None and self._draft.room(machine).free_gpus > least:
                self._deferred = machine
                return
            yield machine

    def _by_gpus(self) -> Iterator[tuple[Machine | None, bool]]:
        """Yield free machines and those of the pool, those with the fewest GPUs left first."""
        kinds: dict[int, list[Part]] = {}
        for part in self._parts:
            kinds.setdefault(part.capacity.gpus, []).append(part)
        waiting = sorted(kinds)
        own = chain(filter(None, [self._deferred]), self._own_now)
        for machine in own:
            while machine is not None and waiting:
                if waiting[0] >= self._draft.room(machine).free_gpus:
                    break
                for free in self._takeable(kinds[waiting.pop(0)]):
                    yield free, True
            if machine is None or self._fits(machine):
                yield machine, False
        for gpus in waiting:
            for free in self._takeable(kinds[gpus]):
                yield free, True

    def offer_again(self, machine: Machine) -> None:
        """Offer a machine again, after machines with fewer tasks of the job."""
        if self._draft.ranking.counts_machines:
            return  # the machine has its own bins
        self._order += 1
        heapq.heappush(self._with_tasks, (self._draft.tasks_on[machine], self._order, machine))

    def _pick_again(self) -> Machine | None:
        while self._with_tasks:
            machine = heapq.heappop(self._with_tasks)[2]
            if self._fits(machine):
                return machine
        return None

    def _fits(self, machine: Machine) -> bool:
        draft, search = self._draft, self._search
        if judge(search.demand, machine, draft.room(machine)) or draft.is_short(machine):
            return False
        if search.plain:
            return True
        group = search.group
        if machine.name in group.leave or not all(holds(t, machine) for t in group.among):
            return False
        if machine.name == group.avoid and not search.may_be_avoided:
            draft.skipped_avoided = True
            return False
        return True

    def _count_unfit(self) -> bool:
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
        return part.has_own_bins or not part.bucket.is_closed(demand)

    def _fitting_own(self, parts: Sequence[Part]) -> Iterator[Machine | None]:
        """Yield fitting machines of the pool; those without a task of the job come first.

        Machines with GPUs are filled one by one; those with the fewest GPUs left come first.
        """
        search = self._search
        plenty = [part for part in parts if not part.is_scarce]
        scarce = [part for part in parts if part.is_scarce]
        if not search.demand.gpus:
            for part in search.least_stranding_first(plenty):
                yield from self._fitting([part], again=search.tight)
        alone = [part for part in scarce if part.has_own_bins]
        for part in alone:
            yield from self._fitting([part], again=search.tight)
        many = [part for part in scarce if not part.has_own_bins]
        yield from self._fitting(many, again=search.tight or search.demand.gpus > 0)

    def _fitting(self, parts: Sequence[Part], *, again: bool) -> Iterator[Machine | None]:
        """Yield the fitting machines of parts that share one order.

        With `again`, each machine comes as often as tasks fit, also those with tasks of the job.
        """
        draft, search, tasks_on = self._draft, self._search, self._draft.tasks_on
        demand, plain, with_own_bins = search.demand, search.plain, draft.with_own_bins
        simple = plain and draft.power is None
        # space classes lack the room that the request itself frees
        freeing_buckets = draft.freeing_buckets
        parts = [p for p in parts if p.bucket in freeing_buckets or self._may_have_room(p, demand)]
        if not parts:
            return
        no_fit = plain and all(part is part.bucket for part in parts)
        seen = [(part.bucket, part.bucket.gain_count, part.bucket.moves) for part in parts]
        draft.uses_up_power = False
        if draft.ranking.counts_machines:
            again = parts[0].has_own_bins
        skips = with_own_bins and not parts[0].has_own_bins
        for machine in self._in_order(parts):
            if skips and machine in with_own_bins:
                no_fit = False
                continue
            if machine in tasks_on and not again:
                no_fit = False
                self.offer_again(machine)
                continue
            if not judge(demand, machine, draft.room(machine)) if simple else self._fits(machine):
                no_fit = False
                yield machine
                while again and self._fits(machine):
                    yield machine
                continue
            no_fit = no_fit and machine not in draft.planned_rooms and not draft.is_short(machine)
            if self._count_unfit():
                yield None
                self.paused = False
        if no_fit and not draft.uses_up_power:
            for bucket, gain_count, moves in seen:
                bucket.note_no_fit(demand, gain_count, moves)

    def _in_order(self, parts: Sequence[Part]) -> Iterator[Machine]:
        """Return the machines of parts that share one order."""
        draft, search = self._draft, self._search
        orders = [
            part.usable(
                None if part.bucket in draft.freeing_buckets else search.demand,
                tight=search.tight or search.fills_one_by_one(part.capacity),
                supply=None if draft.power is None else draft,
            )
            for part in parts
        ]
        return orders[0] if len(orders) == 1 else heapq.merge(*orders, key=scarcity)

    def _takeable(self, parts: Sequence[Part]) -> Iterator[Machine | None]:
        """Yield fitting machines of the free pool that the entitlement may take."""
        draft, allowance, search = self._draft, self._draft.allowance, self._search
        demand = search.demand
        for part in search.least_stranding_first(parts):
            if not self._may_have_room(part, demand):
                continue
            bucket = part.bucket
            gain_count, moves, no_fit = (
                bucket.gain_count,
                bucket.moves,
                part is bucket and search.plain,
            )
            draft.uses_up_power, supply = False, None if draft.power is None else draft
            if draft.refuses_all(bucket):
                continue
            for machine in part.usable(tight=search.tight, supply=supply):
                if allowance.lacks(machine):  # the same holds for all machines of this bucket
                    no_fit = False
                    break
                if machine in draft.with_own_bins and not part.has_own_bins:
                    no_fit = False
                    continue
                if machine in draft.taken or machine.jobs or draft.refuses(machine):
                    no_fit = False
                elif self._fits(machine):
                    no_fit = False
                    yield machine
                    continue
                no_fit = no_fit and not draft.is_short(machine)
                if self._count_unfit():
                    yield None
                    self.paused = False
            if no_fit and not draft.uses_up_power:
                bucket.note_no_fit(demand, gain_count, moves)
