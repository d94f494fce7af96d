"""The capacity portal: grants and requests for entitlements (paper §2.2).

A change that gives capacity back counts at once. A change that asks for more is checked against the
region's machines and all promises. Then the rules grant it, or it waits in the queue until a user
with that right decides (CP12).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from control_plane.api.capacity import (
    EntitlementChange,
    EntitlementRecord,
    EntitlementRequest,
    EntitlementSpec,
    RequestState,
)
from control_plane.api.settings import Approval, Overgrant, PortalSettings
from control_plane.portal.core.entitlement_check import check_entitlement, fixed_by_jobs
from control_plane.portal.core.grants import Shortage, shortage
from control_plane.portal.core.raises import asks_for_more, raises
from control_plane.portal.request_book import RequestBook
from control_plane.portal.supply import SupplyIndex
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.store import Delete, Put, Store
from control_plane.store.records import ENTITLEMENTS, USES
from wire.errors import (
    Conflict,
    FieldError,
    Forbidden,
    InvalidInput,
    TwineError,
    Unprocessable,
)

log = logging.getLogger(__name__)
THREAD_FROM = 200
"""From this number of entitlements on, sums run in a thread, because they would block the loop."""


@dataclass(frozen=True, slots=True)
class Person:
    """A user who requests or decides, as identified by the front end."""

    name: str
    is_operator: bool = False
    """Whether the user may do everything."""
    may_create: bool = True
    """Whether the rules may grant a new entitlement to the user; otherwise the request waits."""


RULES = Person("", is_operator=True)
"""Decides requests that the rules grant; it is no user."""


@dataclass(frozen=True, slots=True)
class Use:
    """The jobs in an entitlement and the machines that it holds."""

    jobs: Sequence[str] = ()
    held: Sequence[str] = ()


def _no_comparisons(_name: str, _spec: EntitlementSpec) -> Mapping[str, int]:
    return {}


class Portal:
    """Owner of all entitlement records and of the requests for them."""

    def __init__(
        self, store: Store, runtime: Runtime, settings: PortalSettings | None = None
    ) -> None:
        """The caller must let `supply` listen to the broker's machines."""
        self.table: Table[EntitlementRecord] = Table(
            store, ENTITLEMENTS, EntitlementRecord, "entitlement"
        )
        self.settings = settings or PortalSettings()
        self.requests = RequestBook(store, self.settings.keep_requests)
        self.supply = SupplyIndex()
        self._runtime = runtime
        self.jobs_of: Callable[[str], Sequence[str]] = lambda _: ()
        """Returns the jobs of an entitlement; the capacity service sets it."""
        self.in_scope: Callable[[str, EntitlementSpec], Mapping[str, int]] = _no_comparisons
        """Returns comparisons that hold while the shard of an entitlement may own it as specified,
        and raises `Conflict` if it may not; the shards set it."""
        self._applying: Counter[str] = Counter()
        """Entitlement → number of jobs that are being applied in it."""
        self._deleting: set[str] = set()
        """Entitlements that are being deleted."""
        self._lock = asyncio.Lock()  # two grants that fit alone may not fit together

    async def load(self) -> None:
        """Read all entitlements and requests."""
        await self.table.load()
        await self.requests.load()

    def specs(self) -> dict[str, EntitlementSpec]:
        """Return the specification of every entitlement."""
        return {record.name: record.spec for record in self.table.records()}

    async def put(self, name: str, spec: EntitlementSpec, *, jobs: list[str]) -> EntitlementRecord:
        """Create an entitlement or change it now, or raise why that is not possible."""
        async with self._lock:
            known = self.table.find(name)
            if known is not None and known.spec == spec:
                return known
            shortfall = await self._check(name, spec, jobs)
            if shortfall is not None:
                raise _quota_error(name, shortfall)
            if self._needs_approval(known, spec):
                raise Forbidden(
                    f"cannot give entitlement {name!r} more capacity: approval is required",
                    hint="twinectl entitlement request",
                )
            return await self._grant(name, spec)

    async def delete(self, name: str, use: Use) -> None:
        """Remove an entitlement that nothing uses."""
        async with self._lock:
            self._check_unused(name, use)
            await self._remove(name)

    async def request(
        self, name: str, change: EntitlementChange, who: Person, use: Use
    ) -> EntitlementRequest:
        """Grant a change, or store it as a request that a user with that right decides.

        Raises all errors of the change at once, and `Unprocessable` if the machines do not suffice
        and the change may not wait in the queue. A dry run only returns the result.
        """
        async with self._lock:
            known = self.table.find(name)
            request = EntitlementRequest(
                request_id=self.requests.new_id(),
                entitlement=name,
                spec=change.spec,
                based_on=known.generation if known else 0,
                requester=who.name,
                reason=change.reason,
                created_at=self._runtime.date(),
            )
            why = await self._why_pending(change, request, use, who)
            if change.dry_run:
                state = RequestState.PENDING if why else RequestState.APPROVED
                return replace(request, request_id="", why_pending=why, state=state)
            if why:
                request = replace(request, why_pending=why)
                await self.requests.save(request)
                log.info("entitlement requested", extra=_fields(request))
                return request
            return await self._approve(request, RULES, "")

    async def approve(
        self, request_id: str, who: Person, note: str, use: Use
    ) -> EntitlementRequest:
        """Grant a pending request if that is still possible; it takes effect now."""
        async with self._lock:
            request = self._pending(request_id, who)
            name = request.entitlement
            known = self.table.find(name)
            if (known.generation if known else 0) != request.based_on:
                raise Conflict(
                    f"cannot approve {request_id}: entitlement {name!r} has changed since",
                    hint=f"deny it, and request it again: twinectl entitlement show {name}",
                )
            if request.spec is None:
                self._check_unused(name, use)
            elif (shortfall := await self._check(name, request.spec, use.jobs)) is not None:
                raise _quota_error(name, shortfall)
            return await self._approve(request, who, note)

    async def deny(self, request_id: str, who: Person, note: str) -> EntitlementRequest:
        """Refuse a pending request."""
        async with self._lock:
            request = self._pending(request_id, who)
            return await self._decide(request, RequestState.DENIED, who, note)

    async def withdraw(self, request_id: str, who: Person, note: str) -> EntitlementRequest:
        """Withdraw a pending request; `Forbidden` for all but its requester."""
        async with self._lock:
            request = self._pending(request_id, None)
            if request.requester != who.name:
                raise Forbidden(f"{request_id} was made by {request.requester}, not by {who.name}")
            return await self._decide(request, RequestState.WITHDRAWN, who, note)

    @contextmanager
    def applying(self, name: str) -> Iterator[None]:
        """Keep an entitlement from being deleted while a job in it is written.

        Raises `Conflict` if the deletion came first.
        """
        if name in self._deleting:
            raise Conflict(f"cannot apply a job: entitlement {name!r} is being deleted")
        self._applying[name] += 1
        try:
            yield
        finally:
            self._applying[name] -= 1
            if not self._applying[name]:
                del self._applying[name]

    def is_applying(self, names: Iterable[str]) -> bool:
        """Return whether a job in one of these entitlements is being written."""
        return any(name in self._applying for name in names)

    # -- the caller holds the lock

    def _needs_approval(self, known: EntitlementRecord | None, spec: EntitlementSpec) -> bool:
        before = known.spec if known else None
        return self.settings.approval is Approval.ALWAYS and asks_for_more(before, spec)

    def _raises_beyond_rights(
        self, known: EntitlementRecord | None, spec: EntitlementSpec, who: Person
    ) -> list[str]:
        """Describe what a change raises beyond the caller's rights (BUG-HT26).

        The setting `owners_raise` has these rights.
        """
        if self.may_decide(who):
            return []
        found = raises(known.spec if known else None, spec)
        return [text for kind, text in found.items() if kind not in self.settings.owners_raise]

    async def _why_pending(
        self, change: EntitlementChange, request: EntitlementRequest, use: Use, who: Person
    ) -> str:
        """Return why a request waits for a decision; empty: the rules grant it now."""
        name, spec = request.entitlement, request.spec
        known = self.table.find(name)
        if spec is None:
            self.table.get(name)
            if not change.queue:
                self._check_unused(name, use)
            return "another user has to decide" if change.queue else ""
        shortfall = await self._check(name, spec, use.jobs)
        if shortfall is not None:
            if change.queue:
                return f"the region has too few machines: {shortfall}"
            raise _quota_error(name, shortfall)
        if change.queue:
            return "another user has to decide"
        if self._needs_approval(known, spec):
            return "approval is required for more capacity"
        if raised := self._raises_beyond_rights(known, spec, who):
            return f"approval is required for {' and '.join(raised)}"
        if known is None and not who.may_create:
            return "approval is required for a new entitlement"
        return ""

    async def _check(
        self, name: str, spec: EntitlementSpec, jobs: Sequence[str]
    ) -> Shortage | None:
        """Raise all errors of a specification; return its shortage of machines, if any."""
        specs, supply = self.specs(), self.supply.counts()
        before = specs.get(name)
        fixed = fixed_by_jobs(before, spec, jobs)
        profiles = self.supply.profiles()
        errors = (*check_entitlement(name, spec, specs, supply, profiles), *fixed)
        if errors:
            raise _spec_errors(name, errors, Conflict if fixed else InvalidInput)
        self.in_scope(name, spec)
        if self.settings.overgrant is Overgrant.ALLOW or not supply:
            return None
        if not asks_for_more(before, spec):
            return None
        if len(specs) < THREAD_FROM:
            return shortage(name, spec, specs, supply)
        return await asyncio.to_thread(shortage, name, spec, specs, supply)

    def _check_unused(self, name: str, use: Use) -> None:
        self.table.get(name)
        others = sorted(n for n, spec in self.specs().items() if spec.materialization == name)
        if use.jobs or use.held or others:
            users = [f"job {job}" for job in use.jobs]
            users += [f"reservation {other}" for other in others]
            users += [f"machine {machine}" for machine in use.held]
            raise Conflict(
                f"cannot delete entitlement {name!r}: it is used by {', '.join(users[:10])}",
                hint="stop its jobs; machines that still hold tasks are freed after that",
            )

    def _pending(self, request_id: str, decider: Person | None) -> EntitlementRequest:
        request = self.requests.get(request_id)
        if decider is not None and not self.may_decide(decider):
            raise Forbidden(
                f"{decider.name} may not decide {request_id}",
                hint="ask an operator, or one of portal.approvers in the configuration",
            )
        if request.state is not RequestState.PENDING:
            raise Conflict(f"{request_id} is already {request.state.value}")
        return request

    def may_decide(self, who: Person) -> bool:
        """Return whether a user may approve and deny requests."""
        return who.is_operator or who.name in self.settings.approvers

    async def _approve(
        self, request: EntitlementRequest, who: Person, note: str
    ) -> EntitlementRequest:
        """Apply a request: entitlement and request change together or not at all."""
        request = self._decided(request, RequestState.APPROVED, who, note)
        also = [self.requests.operation(request)]
        name = request.entitlement
        if request.spec is None:
            await self._remove(name, also)
        else:
            await self._grant(name, request.spec, also)
        self.requests.accept(request)
        await self._drop_old_requests()
        return request

    async def _decide(
        self, request: EntitlementRequest, state: RequestState, who: Person, note: str
    ) -> EntitlementRequest:
        request = self._decided(request, state, who, note)
        await self.requests.save(request)
        log.info("entitlement request was decided", extra=_fields(request))
        await self._drop_old_requests()
        return request

    async def _drop_old_requests(self) -> None:
        """Delete the oldest decided requests; if that fails, the next decision repeats it."""
        try:
            await self.requests.drop_old()
        except TwineError as e:
            log.warning("old entitlement requests were not deleted", extra={"reason": str(e)})

    def _decided(
        self, request: EntitlementRequest, state: RequestState, who: Person, note: str
    ) -> EntitlementRequest:
        now = self._runtime.date()
        return replace(request, state=state, decided_by=who.name, decided_at=now, note=note)

    async def _grant(
        self, name: str, spec: EntitlementSpec, also: Sequence[Put] = ()
    ) -> EntitlementRecord:
        async with self.table.lock(name):
            known = self.table.find(name)
            if known is None:
                record = EntitlementRecord(name=name, spec=spec, created_at=self._runtime.date())
            elif known.spec == spec:
                record = known
            else:
                record = replace(known, spec=spec, generation=known.generation + 1)
            await self.table.commit(name, record, self.in_scope(name, spec), also)
        log.info("entitlement changed", extra={"entitlement": name})
        return record

    async def _remove(self, name: str, also: Sequence[Put] = ()) -> None:
        async with self.table.lock(name):
            self.table.get(name)
            entry = await self.table.store.get(USES + name)
            self._check_unused(name, Use(self.jobs_of(name)))
            if self._applying[name]:
                raise Conflict(f"cannot delete entitlement {name!r}: a job is being moved to it")
            compare = {USES + name: entry.revision if entry is not None else 0}
            self._deleting.add(name)
            try:
                await self.table.commit(name, None, compare, [*also, Delete(USES + name)])
            finally:
                self._deleting.remove(name)
        log.info("entitlement deleted", extra={"entitlement": name})


def _quota_error(name: str, short: Shortage) -> Unprocessable:
    message = f"cannot grant entitlement {name!r} its quota: {short}"
    return Unprocessable(message, hint=short.hint)


def _spec_errors(
    name: str, errors: tuple[FieldError, ...], kind: type[Conflict] | type[InvalidInput]
) -> Conflict | InvalidInput:
    listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
    return kind(f"cannot change entitlement {name!r}: {listed}", errors=errors)


def _fields(request: EntitlementRequest) -> dict[str, str]:
    return {"entitlement": request.entitlement, "request": request.request_id}
