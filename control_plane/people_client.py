"""The part of the front end's client about users: identities, roles, groups and the audit log."""

from __future__ import annotations

from typing import Any

from control_plane.api.authority import AuthorityView, RotationStep, Step
from control_plane.api.duplicates import Duplicates
from control_plane.api.people import (
    AuditPage,
    ConsoleSessions,
    CurrentUser,
    Grant,
    Grants,
    Group,
    Groups,
    GroupSpec,
    Revocation,
    Users,
)
from control_plane.api.restored import Restored, RestoredView
from control_plane.route_calls import ROUTE, NamedCalls


class PeopleClient(NamedCalls):
    """Reads and changes identities, roles, groups and users, and reads the audit log.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def get_current_user(self) -> CurrentUser:
        """Return the caller's identity and rights."""
        return await self.ask(CurrentUser, "get_current_user")

    async def list_sessions(self) -> ConsoleSessions:
        """Return which browsers have the web console open."""
        return await self.ask(ConsoleSessions, "list_sessions")

    async def end_session(self, session: str) -> None:
        """End the session of a browser."""
        await self.call(ROUTE["end_session"], session=session)

    async def list_operators(self) -> Grants:
        """Return the grants of the operator role."""
        return await self.ask(Grants, "list_operators")

    async def grant_operator(self, who: str) -> Grant:
        """Make `user:NAME` or `group:NAME` an operator."""
        return await self.ask(Grant, "grant_operator", who=who)

    async def revoke_operator(self, who: str) -> None:
        """Take the operator role from a user or group."""
        await self.call(ROUTE["revoke_operator"], who=who)

    async def grant_host_admin(self, who: str) -> Grant:
        """Permit `user:NAME` or `group:NAME` to run tasks without a sandbox."""
        return await self.ask(Grant, "grant_host_admin", admin=who)

    async def revoke_host_admin(self, who: str) -> None:
        """Take the right to run tasks without a sandbox from a user or group."""
        await self.call(ROUTE["revoke_host_admin"], admin=who)

    async def list_groups(self) -> Groups:
        """Return all groups."""
        return await self.ask(Groups, "list_groups")

    async def put_group(self, name: str, spec: GroupSpec) -> Group:
        """Create a group, or replace its members."""
        return await self.ask(Group, "put_group", spec, group=name)

    async def delete_group(self, name: str) -> None:
        """Remove a group."""
        await self.call(ROUTE["delete_group"], group=name)

    async def list_users(self) -> Users:
        """Return the users with a credential, and those whose credentials were revoked."""
        return await self.ask(Users, "list_users")

    async def revoke_user(self, user: str) -> Revocation:
        """Revoke all credentials that a user has now."""
        return await self.ask(Revocation, "revoke_user", user=user)

    async def revoke_machine_identity(self, machine: str) -> Revocation:
        """Revoke all certificates that a host has now."""
        return await self.ask(Revocation, "revoke_machine_identity", machine=machine)

    async def list_duplicates(self) -> Duplicates:
        """Return the hosts that have the identity of another one."""
        return await self.ask(Duplicates, "list_duplicates")

    async def forget_duplicate(self, machine: str) -> None:
        """Check the hosts with a machine's identity again."""
        await self.call(ROUTE["forget_duplicate"], machine=machine)

    async def show_restored(self) -> RestoredView:
        """Return how machines differ from the copy that the store was restored from."""
        return await self.ask(RestoredView, "show_restored")

    async def release_restored(self) -> Restored:
        """Release the restored store, so that the control plane acts on its records."""
        return await self.ask(Restored, "release_restored")

    async def let_task_go(self, machine: str, task: str) -> None:
        """Stop a task that the restored store does not contain."""
        await self.call(ROUTE["let_task_go"], machine=machine, unknown=task)

    async def list_audit(self, **query: float | str | None) -> AuditPage:
        """Return a part of the audit log: `before`, `limit`, `since`, `who`, `object`."""
        given: dict[str, Any] = dict(query)
        return await self.ask(AuditPage, "list_audit", timeout_s=60.0, **given)

    async def get_roots(self) -> AuthorityView:
        """Return the authority's roots, and how many hosts trust and use each."""
        return await self.ask(AuthorityView, "get_roots")

    async def step_roots(self, step: Step, *, force: bool = False) -> AuthorityView:
        """Take one step of a root rotation."""
        request = RotationStep(step=step, force=force)
        return await self.ask(AuthorityView, "step_roots", request, timeout_s=60.0)
