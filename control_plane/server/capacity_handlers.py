"""The front end's handlers for the capacity portal."""

from __future__ import annotations

import re

from agent.api import ID_PATTERN, Ack
from agent.errors import InvalidInput
from agent.wire.peers import principal
from agent.wire.server import Call, Peer
from control_plane.api.capacity import (
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementView,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.services.capacity_desk import CapacityDesk
from control_plane.services.portal import Person

_NAME = re.compile(ID_PATTERN)


class CapacityHandlers:
    """A handler for each of `CAPACITY_ROUTES`."""

    def __init__(self, desk: CapacityDesk) -> None:
        """Take what the handlers call."""
        self._desk = desk

    async def list_entitlements(self, _: Call) -> Entitlements:
        """List the entitlements."""
        return await self._desk.list_entitlements()

    async def get_entitlement(self, call: Call) -> EntitlementView:
        """Show an entitlement."""
        return await self._desk.get_entitlement(call.path["entitlement"])

    async def put_entitlement(self, call: Call) -> EntitlementView:
        """Create or change an entitlement."""
        return await self._desk.put_entitlement(_name(call), call.body)

    async def delete_entitlement(self, call: Call) -> Ack:
        """Remove an entitlement."""
        await self._desk.delete_entitlement(call.path["entitlement"])
        return Ack()

    async def request_entitlement(self, call: Call) -> EntitlementRequest:
        """Take a request for capacity."""
        return await self._desk.request(_name(call), call.body, _person(call.peer))

    async def list_requests(self, call: Call) -> EntitlementRequests:
        """List the requests."""
        return await self._desk.list_requests(decided=call.flag("all"))

    async def get_request(self, call: Call) -> EntitlementRequest:
        """Show a request."""
        return await self._desk.get_request(call.path["request"])

    async def approve_request(self, call: Call) -> EntitlementRequest:
        """Grant a request."""
        return await self._desk.approve(call.path["request"], _person(call.peer), call.body.note)

    async def deny_request(self, call: Call) -> EntitlementRequest:
        """Refuse a request."""
        return await self._desk.deny(call.path["request"], _person(call.peer), call.body.note)

    async def withdraw_request(self, call: Call) -> EntitlementRequest:
        """Take a request back."""
        return await self._desk.withdraw(call.path["request"], _person(call.peer), call.body.note)

    async def get_capacity(self, _: Call) -> CapacityReport:
        """Show the capacity report."""
        return await self._desk.report()


def _person(peer: Peer) -> Person:
    return Person(principal(peer), is_operator=peer.role == "local")


def _name(call: Call) -> str:
    name = call.path["entitlement"]
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no name: a-z, 0-9 and -, at most 63 characters")
    return name
