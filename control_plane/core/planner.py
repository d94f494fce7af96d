"""Tasks to machines: one allocation, planned on the region's index.

Machines are ordered by the job's soft preferences bin by bin; in the best bin a machine that
the entitlement holds already comes before one from the free pool; among those it holds, the
one with the fewest tasks of the job, then the one with the most room. Each task goes to a
best bin that has room, so with the default preferences the tasks per MSB never differ by
more than one as long as there is room (docs/allocation.md).
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.api.policy import Preference
from control_plane.core.bin_order import BinOrder
from control_plane.core.feasibility import Capacity, Demand, Tally, judge
from control_plane.core.machine_pools import FREE, Bins, Bucket, Machine, Pool, Space
from control_plane.core.preferences import DEFAULT, Ranking
from control_plane.core.region_index import Change, Claim, Claims, RegionIndex

LOOK_AHEAD = 64
"""Fitting machines of equal bins that are compared where single machines differ."""
LOOK_MOST = 256
"""Machines without room that one search in a bucket passes over before it gives the bucket
up. Only if tasks are left over in the end are those buckets searched to their end."""
STEP = 500
"""Tasks that are placed between two chances for others to run."""
_EXPLAINED = 20_000
"""Machines that are judged for the reasons of an allocation that was not complete."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of a job that are alike."""

    demand: Demand
    tasks: tuple[int, ...]
    leave: str = ""
    """The machine on which they cannot stay: they keep their claim there for want of another."""
    avoid: str = ""
    """The machine on which they had better not run."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a job needs, whole: tasks that are not named give their machines back."""

    job: str
    pool: str
    groups: tuple[Group, ...] = ()
    preferences: tuple[Preference, ...] = DEFAULT
    gang: bool = False
    """All tasks that have no machine get one, or none of them does."""


@dataclass(slots=True)
class Allowance:
    """Which machines of the free pool an entitlement may still take."""

    machines: int | None = None
    """None: as many as there are."""
    rru: float | None = None
    per_type: Mapping[str, int] | None = None
    """Type → how many more; other types may not be taken."""
    types: frozenset[str] = frozenset()
    """Empty: any."""
    refuses: Callable[[Machine], str] | None = None
    """Why this one may not be taken, empty if it may."""
    _taken: dict[str, int] = field(default_factory=dict)

    @property
    def is_left(self) -> bool:
        """Whether any machine may be taken, as far as their number goes."""
        return self.machines is None or self.machines > 0

    def lacks(self, capacity: Capacity) -> str:
        """Return which quota keeps another such machine out; empty: none."""
        kind = capacity.machine_type
        if self.types and kind not in self.types:
            return f"type {kind} is not among the entitlement's types"
        if self.machines is not None and self.machines <= 0:
            return "the quota of machines is used up"
        if self.per_type is not None and self.per_type.get(kind, 0) <= self._taken.get(kind, 0):
            return f"the quota of {kind} machines is used up"
        if self.rru is not None and capacity.rru > self.rru + 1e-9:
            return "the quota of RRU is used up"
        return ""

    def take(self, capacity: Capacity) -> None:
        """Count a machine that is taken."""
        if self.machines is not None:
            self.machines -= 1
        if self.rru is not None:
            self.rru -= capacity.rru
        kind = capacity.machine_type
        self._taken[kind] = self._taken.get(kind, 0) + 1


@dataclass(slots=True)
class Plan:
    """What an allocation changes, and what it could not do."""

    change: Change
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    gain: int = 0
    """`RegionIndex.gain` when it was made: until that rises, nothing more has room."""


def plan(index: RegionIndex, request: Request, allowance: Allowance) -> Plan:
    """Return the whole plan for a request; changes nothing."""
    steps = planning(index, request, allowance)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            made: Plan = stop.value
            return made


