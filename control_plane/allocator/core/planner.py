"""Tasks to machines: one allocation, planned on the region's index.

Machines are ordered by the job's soft preferences bin by bin; in the best bin a machine that
the entitlement holds already comes before one from the free pool; among those it holds, the
one with the fewest tasks of the job, then the one with the most room. Each task goes to a
best bin that has room, so with the default preferences the tasks per MSB never differ by
more than one as long as there is room (docs/allocation.md).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from control_plane.allocator.core.bin_order import BinOrder, bin_order
from control_plane.allocator.core.bin_source import LOOK_AHEAD, Search, Source
from control_plane.allocator.core.claims import Claim, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.explanation import explaining
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.machine_pools import NOTHING, Bins, Bucket, Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Plan, Request, same_claim

STEP = 500
"""Tasks that are placed between two chances for others to run."""


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
    gain = index.gains(request.pool)
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


class Planning(Draft):
    """The search for machines, on a draft of the plan."""

    def sort_out(self) -> Generator[None, None, list[tuple[Group, list[int]]]]:
        """Tell the tasks that stay from those that need a machine, and free the rest."""
        claims = self.claims
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
                self.free_claim(_claim(claims, task))
                if len(self.change.freed) % STEP == 0:
                    yield
        return waiting

    def _stays(self, claims: Claims, group: Group, task: int) -> bool:
        claim = claims.get(task)
        if claim is None:
            return False
        machine = claim.machine
        if machine.bucket.pool is not self.pool or not same_claim(claim.demand, group.demand):
            self.free_claim(claim)
            return False
        unfit = machine.blocked and not group.running
        if unfit or machine.name in group.leave or machine.name == group.avoid:
            self.moving[task] = claim
            return False
        self.ranking.add(machine)
        self.mine[machine] = self.mine.get(machine, 0) + 1
        return True

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
        order = bin_order(ranking, own, free, self.tie, growing=0 if self.taken else 1)
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
        if self.moving or demand.ports:
            return 0
        mine, spaces, lone = self.mine, self.spaces, self.lone
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
        moving = self.moving.get(task) if self.moving else None
        if moving is not None:
            if moving.machine is machine:  # there is no better one
                return
            self.free_claim(moving)
        ports = None
        if demand.ports or machine in self.spaces or machine in self.lone:
            space = self.space(machine)
            space.take(demand, machine.capacity)
            ports = space.pick_ports(demand.ports) if demand.ports else None
        else:
            self.lone[machine] = demand
        self.change.claims.append(Claim(task, machine, demand, ports))

    def without_those_that_may_stay(
        self, unplaced: list[int], waiting: list[tuple[Group, list[int]]]
    ) -> list[int]:
        """Return the tasks that found no machine, and do not have one that will do either."""
        if not self.moving:
            return unplaced
        leaving = {task for group, tasks in waiting if group.leave for task in tasks}
        return [
            task
            for task in unplaced
            if task in leaving or task not in self.moving or self.moving[task].machine.blocked
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


def _claim(claims: Claims, task: int) -> Claim:
    claim = claims.get(task)
    assert claim is not None
    return claim
