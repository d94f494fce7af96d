"""Tasks to machines: one allocation, planned on the region's index.

Machines are ordered by the job's soft preferences bin by bin; in the best bin a machine that
the entitlement holds already comes before one from the free pool; among those it holds, the
one with the fewest tasks of the job, then the one with the most room. Each task goes to a
best bin that has room, so with the default preferences the tasks per MSB never differ by
more than one as long as there is room (docs/allocation.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.api.policy import Preference
from control_plane.core.bin_order import BinOrder, bin_order
from control_plane.core.bin_source import LOOK_AHEAD, Search, Source
from control_plane.core.explanation import explaining
from control_plane.core.feasibility import Demand, Room, judge
from control_plane.core.machine_pools import FREE, NOTHING, Bins, Bucket, Machine, Pool, Space
from control_plane.core.pools import micro
from control_plane.core.preferences import DEFAULT, Ranking
from control_plane.core.region_index import Change, Claim, Claims, RegionIndex

STEP = 500
"""Tasks that are placed between two chances for others to run."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of a job that are alike."""

    demand: Demand
    tasks: tuple[int, ...]
    leave: str = ""
    """The machine on which they cannot stay: they keep their claim there for want of another."""
    avoid: str = ""
    """The machine on which they had better not run."""
    running: bool = True
    """They run where their claims are. Otherwise a claim on a machine that takes no tasks
    now is only kept for want of another."""


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
    datacenter: str | None = None
    """None: any."""
    refuses: Callable[[Machine], str] | None = None
    """Why this one may not be taken, empty if it may."""
    unpromised: Mapping[tuple[str, str, int], int] | None = None
    """Type, data center and millionths of RRU → how many are not promised to others (CP7)."""
    _taken: dict[object, int] = field(default_factory=dict)

    def may_take_from(self, free: Pool) -> bool:
        """Return whether any machine may be taken, as far as number and types go."""
        if self.machines is not None and self.machines <= 0:
            return False
        return not self.types or any(free.per_type.get(kind) for kind in self.types)

    def lacks(self, machine: Machine) -> str:
        """Return which quota keeps another such machine out; empty: none."""
        capacity = machine.capacity
        kind = capacity.machine_type
        if self.datacenter is not None and machine.place.datacenter != self.datacenter:
            return f"not in {self.datacenter}, where the entitlement is pinned to"
        if self.types and kind not in self.types:
            return f"type {kind} is not among the entitlement's types"
        if self.machines is not None and self.machines <= 0:
            return "the quota of machines is used up"
        if self.per_type is not None and self.per_type.get(kind, 0) <= self._taken.get(kind, 0):
            return f"the quota of {kind} machines is used up"
        if self.rru is not None and capacity.rru > self.rru + 1e-9:
            return "the quota of RRU is used up"
        if self.unpromised:
            key = (kind, machine.place.datacenter, micro(capacity.rru))
            if self.unpromised.get(key, 1) <= self._taken.get(key, 0):
                return "promised to others"
        return ""

    def take(self, machine: Machine) -> None:
        """Count a machine that is taken."""
        capacity = machine.capacity
        if self.machines is not None:
            self.machines -= 1
        if self.rru is not None:
            self.rru -= capacity.rru
        kind = capacity.machine_type
        self._taken[kind] = self._taken.get(kind, 0) + 1
        if self.unpromised:
            key = (kind, machine.place.datacenter, micro(capacity.rru))
            self._taken[key] = self._taken.get(key, 0) + 1


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
    work = Planning(index, request, allowance)
    waiting = yield from work.sort_out()
    gain = index.gain
    unplaced: list[int] = []
    for group, tasks in waiting:
        left = yield from work.place(group, tasks)
        unplaced += left
    unplaced = work.without_those_that_may_stay(unplaced, waiting)
    if unplaced and request.gang:
        work.give_up(waiting, f"all or nothing was asked for, and {len(unplaced)} lack room")
        everyone = [task for _, tasks in waiting for task in tasks]
        unplaced = work.without_those_that_may_stay(everyone, waiting)
    reasons = work.reasons if unplaced else ()
    return Plan(work.change, tuple(sorted(unplaced)), tuple(reasons), gain)