def planning(
    index: RegionIndex, request: Request, allowance: Allowance
) -> Generator[None, None, Plan]:
    """Make a plan in steps of bounded time; its value is the plan."""
    work = _Planning(index, request, allowance)
    waiting = work.sort_out()
    gain = index.gain
    unplaced: list[int] = []
    for group, tasks in waiting:
        left = yield from work.place(group, tasks)
        unplaced += left
    if unplaced and request.gang:
        work.give_up(f"all or nothing was asked for, and {len(unplaced)} lack room")
        unplaced = [task for _, tasks in waiting for task in tasks]
    work.keep_claims_of(set(unplaced))
    reasons = work.reasons if unplaced else ()
    return Plan(work.change, tuple(sorted(unplaced)), tuple(reasons), gain)


class _Planning:
    """One plan in the making."""

    def __init__(self, index: RegionIndex, request: Request, allowance: Allowance) -> None:
        self.request = request
        self.allowance = allowance
        self.pool = index.pool(request.pool)
        self.free = index.pool(FREE)
        self.ranking = Ranking(request.preferences)
        self.change = Change(request.job, request.pool)
        self.spaces: dict[Machine, Space] = {}
        self.mine: dict[Machine, int] = {}
        self.taken: set[Machine] = set()
        self.gained: set[Bucket] = set()
        """Where the request itself frees room."""
        self.reasons: list[str] = []
        self._claims = index.claims.get(request.job)
        self._moving: dict[int, Claim] = {}
        self._tie = zlib.crc32(request.job.encode())

    def sort_out(self) -> list[tuple[Group, list[int]]]:
        """Tell the tasks that stay from those that need a machine, and free the rest."""
        claims = self._claims
        if claims is None:
            return [(group, list(group.tasks)) for group in self.request.groups]
        named: set[int] = set()
        waiting = []
        for group in self.request.groups:
            named.update(group.tasks)
            missing = [task for task in group.tasks if not self._stays(claims, group, task)]
            if missing:
                waiting.append((group, missing))
        for task, machine in enumerate(claims.machines):
            if machine is not None and task not in named:
                self._free(_claim(claims, task))
        return waiting

    def _stays(self, claims: Claims, group: Group, task: int) -> bool:
        claim = claims.get(task)
        if claim is None:
            return False
        machine = claim.machine
        if machine.bucket.pool is not self.pool or not same_claim(claim.demand, group.demand):
            self._free(claim)
            return False
        if machine.name == group.leave:
            self._moving[task] = claim
            return False
        self.ranking.add(machine)
        self.mine[machine] = self.mine.get(machine, 0) + 1
        return True

    def _free(self, claim: Claim) -> None:
        self.change.freed.append(claim)
        self.gained.add(claim.machine.bucket)
        self._space(claim.machine).take(claim.demand, claim.machine.capacity, -1)

    def _space(self, machine: Machine) -> Space:
        space = self.spaces.get(machine)
        if space is None:
            space = self.spaces[machine] = Space(machine)
        return space

    def place(self, group: Group, tasks: list[int]) -> Generator[None, None, list[int]]:
        """Place tasks that are alike; return those for which nothing was found."""
        left = yield from self._search(group, tasks, thorough=False)
        if left:
            left = yield from self._search(group, left, thorough=True)
        if left:
            self._explain(group)
        return left

    def _search(
        self, group: Group, tasks: list[int], *, thorough: bool
    ) -> Generator[None, None, list[int]]:
        ranking = self.ranking
        own = self.pool.partition(ranking.properties)
        free = self.free.partition(ranking.properties) if self.allowance.is_left else {}
        everywhere = [(bins, 0) for bins in own]
        everywhere += [(bins, 1) for bins in free if bins not in own]
        order = BinOrder(ranking, everywhere, self._tie)
        sources: dict[Bins, _Source] = {}
        position = 0
        while position < len(tasks) and (best := order.best()) is not None:
            bins, growing = best
            source = sources.get(bins)
            if source is None:
                buckets = own.get(bins, ()), free.get(bins, ())
                source = sources[bins] = _Source(self, group, *buckets, thorough=thorough)
            machine = None
            if not ranking.capped or ranking.is_full(bins) is None:
                machine = source.take_free() if growing else source.pick()
                if machine is None and not growing and bins in free:
                    order.must_grow()
                    continue
            if machine is None:
                order.drop()
                continue
            self._claim(group, tasks[position], machine, bins)
            source.used(machine)
            order.placed()
            position += 1
            if position % STEP == 0:
                yield
        return tasks[position:]

    def _claim(self, group: Group, task: int, machine: Machine, bins: Bins) -> None:
        demand = group.demand
        space = self._space(machine)
        space.take(demand, machine.capacity)
        moving = self._moving.pop(task, None) if self._moving else None
        if moving is not None:
            self._free(moving)
        self.change.claims.append(Claim(task, machine, demand, space.pick_ports(demand)))
        self.mine[machine] = self.mine.get(machine, 0) + 1
        self.ranking.add_bins(bins, machine)

    def take(self, machine: Machine) -> None:
        """Take a machine from the free pool."""
        self.taken.add(machine)
        self.change.takes.append(machine)
        self.allowance.take(machine.capacity)

    def keep_claims_of(self, unplaced: set[int]) -> None:
        """Tasks that were to leave a machine, and found no other, stay with it."""
        for task in list(self._moving):
            if task in unplaced:
                del self._moving[task]

    def give_up(self, reason: str) -> None:
        """Place nothing after all."""
        self.change.claims.clear()
        self.change.takes.clear()
        self.reasons.insert(0, reason)

    def _explain(self, group: Group) -> None:
        """Say why tasks have no machine: by groups of machines, quotas and limits."""
        reasons = list(explain(self, group))
        self.reasons += [reason for reason in reasons if reason not in self.reasons]


