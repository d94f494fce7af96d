"""Lends idle machines, and calls them back in time (EL1, EL2).

Every few seconds the lender checks whether an owner waits for lent machines. Every few minutes it
matches idle machines with borrowers. The decisions are in `core`. Loans and their deadlines are in
the machines' records, so they survive the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.elastic import ElasticMode
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.unavailability import blocking
from control_plane.elastic import survey
from control_plane.elastic.core.expecting import expected
from control_plane.elastic.core.matching import (
    Borrower,
    CallBack,
    Idle,
    Need,
    NewLoan,
    Offer,
    OpenLoan,
    loans_to_call_back,
    match_loans,
)
from control_plane.elastic.ledger import ElasticLedger
from control_plane.elastic.survey import LenderParts, PoolWaiting
from wire.errors import Conflict, NotFound, TwineError

log = logging.getLogger(__name__)
COUNT_S = 60.0
"""Interval between counts of the machines in use, because a large region has a million machines."""
AT_ONCE = 50
"""Loans that are called back at once, so that a slow store does not use up the promised time."""
UNUSED_S = 120.0
"""Time without tasks after which a borrower's loan ends."""
INSIST_S = 15.0
"""An owner that waits longer gets its lent machines back even if machines are free. It cannot use
these, because they are promised to others or their rack has no power left."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of one pool in a round of the lender."""

    pool: str
    spec: EntitlementSpec
    used: int
    """Its own machines with tasks."""
    expected: int
    """The most machines that it will use until a loan made now could return."""
    short: int
    """Machines of its quota that it waits for."""
    wants: int
    """Machines that it would borrow in addition."""
    types: frozenset[str]
    """Machine types on which its waiting tasks can run."""


