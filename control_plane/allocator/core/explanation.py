"""Why tasks have no machine: every reason at once, per group of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import islice

from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import Tally
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.request import Group
from control_plane.api.requirements import Because, text_of
from control_plane.broker.core.matching import holds

_EXPLAINED = 1_000
"""Machines of one pool that are judged for it; `twinectl job explain` judges all of them."""
_PAUSE_AFTER = 1_000
"""Machines that are judged between two chances for others to run."""


def explaining(work: Draft, group: Group) -> Generator[None, None, list[str]]:
    """Find every reason, in steps of bounded time."""
    held, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, _held(work), held, limits)
    reasons = list(held.reasons()) if held.machines else ["the entitlement holds no machine yet"]
    reasons += _counted(limits, "machine")
    if held.machines >= _EXPLAINED:
        reasons.append(f"these are {_EXPLAINED} of the entitlement's {work.pool.size} machines")
    free, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, _free(work, limits), free, limits)
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