def same_claim(one: Demand, other: Demand) -> bool:
    """Return whether two demands claim the same room, whatever machines they are for."""
    return one is other or one.size[:6] == other.size[:6]


def _claim(claims: Claims, task: int) -> Claim:
    claim = claims.get(task)
    assert claim is not None
    return claim


class _Source:
    """Offers the machines of equal bins for one group of tasks, best first."""

    __slots__ = (
        "_again",
        "_ahead",
        "_demand",
        "_free",
        "_fresh",
        "_group",
        "_order",
        "_thorough",
        "_work",
    )

    def __init__(
        self,
        work: _Planning,
        group: Group,
        own: Sequence[Bucket],
        free: Sequence[Bucket],
        *,
        thorough: bool,
    ) -> None:
        self._work = work
        self._group = group
        self._demand = group.demand
        self._thorough = thorough
        self._order = 0
        self._again: list[tuple[int, int, Machine]] = []
        """Machines with tasks of the job, fewest first: (tasks, order, machine)."""
        self._ahead: list[Machine] = []
        self._fresh = self._own(own)
        self._free = self._takeable(free)

    def pick(self) -> Machine | None:
        """Return the best machine of the pool that has room."""
        ranking = self._work.ranking
        if ranking.packs_machines and (machine := self._pick_again(most=True)):
            return machine
        machine = self._pick_ahead() if ranking.looks_ahead else next(self._fresh, None)
        return machine or self._pick_again(most=False)

    def take_free(self) -> Machine | None:
        """Take the best machine of the free pool that has room."""
        machine = next(self._free, None)
        if machine is not None:
            self._work.take(machine)
        return machine

    def used(self, machine: Machine) -> None:
        """Offer a machine again, after those with fewer tasks of the job."""
        self._order += 1
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

    def _pick_ahead(self) -> Machine | None:
        """Return the best of the next machines by preferences about single machines."""
        while len(self._ahead) < LOOK_AHEAD and (machine := next(self._fresh, None)):
            self._ahead.append(machine)
        ranking = self._work.ranking
        self._ahead = [m for m in self._ahead if not ranking.is_single_full(m)]
        if not self._ahead:
            return None
        best = min(self._ahead, key=ranking.score_single)
        self._ahead.remove(best)
        return best

    def _fits(self, machine: Machine) -> bool:
        work = self._work
        if judge(self._demand, machine, work.spaces.get(machine) or machine):
            return False
        if machine.name == self._group.leave:
            return False
        if machine.name == self._group.avoid and not self._thorough:
            return False
        return not (work.ranking.limited and work.ranking.is_single_full(machine))

    def _own(self, buckets: Sequence[Bucket]) -> Iterator[Machine]:
        """Yield fitting machines of the pool on which the job has no task yet."""
        work, demand, spaces = self._work, self._demand, self._work.spaces
        fullest_first = work.ranking.packs_machines
        plain = not (self._group.leave or self._group.avoid or work.ranking.limited)
        for bucket in buckets:
            if not bucket.size or (bucket not in work.gained and bucket.is_hopeless(demand)):
                continue
            gain, barren, passed = bucket.gain, True, 0
            for machine in bucket.usable(fullest_first=fullest_first):
                if machine in work.mine:
                    barren = False
                    self.used(machine)
                elif (
                    not judge(demand, machine, spaces.get(machine) or machine)
                    if plain
                    else self._fits(machine)
                ):
                    barren = False
                    yield machine
                else:
                    barren = barren and machine not in spaces
                    passed += 1
                    if passed > LOOK_MOST and not self._thorough:
                        barren = False
                        break
            if barren and plain:
                bucket.missed(demand, gain)

    def _takeable(self, buckets: Sequence[Bucket]) -> Iterator[Machine]:
        """Yield fitting machines of the free pool that the entitlement may take."""
        work, allowance = self._work, self._work.allowance
        for bucket in buckets:
            if bucket.is_hopeless(self._demand):
                continue
            gain, barren = bucket.gain, True
            for machine in bucket.usable():
                if allowance.lacks(machine.capacity):
                    barren = False
                    break
                if machine in work.taken or machine.jobs:
                    barren = False
                    continue
                if allowance.refuses is not None and allowance.refuses(machine):
                    barren = False
                    continue
                if self._fits(machine):
                    barren = False
                    yield machine
            if barren and not (self._group.leave or self._group.avoid or work.ranking.limited):
                bucket.missed(self._demand, gain)


