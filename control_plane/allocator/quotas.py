"""Decides which free machines a pool may take, by quota, promises to others and priority."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from control_plane.agents.region import Region
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import fits_each, judge
from control_plane.allocator.core.machine_pools import Bucket, Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Request
from control_plane.allocator.ports import Grants
from control_plane.allocator.promises import Limits, PromiseKeeper
from control_plane.allocator.quota_usage import QuotaUsage
from control_plane.allocator.region_allocators import RegionAllocators
from control_plane.allocator.waiting import Waiting, WaitingDemand
from control_plane.api.elastic import ElasticMode
from control_plane.api.settings import Overgrant
from control_plane.broker.core.capacity import Capacity, Place, micro
from control_plane.portal.core.pools import Quota, pool_quotas

_RefusesOne = Callable[[Machine], str]
_RefusesAll = Callable[[Bucket], str]


class Quotas:
    """Judges what pools may hold and take; changes nothing."""

    def __init__(
        self, region: Region, portal: Grants, index: RegionIndex, counted: QuotaUsage
    ) -> None:
        """`counted` has the machines that count against quotas."""
        self._broker, self._runtime = region.broker, region.runtime
        self._elastic = region.settings.elastic
        self._portal, self._counted = portal, counted
        self._shards = RegionAllocators.of(region)
        self._quotas: dict[str, Quota] | None = None
        self.waiting = Waiting(self.priority, index.gains, lambda: index.losses)
        self.waiting.served = self._shards.served
        self.promises = PromiseKeeper(
            index, self._all, lambda pool: counted.aside(pool, self.of(pool)), region.runtime
        )

    def changed(self) -> None:
        """Called after the portal changed a grant."""
        self._quotas = None

    def of(self, pool: str) -> Quota:
        """Return the quota of a pool, including its reservations."""
        return self._all().get(pool) or Quota(machines=0)

    def _all(self) -> Mapping[str, Quota]:
        if self._quotas is None:
            self._quotas = pool_quotas(self._shards.specs())
        return self._quotas

    def is_over(self, pool: str) -> bool:
        """Return whether a pool holds more than its quota, which was made smaller."""
        quota = self.of(pool)
        return bool(quota.excess(self._counted.held(pool, quota)))

    def allows(self, pool: str, machine: Machine | Bucket) -> bool:
        """Return whether a pool may hold such a machine at all."""
        place = machine.place
        return self.of(pool).allows(machine.capacity.machine_type, place.datacenter, place.region)

    def priority(self, pool: str) -> int:
        """Return the priority of a pool; 0 if there is no such entitlement."""
        found = self._portal.table.find(pool)
        return found.spec.priority if found is not None else 0

    def profile(self, pool: str) -> str:
        """Return the host profile of a pool's machines."""
        found = self._portal.table.find(pool)
        return found.spec.host_profile if found is not None else ""

    def allowance(self, request: Request) -> Allowance:
        """Return the machines that the pool of a request may still take, for one plan."""
        pool = request.pool
        quota = self.of(pool)
        held = self._counted.held(pool, quota)
        refuses, refuses_all = self._refusals(request)
        per_type = {k: n - held.per_type[k] for k, n in quota.per_type.items()}
        return Allowance(
            machines=None if quota.machines is None else quota.machines - held.machines,
            none_left=self._why_none_left(pool, quota),
            micro_rru=None if quota.rru is None else micro(quota.rru) - held.micro_rru,
            per_type=per_type or None,
            types=quota.types,
            datacenter=quota.datacenter,
            region=quota.region,
            refuses=refuses,
            refuses_all=refuses_all,
            unpromised=self._unpromised(pool),
        )

    def _why_none_left(self, pool: str, quota: Quota) -> str:
        """Return why a pool that holds its number of machines may take no more."""
        found = self._portal.table.find(pool)
        if quota.machines != 0 or found is None or not found.spec.borrows:
            return "the quota of machines is used up"
        why = "the entitlement uses only machines that are lent to it"
        mode = self._elastic.mode
        return why if mode is ElasticMode.APPLY else f"{why}; scheduler.elastic.mode is {mode}"

    def _unpromised(self, pool: str) -> Limits | None:
        """Return how many free machines of each kind are not promised to others."""
        if self._portal.settings.overgrant is Overgrant.ALLOW:
            return None  # first come, first served
        return self.promises.limits(pool)

    def kept_without(self, pool: str, taken: list[Machine]) -> Generator[None, None, bool]:
        """Return, in steps, whether the machines that a pool took break no promise (CP7)."""
        if self._portal.settings.overgrant is Overgrant.ALLOW:
            return True
        return (yield from self.promises.kept_without(pool, taken))

    def _demands_before(self, pool: str) -> list[WaitingDemand]:
        """Return the waiting demands that come before those of a pool."""
        return [
            demand
            for waiting in self._shards.waiting()
            for demand in waiting.ahead_of(self.priority(pool))
            if demand.pool != pool and self._may_grow(demand.pool)
        ]

    def _refusals(self, request: Request) -> tuple[_RefusesOne, _RefusesAll]:
        """Return the checks of single free machines, and of buckets for reasons that all share."""
        profile, before = self.profile(request.pool), self._demands_before(request.pool)
        silent_brokers = self._broker.unreachable()

        def why_unreachable(place: Place) -> str:
            why = silent_brokers.get(place.datacenter)
            return f"the broker of {place.datacenter} does not answer: {why}" if why else ""

        def reserved(place_or_bucket: Machine | Bucket, suits: Callable[[Demand], bool]) -> str:
            for other in before:
                if suits(other.demand) and self.allows(other.pool, place_or_bucket):
                    self.waiting.note_yielded(request.job)
                    return f"reserved for entitlement {other.pool}, which has a higher priority"
            return ""

        def refuses(machine: Machine) -> str:
            if why := why_unreachable(machine.place):
                return why
            record = self._broker.table.find(machine.name)
            if record is None:
                return "is no longer known"
            until = record.quarantined_until
            if record.quarantined_profile == profile and until > self._runtime.date():
                return f"cannot reach profile {profile}: {record.quarantine_reason}"
            return reserved(machine, lambda demand: not judge(demand, machine, machine))

        def refuses_all(bucket: Bucket) -> str:
            return why_unreachable(bucket.place) or reserved(bucket, lambda d: fits_each(d, bucket))

        return refuses, refuses_all

    def machines_left(self, pool: str, kinds: Sequence[Capacity]) -> int | None:
        """Return how many machines of these kinds a pool may still take; None for any number."""
        quota = self.of(pool)
        held = self._counted.held(pool, quota)
        bounds = [] if quota.machines is None else [quota.machines - held.machines]
        if quota.per_type:
            types = {kind.machine_type for kind in kinds}
            left = (n - held.per_type[k] for k, n in quota.per_type.items() if k in types)
            bounds.append(sum(max(0, n) for n in left))
        if quota.rru is not None:
            least = min((micro(kind.rru) for kind in kinds if kind.rru), default=0)
            bounds.append((micro(quota.rru) - held.micro_rru) // least if least else 0)
        return max(0, min(bounds)) if bounds else None

    def _may_grow(self, pool: str) -> bool:
        quota = self.of(pool)
        return quota.machines is None or self._counted.held(pool, quota).machines < quota.machines
