"""Measures how evenly a job is spread over its bins, and finds moves that even it out.

A failure, a drain or a scale-down leaves tasks uneven, and placed tasks are not planned again (ADR
0027). These functions find the surplus tasks of each bin; a plan then finds room in other bins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace

from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.feasibility import bin_of
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.preferences import static_score
from control_plane.allocator.core.request import Plan, Request
from control_plane.allocator.core.weighted_spread import EvenSpread
from control_plane.api.policy import Preference, Property, Strategy

_Most = tuple[int, int, str]
"""(-tasks of a machine, -index of its last task, its name): the fullest machine has the least."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a task would go."""

    machine: str
    is_taken: bool = False
    """Whether it must be taken from the free pool."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a request's tasks, and why some tasks have none."""

    of: dict[int, Target]
    """Task → target; includes tasks that stay where they are."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repair:
    """A move that makes a job's spread more even by at least one task."""

    task: int
    target: Target
    from_bin: str
    to_bin: str


@dataclass(frozen=True, slots=True)
class Unevenness:
    """The bins with the most and the fewest tasks of a job."""

    property: str
    fullest: str
    most: int
    emptiest: str
    fewest: int


def even_spread(preferences: Sequence[Preference]) -> EvenSpread | None:
    """Return the first even spread of a job; None if it has none.

    A spread over machines counts only if there is no other: with one task on each machine it is
    even, wherever the machines are.
    """
    by_machine = None
    for number, preference in enumerate(preferences):
        if preference.strategy is Strategy.PACK:
            break
        if preference.strategy is Strategy.EVEN:
            over = EvenSpread.of(preference, tuple(preferences[:number]))
            if preference.property != Property.MACHINE:
                return over
            by_machine = by_machine or over
    return by_machine