def explain(work: _Planning, group: Group) -> Iterator[str]:
    """Yield every reason why tasks of a group have no machine, per group of machines."""
    held = Tally(group.demand)
    _count(held, work, work.pool)
    if held.machines:
        yield from held.reasons()
    else:
        yield "the entitlement holds no machine yet"
    limits: dict[str, int] = {}
    for bins in work.pool.partition(work.ranking.properties):
        full = work.ranking.is_full(bins)
        if full is not None and full.at_most is not None:
            key = f"{full.property} would get {full.at_most + 1} tasks > {full.at_most}"
            limits[key] = limits.get(key, 0) + 1
    yield from limits
    yield from _explain_free(work, group)


def _explain_free(work: _Planning, group: Group) -> Iterator[str]:
    lacks: dict[str, int] = {}
    free = Tally(group.demand)
    for number, machine in enumerate(work.free.machines()):
        if number >= _EXPLAINED:
            break
        why = work.allowance.lacks(machine.capacity)
        if not why and work.allowance.refuses is not None:
            why = work.allowance.refuses(machine)
        if why:
            lacks[why] = lacks.get(why, 0) + 1
        elif machine not in work.taken:
            free.add(machine, work.spaces.get(machine) or machine)
    if not work.free.size:
        yield "the free pool is empty"
    for why, count in lacks.items():
        yield f"{count} free machine{'s' if count > 1 else ''}: {why}"
    for reason in free.reasons():
        yield reason.replace(" machine", " free machine", 1)


def _count(tally: Tally, work: _Planning, pool: Pool) -> None:
    for number, machine in enumerate(pool.machines()):
        if number >= _EXPLAINED:
            break
        tally.add(machine, work.spaces.get(machine) or machine)
