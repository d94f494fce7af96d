"""Computes which free machines a pool may take without breaking promises to others (CP7)."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping

from control_plane.allocator.core.ledger import PromiseLedger
from control_plane.allocator.core.machine_pools import Bucket, Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.grants import MachineClass, Promises, quota_left
from control_plane.portal.core.pools import Quota
from control_plane.runtime.runtime import Runtime

MANY = 100
"""With this many pools or more the sums take over 4 ms, too long to block the event loop."""
_REST_S = 1.0
"""Pause between two sums."""
_STEP = 20
"""Pools whose quotas are read between two checkpoints of the loop."""
_BUCKETS = 1000
"""Buckets whose machines are counted between two checkpoints, when a region is loaded."""
Limits = Mapping[MachineClass, int]
"""Class → how many machines may be taken; any number of those of other classes."""


class PromiseKeeper:
    """Distributes the rest of all quotas over the free machines after each change of either.

    In a region of many pools these sums run in small steps on a copy, concurrently to other work.
    Until they are done, and whenever they are old, a `PromiseLedger` bounds the machines that may
    be taken. Its bound may be lower than necessary, but never too high.
    """

    def __init__(
        self,
        index: RegionIndex,
        quotas: Callable[[], Mapping[str, Quota]],
        uncounted: Callable[[str], Mapping[MachineClass, int]],
        runtime: Runtime,
    ) -> None:
        """`aside(pool)` returns machines that count neither as held by a pool nor as free."""
        self._index, self._quotas, self._uncounted = index, quotas, uncounted
        self._runtime = runtime
        self._known: Mapping[str, Quota] | None = None
        self._held: defaultdict[str, Counter[MachineClass]] = defaultdict(Counter)
        """Pool → its machines at the last `_record_moves`, including those put aside."""
        self._outdated = True
        """Whether the last sums cannot be corrected by a ledger."""
        self._outdated_meanwhile = False
        """Whether that also holds for the sums that are being computed."""
        self._computations = 0
        """How often sums were begun. If several run, only the last one counts."""
        self._promises: Promises | None = None
        """The last sums; None if something changed since then."""
        self._ledger: PromiseLedger | None = None
        """None if all pools may use the same kinds of machines."""
        self._kinds: list[MachineClass] = []
        self._limits: dict[str, Limits] = {}
        self._since: Counter[tuple[str, MachineClass]] = Counter()
        """(Pool, class) → change of its machines since the running sums began."""
        self._wanted = asyncio.Event()
        self._refused = False
        """Whether a pool may have been refused because the sums were old."""

    def limits(self, pool: str) -> Limits | None:
        """Return how many machines of each kind a pool may take; None for any number."""
        self._record_moves()
        quotas = self._quotas()
        if quotas is not self._known:
            self._known = quotas
            self.mark_outdated()
        if not self._is_new() and len(quotas) < MANY:
            for _ in self._compute(quotas):
                pass
        if self._outdated:
            self._request_sums()
            return dict.fromkeys(self._held.get(FREE, ()), 0)
        if self._ledger is None:
            return None
        found = self._limits.get(pool)
        if found is None:
            found = self._limits[pool] = self._limits_of(pool, self._ledger)
        return found

    async def load(self) -> None:
        """Do the sums once at a start, so that no pool is refused because they are missing."""
        changed = list(self._index.take_bucket_growth().items())
        for first in range(0, len(changed), _BUCKETS):
            self._count_moves(changed[first : first + _BUCKETS])
            await self._runtime.checkpoint()
        await self._compute_in_steps()

    async def run(self) -> None:
        """Do the sums of a region with many pools, a step at a time, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._compute_in_steps()
            if self._refused:
                self._refused = False
                self._index.note_gain()
            await self._runtime.sleep(_REST_S)

    async def _compute_in_steps(self) -> None:
        """Do the sums for the present quotas and machines, a step at a time."""
        self._record_moves()
        self._known = quotas = self._quotas()
        for _ in self._compute(quotas):
            await self._runtime.checkpoint()

    def kept_without(self, pool: str, taken: Iterable[Machine]) -> Generator[None, None, bool]:
        """Return, in steps, whether the machines that a pool took break no promise to others.

        False if a promise is broken that would be kept without them. A process sees what others
        took only after it took machines itself, so it calls this after it has followed that.
        """
        self._record_moves()
        quotas = self._quotas()
        if len({_kind(quota) for quota in quotas.values()}) <= 1:
            return True
        is_new = quotas is self._known and not self._outdated
        if is_new and self._ledger is not None and self._ledger.keeps_all:
            return True
        held = self._held_by([*quotas, FREE])
        before = {name: Counter(counts) for name, counts in held.items()}
        for machine in taken:
            kind = MachineClass.of(machine.capacity, machine.place)
            before.setdefault(pool, Counter())[kind] -= 1
            before.setdefault(FREE, Counter())[kind] += 1
        now, _ = yield from self._distribute(quotas, held)
        then, _ = yield from self._distribute(quotas, before)
        return not now.lacking() - then.lacking()

    def mark_outdated(self) -> None:
        """Record that the machines put aside have changed."""
        self._outdated = self._outdated_meanwhile = True

    def _is_new(self) -> bool:
        return not self._outdated and (self._promises is not None or self._ledger is None)

    def _limits_of(self, pool: str, ledger: PromiseLedger) -> Limits:
        if self._promises is not None:
            spare = self._promises.spare(pool)
            return {kind: spare.get(kind, 0) for kind in self._kinds}
        limits = ledger.limits(pool)
        if not all(limits.values()):
            self._request_sums()
        return limits

    def _request_sums(self) -> None:
        self._refused = True
        self._wanted.set()

    def _record_moves(self) -> None:
        """Record which machines changed pools."""
        if changed := self._index.take_bucket_growth():
            self._count_moves(changed.items())

    def _count_moves(self, changed: Iterable[tuple[Bucket, int]]) -> None:
        moves: Counter[tuple[str, MachineClass]] = Counter()
        for bucket, by in changed:
            moves[bucket.pool.name, MachineClass.of(bucket.capacity, bucket.place)] += by
        moves = Counter({key: by for key, by in moves.items() if by})
        if not moves:
            return
        for (pool, kind), by in moves.items():
            self._held[pool][kind] += by
            if not self._held[pool][kind]:
                del self._held[pool][kind]
                if not self._held[pool]:
                    del self._held[pool]
        self._since.update(moves)
        self._promises = None
        self._limits = {}
        if self._ledger is not None:
            self._ledger.record_moves(moves)
            self._outdated = self._outdated or not self._ledger.is_valid

    def _compute(self, quotas: Mapping[str, Quota]) -> Generator[None, None, None]:
        """Do the sums on the present state; later changes are followed afterwards."""
        self._since, self._outdated_meanwhile = Counter(), False
        self._computations += 1
        this = self._computations
        if len({_kind(quota) for quota in quotas.values()}) <= 1:
            self._use_result(None, [])
            return
        held = self._held_by([*quotas, FREE])
        yield
        promises, supply = yield from self._distribute(quotas, held)
        self._record_moves()
        if this == self._computations:
            self._use_result(promises, list(supply))

    def _held_by(self, pools: Iterable[str]) -> dict[str, Mapping[MachineClass, int]]:
        return {pool: dict(self._held[pool]) for pool in pools if pool in self._held}

    def _distribute(
        self, quotas: Mapping[str, Quota], held: Mapping[str, Mapping[MachineClass, int]]
    ) -> Generator[None, None, tuple[Promises, Counter[MachineClass]]]:
        """Return the promises of the rest of all quotas, and the free machines, if pools hold
        `held`.
        """
        left = {}
        for number, (pool, quota) in enumerate(quotas.items()):
            left[pool] = quota_left(quota, self._counted_only(pool, held.get(pool)))
            if number % _STEP == _STEP - 1:
                yield
        supply = self._counted_only(FREE, held.get(FREE))
        promises = yield from Promises.in_steps(left, supply)
        return promises, supply

    def _use_result(self, promises: Promises | None, kinds: list[MachineClass]) -> None:
        """Use new sums, corrected by the changes since they were begun."""
        self._promises, self._kinds, self._limits = promises, kinds, {}
        self._outdated = self._outdated_meanwhile
        self._ledger = PromiseLedger(promises.shares()) if promises is not None else None
        if self._ledger is not None and self._since:
            self._promises = None
            self._ledger.record_moves(self._since)
            self._outdated = self._outdated or not self._ledger.is_valid

    def _counted_only(
        self, pool: str, held: Mapping[MachineClass, int] | None
    ) -> Counter[MachineClass]:
        """Return the machines that count, of those that a pool held when the sums began.

        Reading `aside` later than `held` is safe: a change of it makes the sums outdated.
        """
        found = Counter(held)
        if held:
            found.subtract(self._uncounted(pool))
        return +found


def _kind(quota: Quota) -> tuple[object, ...]:
    return (quota.types, frozenset(quota.per_type), quota.datacenter, quota.region)
