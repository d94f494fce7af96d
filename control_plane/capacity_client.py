"""The part of the front end's client about entitlements, their capacity and host profiles."""

from __future__ import annotations

from control_plane.api.capacity import (
    DecisionNote,
    EntitlementChange,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.capacity_routes import CAPACITY_ROUTES, PROFILE_ROUTES
from control_plane.api.profiles import ProfileProposal, ProfileStats, ProfileView
from wire.client import WireClient, answer_as
from wire.routes import Route

_ROUTES = (*CAPACITY_ROUTES, *PROFILE_ROUTES)
_ROUTE: dict[str, Route] = {route.name: route for route in _ROUTES}


class CapacityClient(WireClient):
    """Reads and changes entitlements and host profiles, and decides requests for them.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements."""
        return answer_as(Entitlements, await self.call(_ROUTE["list_entitlements"]))

    async def get_entitlement(self, name: str) -> EntitlementView:
        """Return an entitlement, or raise `NotFound`."""
        return answer_as(
            EntitlementView, await self.call(_ROUTE["get_entitlement"], entitlement=name)
        )

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it, at once or not at all."""
        answer = await self.call(_ROUTE["put_entitlement"], spec, entitlement=name)
        return answer_as(EntitlementView, answer)

    async def request_entitlement(self, name: str, change: EntitlementChange) -> EntitlementRequest:
        """Request an entitlement, a change or a removal; the answer has the outcome."""
        answer = await self.call(_ROUTE["request_entitlement"], change, entitlement=name)
        return answer_as(EntitlementRequest, answer)

    async def list_requests(self, *, decided: bool = False) -> EntitlementRequests:
        """Return the requests that wait for a decision, or all of them."""
        answer = await self.call(_ROUTE["list_requests"], all="true" if decided else None)
        return answer_as(EntitlementRequests, answer)

    async def approve_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Grant a request."""
        return await self._decide("approve_request", request_id, note)

    async def deny_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Refuse a request."""
        return await self._decide("deny_request", request_id, note)

    async def withdraw_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Withdraw the caller's own request."""
        return await self._decide("withdraw_request", request_id, note)

    async def _decide(self, route: str, request_id: str, note: str) -> EntitlementRequest:
        answer = await self.call(_ROUTE[route], DecisionNote(note=note), request=request_id)
        return answer_as(EntitlementRequest, answer)

    async def get_capacity(self) -> CapacityReport:
        """Return granted, held, used and remaining capacity."""
        return answer_as(CapacityReport, await self.call(_ROUTE["get_capacity"], timeout_s=120.0))

    async def propose_profile(
        self, entitlement: str, change: ProfileProposal, *, dry_run: bool = False
    ) -> ProfileView:
        """Bring the machines of an entitlement to a changed profile, a few at a time."""
        route, dry = _ROUTE["propose_profile"], "true" if dry_run else None
        answer = await self.call(route, change, entitlement=entitlement, dry_run=dry)
        return answer_as(ProfileView, answer)

    async def get_profile_rollout(self, entitlement: str) -> ProfileView:
        """Return the profile of an entitlement, and how far a change of it is."""
        route = _ROUTE["get_profile_rollout"]
        return answer_as(ProfileView, await self.call(route, entitlement=entitlement))

    async def rollback_profile(self, entitlement: str) -> ProfileView:
        """Bring its machines back to the profile before."""
        route = _ROUTE["rollback_profile"]
        return answer_as(ProfileView, await self.call(route, entitlement=entitlement))

    async def profile_stats(self) -> ProfileStats:
        """Return how long hosts take to change each kind of setting."""
        return answer_as(ProfileStats, await self.call(_ROUTE["profile_stats"]))
