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
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.front_end.trail import MAX_PAGE, PAGE, Query, Trail
from control_plane.identity.authority import check_user_name
from control_plane.identity.issued import users_of
from control_plane.identity.sessions import BrowserSessions
from wire.errors import InvalidInput
from wire.peers import principal
from wire.server import Call

Issued = Callable[[], Awaitable[list[IssuedCredential]]]


class PeopleHandlers(PlaneHandlers):
    """A handler for each of `PEOPLE_ROUTES`."""

    _guard: Guard
    _trail: Trail
    _issued: Issued
    sessions: BrowserSessions
    """Browsers that have the web console open."""

    async def get_current_user(self, call: Call) -> CurrentUser:
        """Show the caller."""
        return self._guard.current_user(call.peer)

    async def list_sessions(self, call: Call) -> ConsoleSessions:
        """Show which browsers have the console open."""
        everyone = self._guard.caller(call.peer).is_operator
        return self.sessions.list_sessions(principal(call.peer), everyone=everyone)

    async def end_session(self, call: Call) -> Ack:
        """End the session of a browser."""
        may_end_all, by = self._guard.caller(call.peer).is_operator, principal(call.peer)
        self.sessions.end(call.path["session"], by, may_end_all=may_end_all)
        return Ack(detail=f"session {call.path['session']} is ended")

    async def list_operators(self, _: Call) -> Grants:
        """Show the operators and the host admins."""
        return self._guard.people.operators()

    async def grant_operator(self, call: Call) -> Grant:
        """Make a user an operator."""
        return await self._guard.people.grant(call.path["who"], principal(call.peer))

    async def revoke_operator(self, call: Call) -> Ack:
        """Take the operator's role from a user."""
        await self._guard.people.revoke(call.path["who"])
        return Ack()

    async def grant_host_admin(self, call: Call) -> Grant:
        """Make a user a host admin."""
        people, by = self._guard.people, principal(call.peer)
        return await people.grant(call.path["admin"], by, Role.HOST_ADMIN)

    async def revoke_host_admin(self, call: Call) -> Ack:
        """Take the host admin's role from a user."""
        await self._guard.people.revoke(call.path["admin"], Role.HOST_ADMIN)
        return Ack()

    async def list_groups(self, _: Call) -> Groups:
        """Show the groups."""
        return self._guard.people.groups()

    async def put_group(self, call: Call) -> Group:
        """Create or change a group."""
        return await self._guard.people.put_group(call.path["group"], call.body)

    async def delete_group(self, call: Call) -> Ack:
        """Remove a group."""
        await self._guard.people.delete_group(call.path["group"])
        return Ack()

    async def list_users(self, _: Call) -> Users:
        """Show the users that have a credential."""
        issued = await self._issued()
        return users_of(issued, self._guard.people.revocations())

    async def revoke_user(self, call: Call) -> Revocation:
        """Revoke a user's credentials."""
        name = call.path["user"]
        check_user_name(name)
        return await self._guard.people.revoke_identity("user", name, principal(call.peer))

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
        return await self._trail.page(query)
