"""Counts ended loans, kept promises and use, and stores the counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from control_plane.api.elastic import FreedBy, JobFreed, PromiseCounts, PromiseReport, UseHistory
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.elastic.core.expecting import peak, quantile, slot, with_use
from control_plane.elastic.survey import CHECKPOINT_EVERY, OwnerOf, machine_share
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.records import FREED, PROMISES, USE_HISTORIES
from wire.errors import TwineError

_T = TypeVar("_T", bound=Struct)
SAMPLES = 1000
_SAVE_S = 1800.0
"""Interval between writes of the histories: a killed process loses at most this much of them."""
_JOBS_S = 300.0
"""Interval between counts of the autoscaled jobs."""


class ElasticLedger:
    """The only writer of the records below `elastic/`."""

    def __init__(
        self,
        store: Store,
        jobs: Table[JobRecord],
        still_runs: Callable[[str], bool],
    ) -> None:
        """`still_runs` says whether a machine has tasks."""
        self._uses = Table(store, USE_HISTORIES, UseHistory, "history of use")
        self._promises = Table(store, PROMISES, PromiseCounts, "count of promises")
        self._freed = Table(store, FREED, FreedBy, "count of freed machines")
        self._jobs, self._still_runs = jobs, still_runs
        self._history: dict[str, UseHistory] = {}
        self._counts: dict[float, PromiseCounts] = {}
        self._by_job: dict[str, FreedBy] = {}
        self._dirty = False
        self._tasks: dict[str, int] = {}
        """Machine → tasks that it had when it was called back."""
        self._saved_at = self._jobs_at = 0.0
        self._now = 0.0

    async def load(self) -> None:
        """Read the stored counts."""
        for table in (self._uses, self._promises, self._freed):
            await table.load()
        self._history = {record.pool: record for record in self._uses.records()}
        self._counts = {record.promise_s: record for record in self._promises.records()}
        self._by_job = {record.job: record for record in self._freed.records()}

    def set_date(self, now: float) -> None:
        """Record the date that `on_machine_change` uses until the next round."""
        self._now = now
        self._saved_at = self._saved_at or now

    # -- loans

    def note_call_back(self, machine: str, tasks: int) -> None:
        """Record that a loan was called back, and how many tasks that interrupts."""
        self._tasks[machine] = tasks

    def on_machine_change(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Count a loan that ended; the brokers call this after each change of a machine."""
        if before is None or before.loan is None or not before.loan.promise_s:
            return
        loan = before.loan
        if after is not None and after.loan is not None and after.loan.since == loan.since:
            return
        ended = self._ended(after, self._now)
        counts = self._counts.get(loan.promise_s) or PromiseCounts(promise_s=loan.promise_s)
        lent_s = max(0.0, ended - loan.since)
        counts = replace(counts, ended=counts.ended + 1, machine_s=counts.machine_s + lent_s)
        if loan.revoked_at is not None:
            took = max(0.0, ended - loan.revoked_at)
            notice = max(0.0, (loan.return_by or ended) - loan.revoked_at)
            counts = replace(
                counts,
                revoked=counts.revoked + 1,
                forced=counts.forced + self._still_runs(name),
                interrupted=counts.interrupted + self._tasks.pop(name, 0),
                broken=counts.broken + (took > loan.promise_s),
                notices_s=[*counts.notices_s, notice][-SAMPLES:],
                returns_s=[*counts.returns_s, round(took, 3)][-SAMPLES:],
            )
        self._counts[loan.promise_s] = counts
        self._dirty = True

    @staticmethod
    def _ended(after: MachineRecord | None, now: float) -> float:
        """Return when a loan ended: the end of its event, or now."""
        ends = [e.end for e in after.unavailability if e.end is not None] if after else []
        return max([*ends, now])

    def promises(self) -> list[PromiseReport]:
        """Return how well each promised time was kept, the shortest one first."""
        return [_report_of(self._counts[promise]) for promise in sorted(self._counts)]

    # -- use

    def history(self, pool: str) -> UseHistory:
        """Return the history of use of a pool."""
        return self._history.get(pool) or UseHistory(pool=pool)

    def note_use(self, pool: str, used: int, now: float) -> UseHistory:
        """Record the use of a pool, and by how much it is below the pool's peak (AS6)."""
        known = self.history(pool)
        after = with_use(known, used, now)
        if known.used and slot(now) > known.last:
            hours = min(slot(now) - known.last, 12) / 12
            freed = max(0, peak(after) - known.used[-1]) * hours
            after = replace(after, freed_h=known.freed_h + freed)
        self._history[pool] = after
        return after

    def forget_pools(self, existing: Collection[str]) -> None:
        """Forget the histories of entitlements that were deleted."""
        for pool in [pool for pool in self._history if pool not in existing]:
            del self._history[pool]

    def note_request(self, pool: str, has: int, wants: int, seconds: float) -> None:
        """Record that a borrower had `has` machines and wanted `wants` more for `seconds`."""
        known = self.history(pool)
        self._history[pool] = replace(
            known, had_s=known.had_s + has * seconds, wanted_s=known.wanted_s + wants * seconds
        )

    async def note_jobs(
        self, owner_of: OwnerOf, now: float, checkpoint: Callable[[], Awaitable[None]]
    ) -> None:
        """Record, every 5 minutes, by how much autoscaled jobs are below their peak."""
        if 0 <= now - self._jobs_at < _JOBS_S:
            return
        hours = min(max(0.0, now - self._jobs_at), 3600.0) / 3600 if self._jobs_at else 0.0
        self._jobs_at = now
        scaled = [record for record in self._jobs.records() if record.spec.autoscale is not None]
        for record in scaled:
            entitlement = record.spec.entitlement
            claims = owner_of(entitlement).index.claims.get(record.name) or ()
            size = 0.0
            for number, claim in enumerate(claims):
                if number % CHECKPOINT_EVERY == 0:
                    await checkpoint()
                size += machine_share(claim.demand, claim.machine.capacity)
            known = self._by_job.get(record.name) or FreedBy(
                job=record.name, entitlement=entitlement
            )
            most = max(known.peak, size)
            freed = known.machine_h + (most - size) * hours
            self._by_job[record.name] = replace(known, peak=most, machine_h=freed)
            await checkpoint()
        names = {record.name for record in scaled}
        self._by_job = {name: r for name, r in self._by_job.items() if name in names}

    def freed(self) -> list[JobFreed]:
        """Return the machine-hours that autoscaled jobs left to others, largest first."""
        lines = [
            JobFreed(job=r.job, entitlement=r.entitlement, machine_hours=round(r.machine_h, 2))
            for r in self._by_job.values()
        ]
        return sorted(lines, key=lambda line: (-line.machine_hours, line.job))

    # -- the store

    async def save(self, now: float) -> None:
        """Write counts of ended loans at once, and histories every half hour."""
        if self._dirty:
            self._dirty = False  # a loan may end during the write
            try:
                await _write(self._promises, {f"{p:g}": c for p, c in self._counts.items()})
            except TwineError:
                self._dirty = True
                raise
        if not 0 <= now - self._saved_at < _SAVE_S:
            await _write(self._uses, self._history)
            await _write(self._freed, self._by_job)
            self._saved_at = now


async def _write(table: Table[_T], records: Mapping[str, _T]) -> None:
    """Make a table equal to the records in memory."""
    changed: dict[str, _T | None] = {n: None for n in table.names() if n not in records}
    changed |= {name: r for name, r in records.items() if table.find(name) != r}
    if changed:
        async with table.lock(*changed):
            await table.commit_in_parts(changed)


def _report_of(counts: PromiseCounts) -> PromiseReport:
    notices, returns = counts.notices_s, counts.returns_s
    return PromiseReport(
        promise_s=counts.promise_s,
        ended=counts.ended,
        revoked=counts.revoked,
        forced=counts.forced,
        interrupted=counts.interrupted,
        broken=counts.broken,
        samples=len(returns),
        mean_notice_s=round(sum(notices) / len(notices), 1) if notices else 0.0,
        return_p50_s=quantile(returns, 0.5),
        return_p99_s=quantile(returns, 0.99),
        return_max_s=max(returns, default=0.0),
        machine_hours=round(counts.machine_s / 3600, 2),
    )
