"""Machines that a pool may not take although they are free: others were promised them (CP7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from control_plane.core.grants import MachineClass, Promises, quota_left
from control_plane.core.machine_pools import FREE, Machine
from control_plane.core.pools import Quota, micro
from control_plane.core.region_index import RegionIndex

MANY = 100
"""Pools from which on the sums take longer than the event loop should stand still: 4 ms."""
_REST_S = 5.0
"""Between two of those sums."""
Limits = Mapping[tuple[str, str, int], int]
"""Type, data center and millionths of RRU → how many may be taken; of others any number."""


class PromiseKeeper:
    """Lays what is left of all quotas upon the free machines, whenever either changed."""

    def __init__(
        self,
        index: RegionIndex,
        quotas: Callable[[], Mapping[str, Quota]],
        aside: Callable[[str], Iterable[Machine]],
    ) -> None:
        """`aside(pool)` are machines that count neither as held by a pool nor as free."""
        self._index, self._quotas, self._aside = index, quotas, aside
        self._based_on: tuple[object, ...] = ()
        self._known: Mapping[str, Quota] | None = None
        self._outdated = 0
        self._promises: Promises | None = None
        self._classes: list[MachineClass] = []
        self._limits: dict[str, Limits] = {}
        self._wanted = asyncio.Event()

    def limits(self, pool: str) -> Limits | None:
        """Return how many machines of which kind a pool may take; None: any."""
        self._look()
        if self._promises is None:
            return None
        found = self._limits.get(pool)
        if found is None:
            spare = self._promises.spare(pool)
            found = self._limits[pool] = {_key(kind): spare.get(kind, 0) for kind in self._classes}
        return found

    async def run(self) -> None:
        """Do the sums of a region with many pools in a thread, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            quotas = self._quotas()
            self._known, self._based_on = quotas, self._basis()
            self._take(await asyncio.to_thread(self._compute, quotas))
            self._index.loosened()  # who was refused may have been refused for too long
            await asyncio.sleep(_REST_S)

    def outdated(self) -> None:
        """Note that machines were put aside, or are not any more."""
        self._outdated += 1

    def _look(self) -> None:
        """Compute anew if machines or quotas changed; of a large region every few seconds."""
        quotas, based_on = self._quotas(), self._basis()
        if quotas is self._known and based_on == self._based_on:
            return
        if len(quotas) < MANY or len({_kind(quota) for quota in quotas.values()}) == 1:
            self._known, self._based_on = quotas, based_on
            self._take(self._compute(quotas))
            return
        self._wanted.set()

    def _basis(self) -> tuple[object, ...]:
        free = self._index.pool(FREE)
        return (dict(free.per_type), free.rru, self._outdated)

    def _take(self, found: tuple[Promises, list[MachineClass]] | None) -> None:
        self._promises, self._classes = found if found is not None else (None, [])
        self._limits = {}

    def _compute(self, quotas: Mapping[str, Quota]) -> tuple[Promises, list[MachineClass]] | None:
        if len({_kind(quota) for quota in quotas.values()}) <= 1:
            return None  # then nobody depends on machines of one kind more than others
        left = {pool: quota_left(quota, self._count(pool)) for pool, quota in quotas.items()}
        supply = self._count(FREE)
        return Promises(left, supply), list(supply)

    def _count(self, pool_name: str) -> Counter[MachineClass]:
        pool, found = self._index.pools.get(pool_name), Counter[MachineClass]()
        if pool is None:
            return found
        for bucket in list(pool.buckets.values()):
            capacity = bucket.capacity
            key = (capacity.machine_type, bucket.place.datacenter, micro(capacity.rru))
            found[MachineClass(*key)] += bucket.size
        for machine in list(self._aside(pool_name)):
            capacity = machine.capacity
            key = (capacity.machine_type, machine.place.datacenter, micro(capacity.rru))
            found[MachineClass(*key)] -= 1
        return +found


def _kind(quota: Quota) -> tuple[object, ...]:
    return (quota.types, frozenset(quota.per_type), quota.datacenter)


def _key(kind: MachineClass) -> tuple[str, str, int]:
    return (kind.machine_type, kind.datacenter, kind.micro_rru)
