"""Why tasks have no machine: every reason at once, per group of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import chain, islice
from operator import attrgetter

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import Tally
from control_plane.allocator.core.free_space_classes import ALL, BY_CLASS, EMPTY
from control_plane.allocator.core.machine_pools import Bucket, Machine, Pool
from control_plane.allocator.core.request import Group
from control_plane.api.requirements import Because, text_of
from control_plane.broker.core.matching import holds

_EXPLAINED = 1_000
"""Machines of one pool that are counted for it; `twinectl job explain` counts all of them."""
_BUCKETS = 50
"""Buckets whose roomiest machines are found between two chances for others to run."""
_PAUSE_AFTER = 1_000
"""Machines that are judged between two chances for others to run."""


def explaining(work: Draft, group: Group) -> Generator[None, None, list[str]]:
    """Find every reason, in steps of bounded time."""
    held, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, _held(work), held, limits)
    if held.machines >= _EXPLAINED:
        yield from _compare_all(work, group.demand, work.pool, held)
    reasons = list(held.reasons()) if held.machines else ["the entitlement holds no machine yet"]
    reasons += _counted(limits, "machine")
    if held.machines >= _EXPLAINED:
        reasons.append(f"these are {_EXPLAINED} of the entitlement's {work.pool.size} machines")
    free, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, _free(work, limits), free, limits)
    if free.machines >= _EXPLAINED:
        yield from _compare_all(work, group.demand, work.free, free)
        reasons.append(f"these are {_EXPLAINED} of {work.free.size} free machines")
    if not work.free.size:
        reasons.append("the free pool is empty")
    reasons += _counted(limits, "free machine")
    return reasons + [reason.replace(" machine", " free machine", 1) for reason in free.reasons()]


def _judge(
    work: Draft, group: Group, machines: Iterator[Machine], tally: Tally, limits: Counter[str]
) -> Generator[None, None, None]:
    for number, machine in enumerate(islice(machines, _EXPLAINED)):
        if number % _PAUSE_AFTER == _PAUSE_AFTER - 1:
            yield
        tally.add(machine, work.room(machine), work.why_short(machine))
        if work.ranking.capped:
            limits.update(work.ranking.limits(machine))
        if machine.name in group.leave:
            limits["is to be left"] += 1
        for term in group.among:
            if not holds(term, machine):
                limits[term.reason if isinstance(term, Because) else text_of(term)] += 1


def _compare_all(
    work: Draft, demand: Demand, pool: Pool, tally: Tally
) -> Generator[None, None, None]:
    """Find how much is free at most on any machine of a pool, of what tasks have too little of.

    Only shelves that may hold the largest amount are searched, in each bucket.
    """
    lacks = tally.lacks()
    for number, bucket in enumerate(list(pool.buckets.values())):
        if number % _BUCKETS == _BUCKETS - 1:
            yield
        for kind, free, wanted in (
            ("memory", "free_memory", demand.memory_bytes),
            ("cpu", "free_cpu", demand.cpu_on(bucket.capacity)),
            ("gpus", "free_gpus", demand.gpus),
            ("network", "free_network", demand.network_mbps),
            ("disk", "free_disk", demand.disk_bytes),
        ):
            if kind in lacks:
                machine = _roomiest(bucket, kind, attrgetter(free), wanted)
                if machine is not None:
                    tally.compare(machine, work.room(machine))


def _roomiest(
    bucket: Bucket, kind: str, free: Callable[[Machine], float], wanted: float
) -> Machine | None:
    """Return the machine that has most of something, but less than is wanted."""
    empty = bucket.shelves[EMPTY]
    if empty and free(empty[0]) < wanted:
        return empty[0]
    groups = ALL if bucket.is_scarce else BY_CLASS.get(kind, ALL)
    for group in groups:
        rows = chain.from_iterable(bucket.shelves[shelf] or () for shelf in group)
        found = max((m for m in rows if free(m) < wanted), key=free, default=None)
        if found is not None:
            return found
    return None


def _held(work: Draft) -> Iterator[Machine]:
    """Yield the machines of the entitlement, those of this plan too."""
    yield from work.pool.machines()
    yield from work.change.takes


def _free(work: Draft, limits: Counter[str]) -> Iterator[Machine]:
    """Yield the free machines that the entitlement may take, and count the others.

    Quotas are the same for all machines of a bucket, so most of them are counted as one.
    """
    for bucket in list(work.free.buckets.values()):
        sample = next(bucket.machines(), None)
        why = sample is not None and (work.allowance.lacks(sample) or work.refuses_all(bucket))
        if why:
            others = bucket.size - sum(machine.bucket is bucket for machine in work.taken)
            if others > 0:
                limits[why] += others
            continue
        for machine in bucket.machines():
            if machine in work.taken:
                continue
            if refusal := work.refuses(machine):
                limits[refusal] += 1
            else:
                yield machine


def _counted(limits: Counter[str], what: str) -> list[str]:
    return [f"{n} {what}{'s' if n > 1 else ''}: {limit}" for limit, n in limits.items()]
