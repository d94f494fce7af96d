"""Why tasks have no machine: every reason at once, per group of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from control_plane.core.feasibility import Tally
from control_plane.core.machine_pools import Bins, Bucket, Machine, Pool

if TYPE_CHECKING:
    from control_plane.core.planner import Group, Planning

_EXPLAINED = 20_000
"""Machines of one pool that are judged for it."""
_PAUSE_AFTER = 1_000
"""Machines that are judged between two chances for others to run."""


def explaining(work: Planning, group: Group) -> Generator[None, None, list[str]]:
    """Find every reason, in steps of bounded time."""
    held, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, work.pool, held, limits)
    reasons = list(held.reasons()) if held.machines else ["the entitlement holds no machine yet"]
    reasons += _counted(limits, "machine")
    free, limits = Tally(group.demand), Counter[str]()
    yield from _judge(work, group, work.free, free, limits)
    if not work.free.size:
        reasons.append("the free pool is empty")
    reasons += _counted(limits, "free machine")
    return reasons + [reason.replace(" machine", " free machine", 1) for reason in free.reasons()]


def _judge(
    work: Planning, group: Group, pool: Pool, tally: Tally, limits: Counter[str]
) -> Generator[None, None, None]:
    number = 0
    for bins, machine in _machines(pool.partition(work.ranking.properties)):
        number += 1
        if number > _EXPLAINED:
            return
        if number % _PAUSE_AFTER == 0:
            yield
        if machine in work.taken and pool is work.free:
            continue
        refusal = _refusal(work, machine) if pool is work.free else ""
        if refusal:
            limits[refusal] += 1
        else:
            tally.add(machine, work.spaces.get(machine) or machine)
        full = work.ranking.is_full(bins) or work.ranking.is_single_full(machine)
        if full is not None and full.at_most is not None:
            limits[f"{full.property} would get {full.at_most + 1} tasks > {full.at_most}"] += 1
        if machine.name == group.leave:
            limits["is to be left"] += 1


def _machines(partition: dict[Bins, list[Bucket]]) -> Iterable[tuple[Bins, Machine]]:
    for bins, buckets in list(partition.items()):
        for bucket in buckets:
            for machine in bucket.machines():
                yield bins, machine


def _refusal(work: Planning, machine: Machine) -> str:
    """Return why the entitlement may not take a free machine, whether or not it would fit."""
    return work.allowance.lacks(machine) or work.refuses(machine)


def _counted(limits: Counter[str], what: str) -> list[str]:
    return [f"{n} {what}{'s' if n > 1 else ''}: {limit}" for limit, n in limits.items()]
