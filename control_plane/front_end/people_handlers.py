"""The front end's handlers about users, roles and groups, and about the audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agent.api import Ack
from control_plane.api.people import (
    AuditPage,
    ConsoleSessions,
    CurrentUser,
    Grant,
    Grants,
    Group,
    Groups,
    IssuedCredential,
    Revocation,
    Role,
    Users,
)
from control_plane.api.routes import object_error
from control_plane.front_end.guard import Guard
from control_plane.front_end.trail import MAX_PAGE, PAGE, Query, Trail
from control_plane.identity.authority import check_user_name
from control_plane.identity.issued import users
from control_plane.identity.sessions import BrowserSessions
from wire.errors import InvalidInput
from wire.peers import principal
from wire.server import Call

Issued = Callable[[], Awaitable[list[IssuedCredential]]]


class PeopleHandlers:
    """A handler for each of `PEOPLE_ROUTES`."""

    def __init__(self, guard: Guard, trail: Trail, issued: Issued) -> None:
        """Take the services that the handlers call."""
        self._issued = issued
        self._known = guard
        self._log = trail
        self.sessions = BrowserSessions()
        """Browsers that have the web console open."""

    async def get_current_user(self, call: Call) -> CurrentUser:
        """Show the caller."""
        return self._known.current_user(call.peer)

    async def list_sessions(self, call: Call) -> ConsoleSessions:
        """Show which browsers have the console open."""
        everyone = self._known.caller(call.peer).is_operator
        return self.sessions.listed(principal(call.peer), everyone=everyone)

    async def end_session(self, call: Call) -> Ack:
        """End the session of a browser."""
        anyones, by = self._known.caller(call.peer).is_operator, principal(call.peer)
        self.sessions.end(call.path["session"], by, anyones=anyones)
        return Ack(detail=f"session {call.path['session']} is ended")

    async def list_operators(self, _: Call) -> Grants:
        """Show the operators and the host admins."""
        return self._known.people.operators()

    async def grant_operator(self, call: Call) -> Grant:
        """Make a user an operator."""
        return await self._known.people.grant(call.path["who"], principal(call.peer))

    async def revoke_operator(self, call: Call) -> Ack:
        """Take the operator's role from a user."""
        await self._known.people.revoke(call.path["who"])
        return Ack()

    async def grant_host_admin(self, call: Call) -> Grant:
        """Make a user a host admin."""
        people, by = self._known.people, principal(call.peer)
        return await people.grant(call.path["admin"], by, Role.HOST_ADMIN)

    async def revoke_host_admin(self, call: Call) -> Ack:
        """Take the host admin's role from a user."""
        await self._known.people.revoke(call.path["admin"], Role.HOST_ADMIN)
        return Ack()

    async def list_groups(self, _: Call) -> Groups:
        """Show the groups."""
        return self._known.people.groups()

    async def put_group(self, call: Call) -> Group:
        """Create or change a group."""
        return await self._known.people.put_group(call.path["group"], call.body)

    async def delete_group(self, call: Call) -> Ack:
        """Remove a group."""
        await self._known.people.delete_group(call.path["group"])
        return Ack()

    async def list_users(self, _: Call) -> Users:
        """Show the users that have a credential."""
        issued = await self._issued()
        return users(issued, self._known.people.revocations())

    async def revoke_user(self, call: Call) -> Revocation:
        """Revoke a user's credentials."""
        name = call.path["user"]
        check_user_name(name)
        return await self._known.people.revoke_identity("user", name, principal(call.peer))

    async def list_audit(self, call: Call) -> AuditPage:
        """Show a part of the audit log."""
        about = call.query.get("object", "")
        if about and (error := object_error(about)):
            raise InvalidInput(f"parameter object {error}")
        query = Query(
            before=call.whole("before") or 0,
            limit=call.limit(MAX_PAGE, PAGE),
            since=call.number("since", 0.0) or 0.0,
            who=call.query.get("who", ""),
            object=about,
        )
        return await self._log.page(query)
