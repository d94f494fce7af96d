"""Entitlement to machines: which to take from the free pool, which to give back.

An entitlement holds as many machines as its jobs need, never more than its quota, and of
as many MSBs as its largest job has tasks, so that the tasks can be spread
(docs/adr/0007-spread-by-msb.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from control_plane.core.placement import Demand, Host, Load, explain, fits, place, room


@dataclass(frozen=True, slots=True)
class Need:
    """What a job wants of its entitlement."""

    job: str
    demand: Demand
    tasks: int
    """How many it shall have."""
    unplaced: int
    """How many of them have no usable machine now."""
    mine: dict[str, int]
    """Tasks that have one, per machine."""


@dataclass(frozen=True, slots=True)
class Held:
    """A machine of the entitlement."""

    host: Host
    """`blocked` only if it will not come back by itself soon."""
    empty: bool
    """No task is placed on it, the lost ones excepted."""
    idle: bool = False
    """Empty for long enough to be given back."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Machines to take from the free pool and to give back to it, and what is missing."""

    take: tuple[str, ...] = ()
    give_back: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def plan_capacity(
    quota: int, held: Sequence[Held], free: Sequence[Host], needs: Sequence[Need]
) -> CapacityPlan:
    """Return what should change about the machines of one entitlement.

    `free` holds only machines of the entitlement's types. Nothing is taken and given back
    for the same reason, so that calling it again after its advice was followed gives an
    empty plan.
    """
    missing = _missing(held, needs)
    spread = _spread_target(quota, needs)
    growth = _Growth(quota, held, free)
    growth.widen(needs, spread)
    for need in needs:
        growth.deepen(need, missing.get(need.job, 0))
    if growth.reasons:
        broken = [h.host.name for h in held if h.host.blocked and h.empty]
        if broken and growth.spare(needs):
            return CapacityPlan(tuple(growth.taken), tuple(broken), tuple(growth.reasons))
    back = () if any(missing.values()) else _superfluous(quota, held, needs, spread)
    return CapacityPlan(tuple(growth.taken), back, tuple(growth.reasons))


def _spread_target(quota: int, needs: Sequence[Need]) -> int:
    """Return how many MSBs the entitlement wants to hold machines in."""
    return min(quota, max((need.tasks for need in needs), default=0))


def _missing(held: Sequence[Held], needs: Sequence[Need]) -> dict[str, int]:
    """Return per job how many tasks the machines held now cannot take."""
    hosts = [h.host for h in held]
    missing = {}
    for need in needs:
        plan = place(need.demand, range(need.unplaced), hosts, need.mine)
        missing[need.job] = len(plan.unplaced)
        placed = Counter(p.machine for p in plan.placements.values())
        hosts = [_with(host, need.demand, placed[host.name]) for host in hosts]
    return missing


def _with(host: Host, demand: Demand, tasks: int) -> Host:
    if not tasks:
        return host
    load = Load(
        host.load.memory_bytes + tasks * demand.memory_bytes,
        host.load.cpu_cores + tasks * demand.cpu_cores,
        host.load.ports,
    )
    return replace(host, load=load)


class _Growth:
    """The machines taken while one plan is made."""

    def __init__(self, quota: int, held: Sequence[Held], free: Sequence[Host]) -> None:
        self.taken: dict[str, Host] = {}
        self.reasons: list[str] = []
        self._quota = quota
        self._left = quota - len(held)
        self._free = {host.name: host for host in free}
        self._per_msb = Counter(h.host.msb for h in held if not h.host.blocked)
        self._stock = Counter(host.msb for host in free)

    def widen(self, needs: Sequence[Need], spread: int) -> None:
        """Take one machine per MSB until the largest job can be spread."""
        wide = max(needs, key=lambda need: need.tasks, default=None)
        while wide and self._left > 0 and len(+self._per_msb) < spread:
            host = self._best(wide.demand, new_msb=True)
            if host is None:
                return
            self._take(host)

    def deepen(self, need: Need, missing: int) -> None:
        """Take machines until the tasks that fit nowhere have room."""
        for host in list(self.taken.values()):
            missing -= self._fill(host, need.demand, missing)
        while missing > 0:
            if self._left <= 0:
                self.reasons.append(
                    f"{need.job}: {missing} tasks lack room and the quota of"
                    f" {self._quota} machines is used up"
                )
                return
            found = self._best(need.demand, new_msb=False)
            if found is None:
                why = explain(need.demand, list(self._free.values())) if self._free else ()
                detail = "; ".join(why) or "it is empty"
                self.reasons.append(
                    f"{need.job}: {missing} tasks lack room and the free pool has no fitting"
                    f" machine ({detail})"
                )
                return
            self._take(found)
            missing -= self._fill(found, need.demand, missing)

    def spare(self, needs: Sequence[Need]) -> bool:
        """Return whether the free pool has a machine that a broken one could make way for."""
        return any(self._best(need.demand, new_msb=False) for need in needs)

    def _fill(self, host: Host, demand: Demand, most: int) -> int:
        count = room(demand, host, most)
        self.taken[host.name] = _with(host, demand, count)
        return count

    def _take(self, host: Host) -> None:
        self.taken[host.name] = host
        self._left -= 1
        self._per_msb[host.msb] += 1
        self._stock[host.msb] -= 1
        del self._free[host.name]

    def _best(self, demand: Demand, *, new_msb: bool) -> Host | None:
        """Return a fitting machine of the MSB that the entitlement holds least of."""
        fitting = [
            host
            for host in self._free.values()
            if not fits(demand, host) and not (new_msb and self._per_msb[host.msb])
        ]
        return min(
            fitting,
            key=lambda h: (self._per_msb[h.msb], -self._stock[h.msb], -h.memory_bytes, h.name),
            default=None,
        )


def _superfluous(
    quota: int, held: Sequence[Held], needs: Sequence[Need], spread: int
) -> tuple[str, ...]:
    """Return idle machines without which the jobs keep their room and their spread."""
    if any(need.unplaced for need in needs):
        return ()
    per_msb = Counter(h.host.msb for h in held if not h.host.blocked)
    over = len(held) - quota
    back = []
    for h in sorted(held, key=lambda h: (not h.host.blocked, -per_msb[h.host.msb], h.host.name)):
        blocked, msb = bool(h.host.blocked), h.host.msb
        last_of_msb = not blocked and per_msb[msb] == 1 and len(+per_msb) <= spread
        needed = last_of_msb or (blocked and spread > 0) or not h.idle
        if not h.empty or (needed and over <= 0):
            continue
        back.append(h.host.name)
        over -= 1
        if not blocked:
            per_msb[msb] -= 1
    return tuple(back)