class Planning:
    """One plan in the making: what it has taken and freed, which the index does not show."""

    def __init__(self, index: RegionIndex, request: Request, allowance: Allowance) -> None:
        """Plan nothing yet."""
        self.request = request
        self.allowance = allowance
        self.pool = index.pool(request.pool)
        self.free = index.pool(FREE)
        self.ranking = Ranking(request.preferences)
        self.change = Change(request.job, request.pool)
        self.spaces: dict[Machine, Space] = {}
        """What is left on machines on which the plan takes or frees something."""
        self._lone: dict[Machine, Demand] = {}
        """Machines that get one task so far: their space is made when somebody asks."""
        self.mine: dict[Machine, int] = {}
        self.taken: set[Machine] = set()
        self.gained: set[Bucket] = set()
        """Where the request itself frees room."""
        self.mine_in: dict[Bucket, list[Machine]] = {}
        """The machines in `mine`: all for preferences about single ones, else those taken."""
        self.gave_up = False
        """Whether machines were passed over that may fit."""
        self.reasons: list[str] = []
        self._claims = index.claims.get(request.job)
        self._moving: dict[int, Claim] = {}
        self._tie = zlib.crc32(request.job.encode())

    def sort_out(self) -> Generator[None, None, list[tuple[Group, list[int]]]]:
        """Tell the tasks that stay from those that need a machine, and free the rest."""
        claims = self._claims
        if claims is None:
            return [(group, list(group.tasks)) for group in self.request.groups]
        named: set[int] = set()
        waiting = []
        for group in self.request.groups:
            named.update(group.tasks)
            missing: list[int] = []
            for start in range(0, len(group.tasks), STEP):
                if start:
                    yield
                some = group.tasks[start : start + STEP]
                missing += [task for task in some if not self._stays(claims, group, task)]
            if missing:
                waiting.append((group, missing))
        for task, machine in enumerate(claims.machines):
            if machine is not None and task not in named:
                self._free(_claim(claims, task))
                if len(self.change.freed) % STEP == 0:
                    yield
        return waiting

    def _stays(self, claims: Claims, group: Group, task: int) -> bool:
        claim = claims.get(task)
        if claim is None:
            return False
        machine = claim.machine
        if machine.bucket.pool is not self.pool or not same_claim(claim.demand, group.demand):
            self._free(claim)
            return False
        unfit = machine.blocked and not group.running
        if unfit or machine.name in (group.leave, group.avoid):
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
        """Return the plan's copy of what is left on a machine."""
        space = self.spaces.get(machine)
        if space is None:
            space = self.spaces[machine] = Space(machine)
            demand = self._lone.pop(machine, None)
            if demand is not None:
                space.take(demand, machine.capacity)
        return space

    def room(self, machine: Machine) -> Room:
        """Return what is left on a machine, as the plan stands."""
        if machine in self.spaces or machine in self._lone:
            return self._space(machine)
        return machine

    def place(self, group: Group, tasks: list[int]) -> Generator[None, None, list[int]]:
        """Place tasks that are alike; return those for which nothing was found."""
        self.gave_up = False
        left = yield from self._search(group, tasks, thorough=False)
        if left and self.gave_up:
            left = yield from self._search(group, left, thorough=True)
        if left:
            reasons = yield from explaining(self, group)
            self.reasons += [reason for reason in reasons if reason not in self.reasons]
        return left

    def _search(
        self, group: Group, tasks: list[int], *, thorough: bool
    ) -> Generator[None, None, list[int]]:
        ranking = self.ranking
        own = self.pool.partition(ranking.properties)
        may_grow = self.taken or self.allowance.may_take_from(self.free)
        free = self.free.partition(ranking.properties) if may_grow else NOTHING
        order = bin_order(ranking, own, free, self._tie, growing=0 if self.taken else 1)
        self.mine_in = {}
        for known in self.mine if ranking.single else self.change.takes:
            self.mine_in.setdefault(known.bucket, []).append(known)
        search = Search(self, group, thorough=thorough)
        sources: dict[Bins, Source] = {}
        step = STEP // LOOK_AHEAD if ranking.looks_ahead else STEP
        position = done = 0
        while position < len(tasks) and order.bins is not None:
            if position - done >= step:
                done = position
                yield
            if search.is_simple:
                some = tasks[position : done + step]
                position += self._place_at_sight(search.demand, some, order, own, sources)
                if position == len(tasks) or position - done >= step or order.bins is None:
                    continue
            bins, growing = order.bins, order.growing
            if ranking.capped and ranking.is_full(bins) is not None:
                order.drop()
                continue
            source = sources.get(bins)
            if source is None:
                buckets = own.get(bins, ()), free.get(bins, ())
                source = sources[bins] = Source(self, search, *buckets)
            machine = source.take_free() if growing else source.pick()
            if source.paused:
                yield
                continue
            if machine is None:
                if not growing and bins in free:
                    order.must_grow()
                else:
                    order.drop()
                continue
            self._claim(group, tasks[position], machine, bins)
            source.used(machine)
            order.placed()
            position += 1
        return tasks[position:]

    def _place_at_sight(
        self,
        demand: Demand,
        tasks: list[int],
        order: BinOrder,
        own: Mapping[Bins, Sequence[Bucket]],
        sources: Mapping[Bins, Source],
    ) -> int:
        """Place tasks while the first machine of each bin will do; return how many.

        That is most of the work, and so it is one loop without calls that can be left out.
        """
        if self._moving or demand.ports:
            return 0
        mine, spaces, lone = self.mine, self.spaces, self._lone
        claims, add_bins = self.change.claims, self.ranking.add_bins
        placed = 0
        for task in tasks:
            if (bins := order.bins) is None or bins in sources:
                break
            machine = None
            for bucket in own.get(bins, ()):
                machine = bucket.first()
                if machine is not None:
                    break
            if (
                machine is None
                or machine in mine
                or judge(demand, machine, spaces.get(machine, machine))
            ):
                break
            mine[machine] = 1
            add_bins(bins, machine)
            if machine in spaces:
                spaces[machine].take(demand, machine.capacity)
            else:
                lone[machine] = demand
            claims.append(Claim(task, machine, demand))
            order.placed()
            placed += 1
        return placed

    def _claim(self, group: Group, task: int, machine: Machine, bins: Bins) -> None:
        self.mine[machine] = self.mine.get(machine, 0) + 1
        self.ranking.add_bins(bins, machine)
        demand = group.demand
        moving = self._moving.get(task) if self._moving else None
        if moving is not None:
            if moving.machine is machine:  # there is no better one
                return
            self._free(moving)
        ports = None
        if demand.ports or machine in self.spaces or machine in self._lone:
            space = self._space(machine)
            space.take(demand, machine.capacity)
            ports = space.pick_ports(demand.ports) if demand.ports else None
        else:
            self._lone[machine] = demand
        self.change.claims.append(Claim(task, machine, demand, ports))

    def take(self, machine: Machine) -> None:
        """Take a machine from the free pool."""
        self.taken.add(machine)
        self.change.takes.append(machine)
        self.allowance.take(machine)

    def refuses(self, machine: Machine) -> str:
        """Return why the entitlement would not have this free machine; empty: it would."""
        refuses = self.allowance.refuses
        return refuses(machine) if refuses is not None else ""

    def without_those_that_may_stay(
        self, unplaced: list[int], waiting: list[tuple[Group, list[int]]]
    ) -> list[int]:
        """Return the tasks that found no machine, and do not have one that will do either."""
        if not self._moving:
            return unplaced
        leaving = {task for group, tasks in waiting if group.leave for task in tasks}
        return [
            task
            for task in unplaced
            if task in leaving or task not in self._moving or self._moving[task].machine.blocked
        ]

    def give_up(self, waiting: list[tuple[Group, list[int]]], reason: str) -> None:
        """Place nothing after all: tasks that were to move or to change keep what they have."""
        stay = {task for _, tasks in waiting for task in tasks}
        self.change.freed = [
            claim
            for claim in self.change.freed
            if claim.task not in stay or claim.machine.bucket.pool is not self.pool
        ]
        self.change.claims.clear()
        self.change.takes.clear()
        self.reasons.insert(0, reason)


def same_claim(one: Demand, other: Demand) -> bool:
    """Return whether two demands claim the same room, whatever machines they are for."""
    return one is other or (one.size[:5] == other.size[:5] and set(one.ports) == set(other.ports))


def _claim(claims: Claims, task: int) -> Claim:
    claim = claims.get(task)
    assert claim is not None
    return claim
