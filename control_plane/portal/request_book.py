"""Stores requests for entitlements, with requester and decision."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.api.capacity import EntitlementRequest, RequestState
from control_plane.store import Delete, Put, Store
from control_plane.store.bounds import ROWS_MAX
from control_plane.store.quarantine import quarantined
from control_plane.store.records import REQUESTS, decode, encode
from wire.errors import NotFound


class RequestBook:
    """All requests by id. A decided request is never written again; the oldest are dropped.

    The portal holds its lock during every change.
    """

    def __init__(self, store: Store, keep: int) -> None:
        self._store = store
        self._keep = keep
        self._requests: dict[str, EntitlementRequest] = {}
        self._pending: dict[str, EntitlementRequest] = {}
        self._last = 0

    async def load(self) -> None:
        """Read all requests; ids of those that were set aside as damaged are not used again."""
        listing = await self._store.list_prefix(REQUESTS)
        found = [decode(e.value, EntitlementRequest, e.key) for e in listing.entries]
        for request in sorted(found, key=_number):
            self.accept(request)
        for name in await quarantined(self._store):
            number = name.removeprefix(f"{REQUESTS}r")
            if number.isdecimal():
                self._last = max(self._last, int(number))

    def __iter__(self) -> Iterator[EntitlementRequest]:
        """Yield all requests, the oldest first."""
        return iter(self._requests.values())

    def get(self, request_id: str) -> EntitlementRequest:
        """Return a request, or raise `NotFound`."""
        found = self._requests.get(request_id)
        if found is None:
            raise NotFound(
                f"there is no request {request_id!r}", hint="twinectl entitlement requests --all"
            )
        return found

    def pending(self, entitlement: str) -> list[str]:
        """Return the requests for an entitlement that wait for a decision."""
        return [
            request.request_id
            for request in self._pending.values()
            if request.entitlement == entitlement
        ]

    def new_id(self) -> str:
        """Return an unused id."""
        return f"r{self._last + 1}"

    def operation(self, request: EntitlementRequest) -> Put:
        """Return the operation that stores a request, as part of a larger transaction."""
        return Put(REQUESTS + request.request_id, encode(request))

    def accept(self, request: EntitlementRequest) -> None:
        """Record a request in memory; called once it is durable."""
        self._requests[request.request_id] = request
        self._last = max(self._last, _number(request))
        if request.state is RequestState.PENDING:
            self._pending[request.request_id] = request
        else:
            self._pending.pop(request.request_id, None)

    async def save(self, request: EntitlementRequest) -> None:
        """Store a request in a transaction of its own."""
        await self._store.txn({}, [self.operation(request)])
        self.accept(request)

    async def drop_old(self) -> None:
        """Delete the oldest decided requests if there are too many."""
        excess = len(self._requests) - len(self._pending) - self._keep
        if excess > 0:
            decided = [r.request_id for r in self if r.state is not RequestState.PENDING]
            old = decided[: min(excess, ROWS_MAX)]
            await self._store.txn({}, [Delete(REQUESTS + request_id) for request_id in old])
            for request_id in old:
                del self._requests[request_id]


def _number(request: EntitlementRequest) -> int:
    return int(request.request_id.removeprefix("r"))
