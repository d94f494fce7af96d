"""Plans one allocation on the region's index: assigns tasks to machines.

The job's soft preferences order the bins. In the best bin, machines of the entitlement come before
free ones; among its machines, those with the fewest tasks of the job come first, then those with
the most room. Each task goes to a best bin that has room. So with the default preferences the tasks
per MSB differ by at most one, as long as there is room (docs/allocation.md).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from control_plane.allocator.core.claims import Claim, Claims
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.explanation import explanation_steps
from control_plane.allocator.core.fine_bins import fine_bins
from control_plane.allocator.core.group_placement import GroupPlacement
from control_plane.allocator.core.machine_pools import Binned, Bucket, Part
from control_plane.allocator.core.machine_search import Search
from control_plane.allocator.core.partition import Bins, Partition
from control_plane.allocator.core.region_index import RegionIndex, run_to_end
from control_plane.allocator.core.request import Allowance, Group, Plan, Request, same_claim
from control_plane.broker.core.assignment import FREE

NOTHING = Partition[Bucket]()
_COMPARED, _FREED = 200, 500
"""Tasks that one step compares with their claims, and claims that it frees."""


def plan(index: RegionIndex, request: Request, allowance: Allowance) -> Plan:
    """Return the whole plan for a request; changes nothing."""
    return run_to_end(planning(index, request, allowance))


def planning(
    index: RegionIndex, request: Request, allowance: Allowance
) -> Generator[None, None, Plan]:
    """Make a plan in steps of bounded time; its value is the plan."""
    draft = Planning(index, request, allowance)
    waiting = yield from draft.find_tasks_to_place()
    gain = index.gains(request.pool)
    unplaced: list[int] = []
    for group, tasks in waiting:
        begun = len(draft.change.claims)
        unplaced += yield from draft.place(group, tasks)
        draft.keep_tasks_in_place(begun)
    unplaced = draft.without_tasks_that_may_stay(unplaced, waiting)
    if unplaced and request.gang:
        draft.abandon_moves(waiting, f"all or nothing was requested, and {len(unplaced)} lack room")
        everyone = [task for _, tasks in waiting for task in tasks]
        unplaced = draft.without_tasks_that_may_stay(everyone, waiting)
    reasons = draft.reasons if unplaced else ()
    return Plan(draft.change, tuple(sorted(unplaced)), tuple(reasons), gain)


class Planning(Draft):
    """The search for machines, on a draft of the plan."""

    def find_tasks_to_place(self) -> Generator[None, None, list[tuple[Group, list[int]]]]:
        """Return the tasks that need a machine, by group; free claims of tasks not requested."""
        claims = self.claims
        if claims is None:
            return [(group, list(group.tasks)) for group in self.request.groups]
        named: set[int] = set()
        waiting = []
        for group in self.request.groups:
            named.update(group.tasks)
            missing: list[int] = []
            for start in range(0, len(group.tasks), _COMPARED):
                if start:
                    yield
                some = group.tasks[start : start + _COMPARED]
                missing += [task for task in some if not self._stays(claims, group, task)]
            if missing:
                waiting.append((group, missing))
        for task, machine in enumerate(claims.machines):
            if machine is not None and task not in named:
                self.free_claim(_existing_claim(claims, task))
                if len(self.change.freed) % _FREED == 0:
                    yield
        return waiting

    def _stays(self, claims: Claims, group: Group, task: int) -> bool:
        claim = claims.get(task)
        if claim is None:
            return False
        machine = claim.machine
        is_ours = machine.pool == self.request.pool or machine.pool == group.elsewhere != FREE
        if not is_ours or not same_claim(claim.demand, group.demand):
            self.free_claim(claim)
            return False
        unfit = machine.blocked and not group.running
        if unfit or machine.name in group.leave or machine.name == group.avoid:
            self.moving[task] = claim
            return False
        self.ranking.count_task(machine)
        self.tasks_on[machine] = self.tasks_on.get(machine, 0) + 1
        return True

    def place(self, group: Group, tasks: list[int]) -> Generator[None, None, list[int]]:
        """Place the equal tasks of a group; return those for which no machine was found."""
        self.skipped_avoided = False
        search = Search(self, group, self.totals)
        may_grow = bool(self.taken) or self.allowance.may_take_from(self.free)
        pools = (self.pool, self.free) if may_grow else (self.pool,)
        plain = search.plain and not self.freeing_buckets
        left = tasks
        if not plain or not all(pool.is_no_fit(group.demand) for pool in pools):
            left = yield from self._search(search, tasks, may_grow=may_grow)
            if left and self.skipped_avoided:
                search = Search(self, group, self.totals, may_be_avoided=True)
                left = yield from self._search(search, left, may_grow=may_grow)
            if left and plain:
                for pool in pools:
                    pool.note_no_fit(group.demand)
        if left:
            reasons = yield from self._explained(group, may_grow=may_grow, plain=plain)
            self.reasons += [reason for reason in reasons if reason not in self.reasons]
        return left

    def _explained(
        self, group: Group, *, may_grow: bool, plain: bool
    ) -> Generator[None, None, Sequence[str]]:
        """Return why tasks have no machine; cached for equal tasks until room is gained.

        Judging thousands of machines takes longer than planning. Without the cache, plans in a full
        region would be slow just when many jobs wait.
        """
        alike = plain and not self.ranking.capped
        key = (self.pool.name, group.demand, may_grow)
        gains = self.index.gains(self.pool.name)
        known = self.index.reasons.get(key) if alike else None
        if known is not None and known[0] == gains:
            return known[1]
        reasons = yield from explanation_steps(self, group)
        if alike and not self.was_refused:
            self.index.remember_reasons(key, gains, reasons)
        return reasons

    def _search(
        self, search: Search, tasks: list[int], *, may_grow: bool
    ) -> Generator[None, None, list[int]]:
        """Place tasks; the value is those for which no machine was found."""
        ranking = self.ranking
        if ranking.is_plain:
            own: Binned = self.pool.partition(ranking.properties)
            free: Binned = self.free.partition(ranking.properties) if may_grow else NOTHING
        else:
            own, free = yield from self._binned(may_grow=may_grow)
        return (yield from GroupPlacement(self, search, tasks, own, free).steps())

    def _binned(self, *, may_grow: bool) -> Generator[None, None, tuple[Binned, Binned]]:
        """Partition the machines by bins that are finer than buckets, or specific to this job."""
        ranking, found = self.ranking, list[dict[Bins, list[Part]]]()
        if ranking.is_fine and not ranking.by_machine:
            own_bins: Binned = yield from fine_bins(self.pool, ranking)
            free_bins = (yield from fine_bins(self.free, ranking)) if may_grow else NOTHING
            return own_bins, free_bins
        for pool in (self.pool, self.free):
            binned: dict[Bins, list[Part]] = {}
            found.append(binned)
            if pool is self.free and not may_grow:
                break
            if ranking.is_fine:
                fine = yield from fine_bins(pool, ranking)
                binned.update((bins, [*parts]) for bins, parts in fine.items())
                continue
            for bucket in list(pool.buckets.values()):
                binned.setdefault(ranking.common_bins(bucket), []).append(bucket)
        own, free = found
        self.with_own_bins = set()
        for name in self.ranking.named:
            machine = self.index.machines.get(name)
            if machine is not None and machine.pool == self.request.pool:
                self.give_own_bins(machine, own)
            elif machine is not None and machine.pool == FREE and may_grow:
                self.give_own_bins(machine, own if machine in self.taken else free)
        if self.ranking.counts_machines:
            for machine in self.tasks_on:
                if machine not in self.with_own_bins:
                    self.give_own_bins(machine, own)
        return own, free

    def without_tasks_that_may_stay(
        self, unplaced: list[int], waiting: list[tuple[Group, list[int]]]
    ) -> list[int]:
        """Return the unplaced tasks that cannot stay on their present machine."""
        if not self.moving:
            return unplaced
        leaving = {task for group, tasks in waiting if group.leave for task in tasks}
        return [
            task
            for task in unplaced
            if task in leaving or task not in self.moving or self.moving[task].machine.blocked
        ]

    def abandon_moves(self, waiting: list[tuple[Group, list[int]]], reason: str) -> None:
        """Drop the planned claims: tasks that would move or change keep their present ones."""
        stay = {task for _, tasks in waiting for task in tasks}
        self.change.freed = [
            claim
            for claim in self.change.freed
            if claim.task not in stay or claim.machine.pool != self.request.pool
        ]
        self.change.claims.clear()
        self.change.takes.clear()
        self.reasons.insert(0, reason)


def _existing_claim(claims: Claims, task: int) -> Claim:
    claim = claims.get(task)
    assert claim is not None
    return claim
