"""The machines of equal bins, best first, for tasks of a job that are alike."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import admits_any_of, judge
from control_plane.allocator.core.machine_pools import Bucket, Machine
from control_plane.allocator.core.request import Group

LOOK_AHEAD = 64
"""Fitting machines of equal bins that are compared where single machines differ."""
LOOK_MOST = 256
"""Machines without room that one search in a bucket passes over before it gives the bucket
up. Only if tasks are left over in the end are those buckets searched to their end."""
_PAUSE_AFTER = 2_000
"""Machines that are judged between two chances for others to run."""


class Search:
    """For which tasks machines are searched, and what that means for all bins."""

    __slots__ = (
        "compares",
        "demand",
        "group",
        "is_simple",
        "judged",
        "offers_again",
        "plain",
        "thorough",
    )

    def __init__(self, work: Draft, group: Group, *, thorough: bool) -> None:
        """Search for tasks of a group; `thorough`: however many machines have to be judged."""
        ranking = work.ranking
        self.group = group
        self.demand = group.demand
        self.thorough = thorough
        self.plain = not (group.leave or group.avoid or ranking.limited)
        """Whether a machine is fit if it has room."""
        self.compares = ranking.looks_ahead
        """Whether single machines of equal bins suit more or less well."""
        self.offers_again = ranking.looks_ahead or ranking.packs_machines
        """Whether machines with tasks of the job are offered before those without."""
        self.is_simple = self.plain and not (
            self.offers_again or self.demand.requires or ranking.capped
        )
        """Whether the first machine of a bin that has room is the best there."""
        self.judged = 0
        """Machines that did not fit since others had a chance to run."""


class Source:
    """Offers the machines of equal bins: those of the entitlement, and those it could take."""

    __slots__ = (
        "_again",
        "_ahead",
        "_buckets",
        "_free",
        "_free_ahead",
        "_fresh",
        "_order",
        "_search",
        "_work",
        "paused",
    )

    def __init__(
        self, work: Draft, search: Search, own: Sequence[Bucket], free: Sequence[Bucket]
    ) -> None:
        """Offer the machines of some buckets."""
        self._work = work
        self._search = search
        self.paused = False
        """Nothing was found yet, but may be if asked again once others had a chance to run."""
        self._order = 0
        self._again: list[tuple[int, int, Machine]] | None = None
        """Machines with tasks of the job, fewest first: (tasks, order, machine)."""
        if search.compares:
            self._ahead: list[Machine] = []
            self._free_ahead: list[Machine] = []
        self._fresh = self._own(own)
        self._free: Iterator[Machine | None] | None = None
        self._buckets = free
        if work.mine_in:
            for bucket in (*(own if search.offers_again else ()), *free):  # taken by this plan
                for machine in work.mine_in.get(bucket, ()):
                    self.used(machine)

    def pick(self) -> Machine | None:
        """Return the best machine of the pool that has room."""
        if self._search.compares:
            return self._pick_best()
        if self._search.offers_again and (machine := self._pick_again(most=True)):
            return machine
        machine = next(self._fresh, None)
        if machine is None and not self.paused:
            machine = self._pick_again(most=False)
        return machine

    def take_free(self) -> Machine | None:
        """Take the best machine of the free pool that has room."""
        free = self._free
        if free is None:
            free = self._free = self._takeable(self._buckets)
        machine = self._best_free(free) if self._search.compares else next(free, None)
        if machine is not None:
            self._work.take(machine)
        return machine

    def used(self, machine: Machine) -> None:
        """Offer a machine again, after those with fewer tasks of the job."""
        self._order += 1
        if self._again is None:
            self._again = []
        heapq.heappush(self._again, (self._work.mine[machine], self._order, machine))

    def _pick_again(self, *, most: bool) -> Machine | None:
        while self._again:
            if most:
                entry = max(self._again, key=lambda e: e[0])
                self._again.remove(entry)
                heapq.heapify(self._again)
            else:
                entry = heapq.heappop(self._again)
            if self._fits(entry[2]):
                return entry[2]
        return None

    def _pick_best(self) -> Machine | None:
        """Return the best by preferences about single machines of the next ones."""
        work = self._work
        while len(self._ahead) < LOOK_AHEAD and (machine := next(self._fresh, None)):
            self._ahead.append(machine)
        if self.paused:
            return None
        while self._ahead or self._again:
            again = [machine for _, _, machine in (self._again or ())[:LOOK_AHEAD]]
            best = min(
                [*self._ahead, *again],
                key=lambda m: (work.ranking.score_single(m), work.mine.get(m, 0)),
            )
            if best in self._ahead:
                self._ahead.remove(best)
            elif self._again:
                self._again = [entry for entry in self._again if entry[2] is not best]
                heapq.heapify(self._again)
            if self._fits(best):
                return best
        return None

    def _best_free(self, free: Iterator[Machine | None]) -> Machine | None:
        work, ranking = self._work, self._work.ranking
        self._free_ahead = [
            machine
            for machine in self._free_ahead
            if not work.allowance.lacks(machine) and not ranking.is_single_full(machine)
        ]
        while len(self._free_ahead) < LOOK_AHEAD and (machine := next(free, None)):
            self._free_ahead.append(machine)
        if self.paused or not self._free_ahead:
            return None
        best = min(self._free_ahead, key=ranking.score_single)
        self._free_ahead.remove(best)
        return best

    def _fits(self, machine: Machine) -> bool:
        work, search = self._work, self._search
        if judge(search.demand, machine, work.room(machine)):
            return False
        if search.plain:
            return True
        if machine.name in search.group.leave:
            return False
        if machine.name == search.group.avoid and not search.thorough:
            work.gave_up = True
            return False
        return not (work.ranking.limited and work.ranking.is_single_full(machine))

    def _pauses(self) -> bool:
        """Count a machine that does not fit; return whether others should run now."""
        search = self._search
        search.judged += 1
        self.paused = search.judged >= _PAUSE_AFTER
        if self.paused:
            search.judged = 0
        return self.paused

    def _own(self, buckets: Sequence[Bucket]) -> Iterator[Machine | None]:
        """Yield fitting machines of the pool on which the job has no task yet."""
        work, search, mine = self._work, self._search, self._work.mine
        demand, plain = search.demand, search.plain
        for bucket in buckets:
            if not bucket.size or (bucket not in work.gained and bucket.is_hopeless(demand)):
                continue
            if demand.requires and not admits_any_of(demand, bucket):
                continue
            gain, moves, barren, passed = bucket.gain, bucket.moves, True, 0
            sure = None if bucket in work.gained else demand  # shelves do not know what it frees
            for machine in bucket.usable(sure, fullest_first=work.ranking.packs_machines):
                if machine in mine:
                    barren = False
                    if not search.offers_again:
                        self.used(machine)
                elif (
                    not judge(demand, machine, work.room(machine)) if plain else self._fits(machine)
                ):
                    barren = False
                    yield machine
                    continue
                elif passed >= LOOK_MOST and not search.thorough:
                    barren = False
                    work.gave_up = True
                    break
                else:
                    barren = barren and machine not in work.spaces
                    passed += 1
                if self._pauses():
                    yield None
                    self.paused = False
            if barren and plain:
                bucket.missed(demand, gain, moves)

    def _takeable(self, buckets: Sequence[Bucket]) -> Iterator[Machine | None]:
        """Yield fitting machines of the free pool that the entitlement may take."""
        work, allowance, search = self._work, self._work.allowance, self._search
        demand, plain = search.demand, search.plain
        for bucket in buckets:
            if not bucket.size or bucket.is_hopeless(demand):
                continue
            if demand.requires and not admits_any_of(demand, bucket):
                continue
            gain, moves, barren = bucket.gain, bucket.moves, True
            for machine in bucket.usable():
                if allowance.lacks(machine):  # then it lacks the same for all of this bucket
                    barren = False
                    break
                if machine in work.taken or machine.jobs or work.refuses(machine):
                    barren = False
                elif self._fits(machine):
                    barren = False
                    yield machine
                    continue
                if self._pauses():
                    yield None
                    self.paused = False
            if barren and plain:
                bucket.missed(demand, gain, moves)
