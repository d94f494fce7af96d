"""The front end's handlers about capacity and about host profiles of entitlements."""

from __future__ import annotations

import re

from msgspec.structs import replace

from agent.api import ID_PATTERN, Ack
from control_plane.api.capacity import (
    EntitlementChange,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.elastic import Buffers, CapacitySignal, ElasticReport
from control_plane.api.ownership import ShardLoads, ShardMoved
from control_plane.api.profiles import ProfileStats, ProfileView
from control_plane.front_end.guard import Guard
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.portal.portal import Person
from wire.errors import InvalidInput
from wire.fairness import Peer
from wire.peers import principal
from wire.server import Call

_NAME = re.compile(ID_PATTERN)


class CapacityHandlers(PlaneHandlers):
    """A handler for each of `CAPACITY_ROUTES`."""

    _guard: Guard
    """Resolves callers."""

    async def list_entitlements(self, _: Call) -> Entitlements:
        """List the entitlements."""
        return await self._plane.capacity.list_entitlements()

    async def get_entitlement(self, call: Call) -> EntitlementView:
        """Show an entitlement."""
        return await self._plane.capacity.get_entitlement(call.path["entitlement"])

    async def put_entitlement(self, call: Call) -> EntitlementView:
        """Create or change an entitlement."""
        self._check_owners(call.body)
        return await self._plane.capacity.put_entitlement(_name(call), call.body)

    async def delete_entitlement(self, call: Call) -> Ack:
        """Remove an entitlement."""
        await self._plane.capacity.delete_entitlement(call.path["entitlement"])
        return Ack()

    async def list_shards(self, _: Call) -> ShardLoads:
        """List the shards."""
        return await self._plane.shards.list_shards()

    async def move_entitlement(self, call: Call) -> ShardMoved:
        """Give an entitlement to another shard."""
        name, dry_run = call.path["entitlement"], call.flag("dry_run")
        return await self._plane.shards.move(name, call.body.to, dry_run=dry_run)

    async def request_entitlement(self, call: Call) -> EntitlementRequest:
        """Accept a request for capacity."""
        name, who = _name(call), self._person(call.peer)
        return await self._plane.capacity.request(
            name, self._with_owners(name, call.body, who), who
        )

    async def list_requests(self, call: Call) -> EntitlementRequests:
        """List the requests."""
        return await self._plane.capacity.list_requests(decided=call.flag("all"))

    async def get_request(self, call: Call) -> EntitlementRequest:
        """Show a request."""
        return self._plane.capacity.portal.requests.get(call.path["request"])

    async def approve_request(self, call: Call) -> EntitlementRequest:
        """Grant a request."""
        return await self._plane.capacity.approve(
            call.path["request"], self._person(call.peer), call.body.note
        )

    async def deny_request(self, call: Call) -> EntitlementRequest:
        """Refuse a request."""
        who = self._person(call.peer)
        return await self._plane.capacity.portal.deny(call.path["request"], who, call.body.note)

    async def withdraw_request(self, call: Call) -> EntitlementRequest:
        """Withdraw a request."""
        return await self._plane.capacity.portal.withdraw(
            call.path["request"], self._person(call.peer), call.body.note
        )

    async def get_capacity(self, _: Call) -> CapacityReport:
        """Show the capacity report."""
        return await self._plane.capacity.report()

    async def get_elastic(self, _: Call) -> ElasticReport:
        """Show what is lent, and how promises were kept."""
        return self._plane.elastic.report()

    async def get_buffers(self, _: Call) -> Buffers:
        """Show the spare machines that are needed."""
        return await self._plane.elastic.buffers()

    async def get_signal(self, call: Call) -> CapacitySignal:
        """Show whether a borrower has what it wants."""
        return self._plane.elastic.signal(call.path["entitlement"])

    def _person(self, peer: Peer) -> Person:
        is_operator = self._guard.caller(peer).is_operator
        return Person(principal(peer), is_operator=is_operator, may_create=is_operator)

    def _with_owners(self, name: str, change: EntitlementChange, who: Person) -> EntitlementChange:
        """Return the request, with its owners: the named ones, the present ones, or the caller."""
        if change.spec is None:
            return change
        self._check_owners(change.spec)
        if who.is_operator:
            return change
        known = list(self._plane.owners_of(name) or ())
        owners = change.spec.owners or known or [f"user:{who.name}"]
        return replace(change, spec=replace(change.spec, owners=owners))

    def _check_owners(self, spec: EntitlementSpec) -> None:
        if missing := self._guard.people.unknown_groups(spec.owners):
            raise InvalidInput(
                f"owners: there is no group {missing[0]!r}", hint="twinectl group set NAME USER …"
            )


def _name(call: Call) -> str:
    name = call.path["entitlement"]
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is not a valid name: a-z, 0-9 and -, at most 63 characters")
    return name


class ProfileHandlers(PlaneHandlers):
    """A handler for each row of `PROFILE_ROUTES`."""

    async def propose_profile(self, call: Call) -> ProfileView:
        """Begin to bring machines to another profile."""
        return await self._plane.profiles.propose(
            call.path["entitlement"], call.body, principal(call.peer), dry_run=call.flag("dry_run")
        )

    async def get_profile_rollout(self, call: Call) -> ProfileView:
        """Show the progress of a profile change."""
        return self._plane.profiles.show(call.path["entitlement"])

    async def rollback_profile(self, call: Call) -> ProfileView:
        """Bring machines back to the profile before."""
        return await self._plane.profiles.roll_back(call.path["entitlement"], principal(call.peer))

    async def profile_stats(self, _: Call) -> ProfileStats:
        """Show how long switches take."""
        return await self._plane.profiles.stats()
