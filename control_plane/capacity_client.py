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
from control_plane.api.profiles import ProfileProposal, ProfileStats, ProfileView
from control_plane.route_calls import NamedCalls


class CapacityClient(NamedCalls):
    """Reads and changes entitlements and host profiles, and decides requests for them.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements."""
        return await self.ask(Entitlements, "list_entitlements")

    async def get_entitlement(self, name: str) -> EntitlementView:
        """Return an entitlement, or raise `NotFound`."""
        return await self.ask(EntitlementView, "get_entitlement", entitlement=name)

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it, at once or not at all."""
        return await self.ask(EntitlementView, "put_entitlement", spec, entitlement=name)

    async def request_entitlement(self, name: str, change: EntitlementChange) -> EntitlementRequest:
        """Request an entitlement, a change or a removal; the answer has the outcome."""
        return await self.ask(EntitlementRequest, "request_entitlement", change, entitlement=name)

    async def list_requests(self, *, decided: bool = False) -> EntitlementRequests:
        """Return the requests that wait for a decision, or all of them."""
        return await self.ask(EntitlementRequests, "list_requests", all="true" if decided else None)

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
        return await self.ask(
            EntitlementRequest, route, DecisionNote(note=note), request=request_id
        )

    async def get_capacity(self) -> CapacityReport:
        """Return granted, held, used and remaining capacity."""
        return await self.ask(CapacityReport, "get_capacity", timeout_s=120.0)

    async def propose_profile(
        self, entitlement: str, change: ProfileProposal, *, dry_run: bool = False
    ) -> ProfileView:
        """Bring the machines of an entitlement to a changed profile, a few at a time."""
        dry = "true" if dry_run else None
        return await self.ask(
            ProfileView, "propose_profile", change, entitlement=entitlement, dry_run=dry
        )

    async def get_profile_rollout(self, entitlement: str) -> ProfileView:
        """Return the profile of an entitlement, and how far a change of it is."""
        return await self.ask(ProfileView, "get_profile_rollout", entitlement=entitlement)

    async def rollback_profile(self, entitlement: str) -> ProfileView:
        """Bring its machines back to the profile before."""
        return await self.ask(ProfileView, "rollback_profile", entitlement=entitlement)

    async def profile_stats(self) -> ProfileStats:
        """Return how long hosts take to change each kind of setting."""
        return await self.ask(ProfileStats, "profile_stats")