class Lender:
    """The loop that lends and calls back."""

    def __init__(self, parts: LenderParts, ledger: ElasticLedger) -> None:
        self._parts, self._ledger = parts, ledger
        self._settings = parts.region.settings.elastic
        self._runtime = parts.region.runtime
        self._broker = parts.region.broker
        self._idle_since: dict[str, float] = {}
        """Machine without tasks → when that was first observed (time of the loop).

        `note_use` removes an entry as soon as tasks arrive or leave.
        """
        self.short_since: dict[str, float] = {}
        """Pool that waits for machines of its quota → since when (time of the loop)."""
        self.why: dict[str, str] = {}
        """Machine → reason of its recall."""
        self.proposed = 0
        """Loans that the last matching proposed."""
        self._matched_at = float("-inf")
        self.now: dict[str, PoolState] = {}
        self.has_surveyed = False
        """Whether `now` has been read since this process started."""
        self.loans = self.leaving = 0
        self._counted_at = float("-inf")
        self.by_msb: dict[str, Counter[str]] = {}
        """Pool → machines of its own with tasks, by MSB."""

    async def run(self) -> None:
        """Lend and call back machines until cancelled."""
        while True:
            await self._runtime.sleep(self._settings.look_s)
            await self._round()

    def note_use(self, machines: Sequence[str]) -> None:
        """Record that tasks came to machines or left them, so they were in use until now.

        A use that begins and ends between two rounds is reported only here.
        """
        for machine in machines:
            self._idle_since.pop(machine, None)

    # -- one round

    async def _round(self) -> None:
        self._ledger.set_date(self._runtime.date())
        loans = self._open_loans()
        self.loans, self.leaving = len(loans), sum(loan.revoked for loan in loans)
        self.now = await self._survey(loans)
        self.has_surveyed = True
        await self._revoke(loans)
        if self._runtime.now() - self._matched_at >= self._settings.every_s:
            self._matched_at = self._runtime.now()
            await self._match(loans)
        try:
            await self._ledger.save(self._runtime.date())
        except TwineError as e:  # owners do not wait for a report
            log.warning("counts of loans were not stored", extra={"reason": str(e)})

    def _pools(self) -> dict[str, EntitlementSpec]:
        records = self._parts.entitlements.records()
        return {r.name: r.spec for r in records if r.spec.materialization is None}

    async def _survey(self, loans: Sequence[OpenLoan]) -> dict[str, PoolState]:
        """Return the state of all pools; counts machines in use every `COUNT_S`."""
        pools, borrowed = dict[str, PoolState](), {loan.machine for loan in loans}
        waits = survey.waiting(self._parts.allocators)
        now, wall, specs = self._runtime.now(), self._runtime.date(), self._pools()
        if now - self._counted_at >= COUNT_S:
            self._counted_at = now
            self.by_msb = {pool: by for pool, by in self.by_msb.items() if pool in specs}
            self._ledger.forget_pools(specs)
            for pool in specs:
                self.by_msb[pool] = await survey.used_by_msb(
                    self._parts.owner_of, pool, borrowed.__contains__, self._runtime.checkpoint
                )
                self._ledger.note_use(pool, self.by_msb[pool].total(), wall)
            await self._ledger.note_jobs(self._parts.owner_of, wall, self._runtime.checkpoint)
        ahead_s = self._free_promise() + self._settings.every_s
        lent = Counter(loan.donor for loan in loans)
        taken = Counter(loan.borrower for loan in loans)
        usable = Counter(loan.borrower for loan in loans if not loan.revoked)
        for pool, spec in specs.items():
            used = self.by_msb.get(pool, Counter()).total()
            waiting = waits.get(pool, PoolWaiting())
            types = frozenset(waiting.types)
            left = self._quota_left(pool, types) if waiting.machines else 0
            short = waiting.machines
            short = short if left is None else min(short, left + lent[pool])
            wants = max(0, min(spec.borrows - taken[pool], waiting.machines - short))
            if short:
                self.short_since.setdefault(pool, now)
            else:
                self.short_since.pop(pool, None)
            if spec.borrows:
                self._ledger.note_request(pool, usable[pool], wants, self._settings.look_s)
            most = expected(self._ledger.history(pool), used, wall, ahead_s)
            pools[pool] = PoolState(pool, spec, used, most, short, wants, types)
        return pools

    def _quota_left(self, pool: str, types: frozenset[str]) -> int | None:
        """Return how many more machines a pool's quota permits; None: its quota has no number."""
        allocator = self._parts.owner_of(pool)
        kinds = [k.capacity for k in allocator.index.kinds() if k.capacity.machine_type in types]
        return allocator.quotas.machines_left(pool, kinds)

    def _promise(self, spec: EntitlementSpec) -> float:
        return spec.elastic.promise.seconds if spec.elastic else self._settings.promise.seconds

    def _free_promise(self) -> float:
        """Return the promised time in seconds for free machines: the shortest of any owner."""
        owners = [s for s in self._pools().values() if s.elastic and s.machines != 0]
        return min([self._settings.promise.seconds, *map(self._promise, owners)])

    def kept_free(self) -> int:
        """Return how many free machines are not lent, because owners are expected to need them."""
        growth = sum(max(0, p.expected - p.used) for p in self.now.values())
        return self._settings.keep_free + growth

    # -- calling back

    async def _revoke(self, loans: Sequence[OpenLoan]) -> None:
        calls = loans_to_call_back(
            loans,
            self._needs(loans),
            self._runtime.date(),
            idle_after_s=UNUSED_S,
            most=self._settings.most_calls,
        )
        for first in range(0, len(calls), AT_ONCE):
            await asyncio.gather(*map(self._call, calls[first : first + AT_ONCE]))

    async def _call(self, call: CallBack) -> None:
        tasks = self._parts.tasks_on(call.machine)
        try:
            await self._parts.loans.revoke([call.machine], call.within_s, call.why)
        except (Conflict, NotFound):
            return  # the machine was returned or moved in the meantime
        except TwineError as e:
            fields = {"machine": call.machine, "reason": str(e)}
            log.warning("loan could not be revoked", extra=fields)
            return
        self.why[call.machine] = call.why
        self._ledger.note_call_back(call.machine, tasks)

    def _needs(self, loans: Sequence[OpenLoan]) -> list[Need]:
        """Return the machines that owners wait for, and those that the free pool will lack."""
        needs = list[Need]()
        if not loans:
            return needs
        coming = [loan for loan in loans if loan.revoked and loan.donor == FREE]
        for pool in sorted(self.now.values(), key=lambda p: (-p.spec.priority, p.pool)):
            if not pool.short:
                continue
            waited = self._runtime.now() - self.short_since[pool.pool]
            free_now = survey.usable_free(self._parts.owner_of, pool.types)
            free_now = free_now if waited < INSIST_S else 0
            need = Need(
                pool=pool.pool,
                machines=0,
                types=pool.types,
                datacenter=pool.spec.datacenter,
                priority=pool.spec.priority,
                why=f"{pool.pool} needs it",
                region=pool.spec.region,
            )
            own = sum(
                loan.revoked and loan.donor == pool.pool and need.is_met_by(loan) for loan in loans
            )
            missing = max(0, pool.short - free_now - own)
            taken = {loan.machine for loan in [c for c in coming if need.is_met_by(c)][:missing]}
            coming = [loan for loan in coming if loan.machine not in taken]
            missing -= len(taken)
            left = self._quota_left(pool.pool, pool.types)
            from_free = missing if left is None else min(missing, left)
            needs.append(replace(need, machines=missing, from_free=from_free))
        free = self._parts.free() + len(coming)
        ahead = max(0, self.kept_free() - free)
        if ahead:
            why = "owners are expected to need more machines"
            needs.append(Need(FREE, ahead, priority=-1, from_free=ahead, why=why))
        return needs

    def _open_loans(self) -> list[OpenLoan]:
        """Return all loans with their present use."""
        loans, now, wall = list[OpenLoan](), self._runtime.now(), self._runtime.date()
        for record in self._parts.loans.lent():
            loan = record.loan
            if loan is None:
                continue
            tasks = self._parts.tasks_on(record.machine)
            idle_s = 0.0 if tasks else now - self._idle_since.setdefault(record.machine, now)
            if tasks:
                self.note_use([record.machine])
            loans.append(
                OpenLoan(
                    machine=record.machine,
                    donor=loan.donor,
                    borrower=record.entitlement,
                    machine_type=record.machine_type,
                    datacenter=record.location.datacenter,
                    promise_s=loan.promise_s,
                    until=loan.until,
                    revoked=loan.revoked_at is not None,
                    tasks=tasks,
                    usable=record.state is MachineState.UP and not _is_leaving(record, wall),
                    idle_s=idle_s,
                    region=record.location.region,
                )
            )
        return loans

    # -- lending

    def holding(self) -> str:
        """Return why nothing is lent now; empty if lending is possible or switched off."""
        return "" if self._settings.mode is ElasticMode.OFF else self._parts.unwell()

    async def _match(self, loans: Sequence[OpenLoan]) -> None:
        if self._settings.mode is ElasticMode.OFF:
            return
        borrowers = self._borrowers(loans)
        new = list[NewLoan]()
        if borrowers and not any(pool.short for pool in self.now.values()):
            offers, idle = self._offers(), await self._idle_machines()
            new = await self._runtime.offload(match_loans, idle, offers, borrowers)
        self.proposed = len(new)
        if self._settings.mode is not ElasticMode.APPLY or self.holding():
            return
        began = self._runtime.now()
        for loan in new:
            if self._runtime.now() - began > self._settings.look_s:
                self._matched_at = float("-inf")  # owners come first; the next round matches again
                return
            try:
                await self._lend(loan)
            except (Conflict, NotFound):
                continue  # the machine has another owner by now
            except TwineError as e:
                log.warning("not lent", extra={"machine": loan.machine, "reason": str(e)})

    async def _lend(self, new: NewLoan) -> None:
        allocator = self._parts.owner_of(new.donor)
        machine = allocator.index.machines.get(new.machine)
        entitlement = self._parts.entitlements.find(new.borrower)
        if machine is None or machine.jobs or machine.blocked or entitlement is None:
            return
        if self._parts.tasks_on(new.machine):
            return

        async def write() -> None:
            await self._parts.loans.lend(
                new.machine,
                new.borrower,
                entitlement.spec.host_profile,
                donor=new.donor,
                empty=not machine.jobs,
                promise_s=new.promise_s,
                loan_s=new.loan_s,
            )

        await allocator.releases.pass_on(new.machine, write)
        self._idle_since.pop(new.machine, None)

    def _borrowers(self, loans: Sequence[OpenLoan]) -> list[Borrower]:
        """Return the pools that want to borrow machines."""
        borrowers = list[Borrower]()
        for pool in self.now.values():
            elastic = pool.spec.elastic
            if elastic is not None and pool.wants:
                borrowers.append(
                    Borrower(
                        pool=pool.pool,
                        wants=pool.wants,
                        has=sum(loan.borrower == pool.pool for loan in loans),
                        notice_s=elastic.notice.seconds,
                        loan_s=elastic.loan_s,
                        share=elastic.share,
                        types=pool.types,
                        datacenter=pool.spec.datacenter,
                        region=pool.spec.region,
                    )
                )
        return borrowers

    def _offers(self) -> dict[str, Offer]:
        """Return the terms of the free pool and of each pool that lends."""
        free = Offer(self._free_promise(), self._settings.free_idle_s, self.kept_free())
        offers = {FREE: free}
        for pool in self.now.values():
            elastic = pool.spec.elastic
            if elastic is not None and elastic.lend:
                ahead = max(0, pool.expected - pool.used)
                offers[pool.pool] = Offer(elastic.promise.seconds, elastic.lend_after_s, ahead)
        return offers

    async def _idle_machines(self) -> list[Idle]:
        """Return the machines that may be lent; forget since when other machines are idle.

        Machines change pools and get tasks at each checkpoint, so this reads a copy of each pool
        and changes `_idle_since` in place.
        """
        idle, now = list[Idle](), self._runtime.now()
        for pool in (FREE, *(p for p, n in self.now.items() if n.spec.elastic)):
            for machine in list(survey.unused(self._parts.owner_of, pool)):
                record = self._broker.table.find(machine.name)
                if record is None or record.loan is not None or record.hold is not None:
                    continue
                if machine.jobs or machine.pool != pool:
                    continue
                since = self._idle_since.setdefault(machine.name, now)
                idle.append(
                    Idle(
                        machine=machine.name,
                        donor=pool,
                        machine_type=machine.capacity.machine_type,
                        datacenter=machine.place.datacenter,
                        msb=machine.place.msb,
                        idle_s=now - since,
                        region=machine.place.region,
                    )
                )
                await self._runtime.checkpoint()
        known = {machine.machine for machine in idle}
        known |= {record.machine for record in self._parts.loans.lent()}
        for name in self._idle_since.keys() - known:
            del self._idle_since[name]
        return idle


def _is_leaving(record: MachineRecord, now: float) -> bool:
    """Return whether planned work takes a lent machine, so that its owner could not use it."""
    return bool(blocking(record, now)) and (record.loan is None or record.loan.revoked_at is None)
