"""The calls of the front end about entitlements: the portal with data of broker and allocator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from control_plane.agents.ports import MachineTable
from control_plane.api.capacity import (
    EntitlementChange,
    EntitlementRecord,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
    RequestState,
)
from control_plane.api.capacity_report import CapacityReport, PowerBudget
from control_plane.api.machines import MachineRecord
from control_plane.portal.core.grants import Shortage, Supply, rru_of, unkept
from control_plane.portal.core.pools import HeldCapacity, pool_of, pool_quotas
from control_plane.portal.core.report import PortalReport, Used
from control_plane.portal.portal import THREAD_FROM, Person, Portal, Use
from control_plane.runtime.runtime import Runtime
from wire.errors import NotFound

_CHUNK = 25
"""Machines that a report reads between two checkpoints: 0.3 ms."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The calls of this service to the broker and the allocator."""

    machines: MachineTable
    held: Callable[[str], list[MachineRecord]]
    """Returns the machines of a pool."""
    names_held: Callable[[str], list[str]]
    """Returns the names of the machines of a pool."""
    jobs_of: Callable[[str], list[str]]
    """Returns the jobs of an entitlement."""
    release_idle: Callable[[str], Awaitable[None]]
    """Releases the machines of a pool that have no tasks."""
    used: Callable[[MachineRecord], Used]
    """Returns the amounts of a machine that are promised to its tasks."""
    power: Callable[[], list[PowerBudget]] = list
    """Returns the power budgets of places."""


class CapacityService:
    """All calls about entitlements."""

    def __init__(self, portal: Portal, sources: Sources, runtime: Runtime) -> None:
        self.portal = portal
        self._sources = sources
        portal.jobs_of = sources.jobs_of
        self._runtime = runtime

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements, by name."""
        found = list[EntitlementView]()
        for record in self.portal.table.records():
            found.append(self._view(record))
            await self._runtime.checkpoint(answers=True)
        return Entitlements(entitlements=found)

    async def get_entitlement(self, name: str) -> EntitlementView:
        """Return an entitlement, or raise `NotFound`."""
        record = self.portal.table.find(name)
        if record is not None:
            return self._view(record)
        if waiting := self.portal.requests.pending(name):
            raise NotFound(
                f"entitlement {name!r} is not granted yet: {', '.join(waiting)} waits for approval",
                hint="twinectl entitlement requests",
            )
        raise NotFound(f"there is no entitlement {name!r}", hint="twinectl entitlement list")

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it now; raises if that is not possible."""
        return self._view(await self.portal.put(name, spec, jobs=self._sources.jobs_of(name)))

    async def delete_entitlement(self, name: str) -> None:
        """Remove an entitlement; `Conflict` while it has jobs."""
        use = await self._release_idle(name)
        await self.portal.delete(name, use)

    async def request(
        self, name: str, change: EntitlementChange, who: Person
    ) -> EntitlementRequest:
        """Grant a change, or store it as a pending request (CP1, CP12)."""
        remove_now = change.spec is None and not change.queue
        use = await self._release_idle(name) if remove_now else Use(self._sources.jobs_of(name))
        request = await self.portal.request(name, change, who, use)
        return replace(request, warnings=self._warnings(name, change.spec))

    def _warnings(self, name: str, spec: EntitlementSpec | None) -> list[str]:
        """Warn that a quota below the number of held machines does not stop tasks (BUG-UX8)."""
        if spec is None:
            return []
        pool, specs = pool_of(name, spec), {**self.portal.specs(), name: spec}
        if pool not in specs:
            return []
        held = HeldCapacity()
        for machine in self._sources.held(pool):
            held.add(machine.machine_type, rru_of(machine))
        return [
            f"it holds more than its quota, {excess}: tasks are not stopped for that, and the "
            "excess machines are released as their tasks leave"
            for excess in pool_quotas(specs)[pool].excess(held)
        ]

    async def list_requests(self, *, decided: bool = False) -> EntitlementRequests:
        """Return the pending requests, with `decided` all requests; the oldest first."""
        found = [r for r in self.portal.requests if decided or r.state is RequestState.PENDING]
        return EntitlementRequests(requests=found)

    async def approve(self, request_id: str, who: Person, note: str) -> EntitlementRequest:
        """Grant a pending request."""
        request = self.portal.requests.get(request_id)
        name = request.entitlement
        removes = request.spec is None and self.portal.may_decide(who)
        use = await self._release_idle(name) if removes else Use(self._sources.jobs_of(name))
        return await self.portal.approve(request_id, who, note, use)

    async def report(self) -> CapacityReport:
        """Return the capacity that is granted, held, used and left over.

        Other actors run while the machines are read, so some lines may be older than others.
        """
        report = PortalReport(self._runtime.date())
        for i, name in enumerate(self._sources.machines):
            if i % _CHUNK == 0:
                await self._runtime.checkpoint(answers=True)
            record = self._sources.machines.find(name)
            if record is not None:
                report.add(record, self._sources.used(record))
        records, supply = self.portal.table.records(), self.portal.supply.counts()
        if len(records) < THREAD_FROM:
            found, short = _finish_report(report, records, supply)
        else:
            found, short = await asyncio.to_thread(_finish_report, report, records, supply)
        shortages = [f"{pool}: {why}" for pool, why in sorted(short.items())]
        return replace(found, short=shortages, power=self._sources.power())

    async def _release_idle(self, name: str) -> Use:
        """Release the idle machines of an entitlement, and return its remaining use."""
        record = self.portal.table.get(name)
        jobs = self._sources.jobs_of(name)
        if record.spec.materialization is not None:
            return Use(jobs)  # its machines belong to the pool of another entitlement
        if not jobs:
            await self._sources.release_idle(name)
        return Use(jobs, self._sources.names_held(name))

    def _view(self, record: EntitlementRecord) -> EntitlementView:
        pool = pool_of(record.name, record.spec)
        return EntitlementView(
            record=record,
            held=self._sources.names_held(pool),
            jobs=self._sources.jobs_of(record.name),
            pending=self.portal.requests.pending(record.name),
        )


def _finish_report(
    report: PortalReport, records: list[EntitlementRecord], supply: Supply
) -> tuple[CapacityReport, dict[str, Shortage]]:
    specs = {record.name: record.spec for record in records}
    return report.finish(records), unkept(specs, supply) if supply else {}
