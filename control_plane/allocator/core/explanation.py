"""Explains why tasks have no machine: all reasons, each with the number of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import islice

from control_plane.allocator.core.class_maxima import FREE_OF
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import Tally
from control_plane.allocator.core.free_space_classes import ALL, BY_CLASS, EMPTY, LEAST
from control_plane.allocator.core.machine_pools import Bucket, Machine, Pool
from control_plane.allocator.core.request import Group
from control_plane.api.requirements import Because, text_of
from control_plane.broker.core.matching import holds

_EXPLAINED = 1_000
"""Machines of one pool that an explanation counts; `twinectl job explain` counts all of them."""
_MACHINES = 20_000
"""Machines that are searched for the roomiest one between two checkpoints of the loop."""
_PAUSE_AFTER = 1_000
"""Machines that are judged between two checkpoints of the loop."""


def explanation_steps(draft: Draft, group: Group) -> Generator[None, None, list[str]]:
    """Return all reasons why tasks of a group have no machine, in steps of bounded time."""
    held, limits = Tally(group.demand), Counter[str]()
    yield from _tally_machines(draft, group, _held_machines(draft), held, limits)
    if held.machines >= _EXPLAINED:
        yield from _compare_all(draft, group.demand, draft.pool, held)
    reasons = list(held.reasons()) if held.machines else ["the entitlement holds no machine yet"]
    reasons += [*_limit_lines(limits, "machine"), *held.overlap(limits.total())]
    if held.machines >= _EXPLAINED:
        reasons.append(f"these are {_EXPLAINED} of the entitlement's {draft.pool.size} machines")
    free, limits, refused = Tally(group.demand), Counter[str](), Counter[str]()
    yield from _tally_machines(draft, group, _takeable_machines(draft, refused), free, limits)
    overlap = free.overlap(limits.total())
    limits = refused + limits
    if free.machines >= _EXPLAINED:
        yield from _compare_all(draft, group.demand, draft.free, free)
        reasons.append(f"these are {_EXPLAINED} of {draft.free.size} free machines")
    if not draft.free.size:
        reasons.append("the free pool is empty")
    reasons += _limit_lines(limits, "free machine")
    of_free = [*free.reasons(), *overlap]
    return reasons + [reason.replace(" machine", " free machine", 1) for reason in of_free]


def _tally_machines(
    draft: Draft, group: Group, machines: Iterator[Machine], tally: Tally, limits: Counter[str]
) -> Generator[None, None, None]:
    for number, machine in enumerate(islice(machines, _EXPLAINED)):
        if number % _PAUSE_AFTER == _PAUSE_AFTER - 1:
            yield
        tally.add(machine, draft.room(machine), draft.why_short(machine))
        if draft.ranking.capped:
            limits.update(draft.ranking.limits_reached(machine))
        if machine.name in group.leave:
            limits["is to be emptied"] += 1
        for term in group.among:
            if not holds(term, machine):
                limits[term.reason if isinstance(term, Because) else text_of(term)] += 1


def _compare_all(
    draft: Draft, demand: Demand, pool: Pool, tally: Tally
) -> Generator[None, None, None]:
    """Find the largest free amount on any machine of a pool, of each resource that tasks lack.

    In each bucket, only space classes that may hold the largest amount are searched.
    """
    lacks, seen = tally.lacks(), 0
    for bucket in list(pool.buckets.values()):
        seen += bucket.size
        if seen > _MACHINES:
            seen = 0
            yield
        for kind, wanted in (
            ("memory", demand.memory_bytes),
            ("cpu", demand.cpu_on(bucket.capacity)),
            ("gpus", demand.gpus),
            ("network", demand.network_mbps),
            ("disk", demand.disk_bytes),
        ):
            if kind in lacks:
                machine = _roomiest(bucket, kind, wanted)
                if machine is not None:
                    tally.compare(machine, draft.room(machine))


def _roomiest(bucket: Bucket, kind: str, wanted: float) -> Machine | None:
    """Return the machine that has most of a resource, but less than wanted."""
    free, empty = FREE_OF[kind], bucket.by_class[EMPTY]
    if empty and free(empty[0]) < wanted:
        return empty[0]
    whole = {"memory": bucket.capacity.memory_bytes, "cpu": bucket.capacity.cpu_room}.get(kind, 0)
    by_class = whole and not bucket.is_scarce
    for group, least in zip(BY_CLASS[kind], LEAST, strict=True) if by_class else ((ALL[0], 0.0),):
        if least and least * whole >= wanted:
            continue  # each of these machines has enough
        some = [
            machine
            for space_class in group
            if (machine := _most_below(bucket, kind, space_class, wanted))
        ]
        if some:
            return max(some, key=free)
    return None


def _most_below(bucket: Bucket, kind: str, space_class: int, wanted: float) -> Machine | None:
    free, found = FREE_OF[kind], bucket.roomiest(kind, space_class)
    if found is None or free(found) < wanted:
        return found
    row = bucket.by_class[space_class] or ()
    return max((m for m in row if free(m) < wanted), key=free, default=None)


def _held_machines(draft: Draft) -> Iterator[Machine]:
    """Yield the machines of the entitlement, including those that this plan takes."""
    yield from draft.pool.machines()
    yield from draft.change.takes


def _takeable_machines(draft: Draft, limits: Counter[str]) -> Iterator[Machine]:
    """Yield the free machines that the entitlement may take, and count the others.

    Quotas are the same for all machines of a bucket, so most of them are counted as one.
    """
    for bucket in list(draft.free.buckets.values()):
        sample = next(bucket.machines(), None)
        why = sample is not None and (draft.allowance.lacks(sample) or draft.refuses_all(bucket))
        if why:
            others = bucket.size - sum(machine.bucket is bucket for machine in draft.taken)
            if others > 0:
                limits[why] += others
            continue
        for machine in bucket.machines():
            if machine in draft.taken:
                continue
            if refusal := draft.refuses(machine):
                limits[refusal] += 1
            else:
                yield machine


def _limit_lines(limits: Counter[str], what: str) -> list[str]:
    return [f"{n} {what}{'s' if n > 1 else ''}: {limit}" for limit, n in limits.items()]