def fullest_first(
    claims: Iterable[Claim], over: EvenSpread, number: int, *, for_good: bool = False
) -> list[int]:
    """Return `number` tasks to remove so that the rest is spread as evenly as possible.

    Each comes from the bin with the most tasks for its weight at that point, and there from the
    machine with the most tasks; among its tasks the highest index goes first. With `for_good`,
    tasks come from the machine with the fewest tasks of all jobs, so that whole machines become
    free (AS3).
    """
    machines: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    others, score = dict[str, int](), over.score_of_last
    for claim in claims:
        name = claim.machine.name
        tasks = machines[bin_of(over.property, claim.machine), name]
        tasks.append(claim.task)
        others[name] = len(claim.machine.jobs) - len(tasks)

    def order(name: str, tasks: list[int]) -> _Most:
        return others[name] + len(tasks) if for_good else -len(tasks), -tasks[-1], name

    of_bin: defaultdict[str, list[_Most]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for (bin_, name), tasks in machines.items():
        tasks.sort()
        of_bin[bin_].append(order(name, tasks))
        sizes[bin_] += len(tasks)
    for heap in of_bin.values():
        heapify(heap)
    bins = [(-score(bin_, sizes[bin_]), heap[0][1], bin_) for bin_, heap in of_bin.items()]
    heapify(bins)
    found: list[int] = []
    while bins and len(found) < number:
        bin_ = bins[0][2]
        heap = of_bin[bin_]
        tasks = machines[bin_, heap[0][2]]
        found.append(tasks.pop())
        sizes[bin_] -= 1
        if tasks:
            heapreplace(heap, order(heap[0][2], tasks))
        else:
            heappop(heap)
        if heap:
            heapreplace(bins, (-score(bin_, sizes[bin_]), heap[0][1], bin_))
        else:
            heappop(bins)
    return found


def next_to_move(
    claims: Iterable[Claim], over: EvenSpread, number: int
) -> tuple[set[int], set[str]]:
    """Return tasks that a move may improve, and their machines; both empty if there are none."""
    known = list(claims)
    if not may_gain(known, over):
        return set(), set()
    tried = {*fullest_first(known, over, number)}
    return tried, {claim.machine.name for claim in known if claim.task in tried}


def may_gain(claims: Iterable[Claim], over: EvenSpread) -> bool:
    """Return whether a move could make the spread more even, if there is room.

    With at most one task per bin, neither a bin nor a machine has too many.
    """
    if over.weights:
        return True
    counts = Counter(bin_of(over.property, claim.machine) for claim in claims)
    return max(counts.values(), default=0) > 1


def unevenness(
    claims: Iterable[Claim], over: EvenSpread, bins: Iterable[str] = ()
) -> Unevenness | None:
    """Return the bins that differ most, if a move would gain; `bins` adds bins without tasks."""
    counts = Counter(bin_of(over.property, claim.machine) for claim in claims)
    for name in bins:
        counts.setdefault(name, 0)
    if not counts:
        return None
    fullest = max(sorted(counts), key=lambda bin_: over.score_of_last(bin_, counts[bin_]))
    emptiest = min(sorted(counts), key=lambda bin_: over.score_of_next(bin_, counts[bin_]))
    if over.score_of_last(fullest, counts[fullest]) <= over.score_of_next(
        emptiest, counts[emptiest]
    ):
        return None
    return Unevenness(over.property, fullest, counts[fullest], emptiest, counts[emptiest])


def trial_request(request: Request, tasks: Iterable[int], machines: Iterable[str]) -> Request:
    """Return a request in which only these tasks look for machines, other than `machines`.

    Its plan moves no other task, and shows for each whether there is a better place.
    """
    tried, left = frozenset(tasks), frozenset(machines)
    groups = []
    for group in request.groups:
        staying = tuple(task for task in group.tasks if task not in tried)
        moving = tuple(task for task in group.tasks if task in tried)
        if staying:
            groups.append(replace(group, tasks=staying, running=True))
        if moving:
            groups.append(replace(group, tasks=moving, leave=group.leave | left, running=True))
    return Request(request.job, request.pool, tuple(groups), request.preferences, request.fit)


def targets_of(request: Request, plan: Plan, claims: Iterable[Claim]) -> Targets:
    """Return the target of each task that a request names, according to its plan."""
    named = {task for group in request.groups for task in group.tasks}
    found = {claim.task: Target(claim.machine.name) for claim in claims if claim.task in named}
    for task in plan.unplaced:
        found.pop(task, None)
    for claim in plan.change.freed:
        found.pop(claim.task, None)
    taken = {machine.name for machine in plan.change.takes}
    for claim in plan.change.claims:
        found[claim.task] = Target(claim.machine.name, claim.machine.name in taken)
    return Targets(found, plan.reasons)


def improving_moves(
    claims: Iterable[Claim], over: EvenSpread, plan: Plan, most: int
) -> tuple[Repair, ...]:
    """Return the moves of a plan that make the spread more even by at least a task, in order.

    A move is between bins, or within a bin between machines of the pool. For a move within a bin
    no machine is taken from the free pool.
    """
    if not plan.change.claims:
        return ()
    was: dict[int, Machine] = {claim.task: claim.machine for claim in claims}
    bins = Counter(bin_of(over.property, machine) for machine in was.values())
    machines = Counter(machine.name for machine in was.values())
    taken = {machine.name for machine in plan.change.takes}
    found: list[Repair] = []
    for claim in plan.change.claims:
        before, after = was.get(claim.task), claim.machine
        if before is None or len(found) == most:
            continue
        if _worsens(over.higher_ranked, before, after, machines):
            continue
        from_bin, to_bin = bin_of(over.property, before), bin_of(over.property, after)
        is_taken = after.name in taken
        if from_bin == to_bin:
            gains = not is_taken and machines[before.name] - machines[after.name] >= 2
        else:
            gains = over.score_of_last(from_bin, bins[from_bin]) > over.score_of_next(
                to_bin, bins[to_bin]
            )
        if gains:
            found.append(Repair(claim.task, Target(after.name, is_taken), from_bin, to_bin))
            bins.update({to_bin: 1, from_bin: -1})
            machines.update({after.name: 1, before.name: -1})
    return tuple(found)


def _worsens(
    preferences: Iterable[Preference], before: Machine, after: Machine, tasks: Counter[str]
) -> bool:
    """Return whether a move between machines makes any of these preferences worse."""
    for preference in preferences:
        if preference.strategy is Strategy.EVEN:
            if preference.property == Property.MACHINE and tasks[after.name] >= tasks[before.name]:
                return True
        elif static_score(preference, after) > static_score(preference, before):
            return True
    return False
