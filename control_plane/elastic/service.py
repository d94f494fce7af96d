"""Reports on elastic capacity: loans, kept promises, signals, buffers (EL7, EL9, EL10)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.api.elastic import (
    Buffers,
    CapacitySignal,
    CapacityState,
    ElasticCounts,
    ElasticReport,
    LoanView,
    PoolElasticity,
)
from control_plane.api.jobs import JobRecord
from control_plane.broker.core.assignment import FREE
from control_plane.broker.loans import Loans
from control_plane.elastic import survey
from control_plane.elastic.core.buffers import OwnerUse, buffers
from control_plane.elastic.ledger import ElasticLedger
from control_plane.elastic.lender import Lender
from control_plane.elastic.notice_sender import NoticeSender
from control_plane.elastic.survey import LenderParts, OwnerOf, machine_share
from control_plane.runtime.table import Table
from control_plane.store import Store
from wire.errors import Busy


class ElasticService:
    """Runs the lender, and reports on it."""

    def __init__(
        self,
        region: Region,
        jobs: Table[JobRecord],
        allocators: Sequence[Allocator],
        owner_of: OwnerOf,
        loans: Loans,
        store: Store,
        unwell: Callable[[], str],
        sender: NoticeSender,
    ) -> None:
        """`unwell` returns why nothing may be lent now; empty if lending is allowed."""
        self._sender = sender
        entitlements = allocators[0].portal.table
        self._parts = LenderParts(region, entitlements, allocators, owner_of, loans, unwell)
        self._jobs = jobs
        self._ledger = ElasticLedger(store, jobs, lambda name: self._parts.tasks_on(name) > 0)
        self._lender = Lender(self._parts, self._ledger)
        region.broker.listen(self._ledger.on_machine_change)
        allocators[0].directory.listen(self._lender.note_use)

    async def load(self) -> None:
        """Read the stored counts."""
        await self._ledger.load()

    async def run(self) -> None:
        """Lend and call back until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lender.run())
            group.create_task(self._send_notices())

    async def _send_notices(self) -> None:
        """Send notices to agents until cancelled."""
        runtime, settings = self._parts.region.runtime, self._parts.region.settings.elastic
        while True:
            if self._lender.has_surveyed:  # until then all borrowers seem to be satisfied
                await self._sender.send_due(self._signal)
            await runtime.sleep(settings.look_s)

    def _signal(self, entitlement: str) -> CapacitySignal | None:
        known = self._parts.entitlements.find(entitlement)
        return None if known is None else self.signal(entitlement)

    def signal(self, entitlement: str) -> CapacitySignal:
        """Return whether a borrower has the machines it wants.

        Raises `NotFound` if there is no such entitlement, and `Busy` until the first round.
        """
        record = self._parts.entitlements.get(entitlement)
        if not self._lender.has_surveyed:
            raise Busy(
                f"cannot report the capacity of {entitlement}: this control plane has just started",
                hint=f"try again in {self._parts.region.settings.elastic.look_s:.0f} s",
            )
        loans = [v for v in self._views() if v.borrower == entitlement]
        leaving = [v for v in loans if v.revoked_at is not None]
        has = len(loans) - len(leaving)
        now = self._lender.now.get(record.name)
        wanted = now.wants if now is not None else 0
        state = CapacityState.SHORT if wanted and has else CapacityState.FULL
        state = CapacityState.ABSENT if wanted and not has else state
        return CapacitySignal(
            entitlement=entitlement,
            state=state,
            machines=has,
            wanted=wanted,
            leaving=len(leaving),
            next_deadline=min((v.return_by for v in leaving if v.return_by), default=None),
        )

    def late(self) -> list[str]:
        """Return the machines that are still on loan after the promised time."""
        now = self._parts.region.runtime.date()
        return [
            v.machine
            for v in self._views()
            if v.promise_s and v.revoked_at is not None and now - v.revoked_at > v.promise_s
        ]

    def report(self) -> ElasticReport:
        """Return the loans, the entitlements that wait, and how well promises were kept."""
        views, now = self._views(), self._parts.region.runtime.now()
        pools, left_by = [], self._left_by_entitlement()
        for p in self._lender.now.values():
            history = self._ledger.history(p.pool)
            requested_s = history.wanted_s + history.had_s
            pools.append(
                PoolElasticity(
                    entitlement=p.pool,
                    used=p.used,
                    expected=p.expected,
                    lent=sum(v.donor == p.pool for v in views),
                    borrowed=sum(v.borrower == p.pool for v in views),
                    wanted=p.wants,
                    short=p.short,
                    short_for_s=round(now - self._lender.short_since.get(p.pool, now), 1),
                    availability=round(history.had_s / requested_s, 4) if requested_s else None,
                    left=left_by[p.pool],
                    freed_machine_hours=round(history.freed_h, 2),
                )
            )
        return ElasticReport(
            at=self._parts.region.runtime.date(),
            mode=self._parts.region.settings.elastic.mode,
            loans=views,
            promises=self._ledger.promises(),
            pools=pools,
            freed=self._ledger.freed(),
            late=self.late(),
            free=self._parts.free(),
            kept=self._lender.kept_free(),
            proposed=self._lender.proposed,
            holding=self._lender.holding(),
        )

    def _left_by_entitlement(self) -> Counter[str]:
        """Return entitlement → free or lent machines that it gave back last."""
        table = self._parts.region.broker.table
        free = (m.name for m in survey.unused(self._parts.owner_of, FREE))
        known = [record for name in free if (record := table.find(name)) is not None]
        lent = [r for r in self._parts.loans.lent() if r.loan is not None and not r.loan.donor]
        return Counter(record.left_by for record in (*known, *lent))

    def _views(self) -> list[LoanView]:
        return [
            LoanView(
                machine=r.machine,
                donor=r.loan.donor,
                left_by=r.left_by if not r.loan.donor else "",
                borrower=r.entitlement,
                since=r.loan.since,
                promise_s=r.loan.promise_s,
                until=r.loan.until,
                revoked_at=r.loan.revoked_at,
                return_by=r.loan.return_by,
                tasks=self._parts.tasks_on(r.machine),
                why=self._lender.why.get(r.machine, "") if r.loan.revoked_at is not None else "",
            )
            for r in self._parts.loans.lent()
            if r.loan is not None
        ]

    def counts(self) -> ElasticCounts:
        """Return the counts as of the last round of the lender."""
        ended, now = self._ledger.promises(), self._lender.now.values()
        return ElasticCounts(
            loans=self._lender.loans,
            leaving=self._lender.leaving,
            late=len(self.late()) if self._lender.leaving else 0,
            short=sum(pool.short > 0 for pool in now),
            wanting=sum(pool.wants > 0 for pool in now),
            kept=self._lender.kept_free(),
            revoked=sum(p.revoked for p in ended),
            broken=sum(p.broken for p in ended),
            interrupted=sum(p.interrupted for p in ended),
        )

    # -- buffers

    async def buffers(self) -> Buffers:
        """Return the spare machines that the region needs, and that each owner would need alone."""
        surge: dict[str, list[float]] = {}
        for record in self._jobs.records():
            if record.spec.update.surge:
                surge.setdefault(record.spec.entitlement, []).append(self._surge(record))
            await self._parts.region.runtime.checkpoint(answers=True)
        owners = [
            OwnerUse(by_msb, surge.get(pool, ()), self._ledger.history(pool))
            for pool, by_msb in self._lender.by_msb.items()
        ]
        return await self._parts.region.runtime.offload(buffers, owners)

    def _surge(self, record: JobRecord) -> float:
        """Return how many machines the extra tasks of a job take while it is updated."""
        claims = self._parts.owner_of(record.spec.entitlement).index.claims.get(record.name)
        claim = next(iter(claims), None) if claims is not None else None
        if claim is None:
            return 0.0
        share = machine_share(claim.demand, claim.machine.capacity)
        return round(record.spec.update.surge * share, 3)
