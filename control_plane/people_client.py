"""The calls about users: identities, roles, groups and the audit log.

A part of `ControlPlaneClient`, which is what callers use.
"""

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
from control_plane.api.routes import ROUTES
from wire.client import WireClient, answer_as
from wire.routes import Route

_ROUTE: dict[str, Route] = {r.name: r for r in ROUTES}


class PeopleClient(WireClient):
    """Identities, operators, groups, users and the audit log."""

    async def get_current_user(self) -> CurrentUser:
        """Return the caller's identity and rights."""
        return answer_as(CurrentUser, await self.call(_ROUTE["get_current_user"]))

    async def list_sessions(self) -> ConsoleSessions:
        """Return which browsers have the web console open."""
        return answer_as(ConsoleSessions, await self.call(_ROUTE["list_sessions"]))

    async def end_session(self, session: str) -> None:
        """End the session of a browser."""
        await self.call(_ROUTE["end_session"], session=session)

    async def list_operators(self) -> Grants:
        """Return the grants of the operator role."""
        return answer_as(Grants, await self.call(_ROUTE["list_operators"]))

    async def grant_operator(self, who: str) -> Grant:
        """Make `user:NAME` or `group:NAME` an operator."""
        return answer_as(Grant, await self.call(_ROUTE["grant_operator"], who=who))

    async def revoke_operator(self, who: str) -> None:
        """Take the operator role from a user or group."""
        await self.call(_ROUTE["revoke_operator"], who=who)

    async def grant_host_admin(self, who: str) -> Grant:
        """Permit `user:NAME` or `group:NAME` to run tasks without a sandbox."""
        return answer_as(Grant, await self.call(_ROUTE["grant_host_admin"], admin=who))

    async def revoke_host_admin(self, who: str) -> None:
        """Take the right to run tasks without a sandbox from a user or group."""
        await self.call(_ROUTE["revoke_host_admin"], admin=who)

    async def list_groups(self) -> Groups:
        """Return all groups."""
        return answer_as(Groups, await self.call(_ROUTE["list_groups"]))

    async def put_group(self, name: str, spec: GroupSpec) -> Group:
        """Create a group, or replace its members."""
        return answer_as(Group, await self.call(_ROUTE["put_group"], spec, group=name))

    async def delete_group(self, name: str) -> None:
        """Remove a group."""
        await self.call(_ROUTE["delete_group"], group=name)

    async def list_users(self) -> Users:
        """Return the users with a credential, and those whose credentials were revoked."""
        return answer_as(Users, await self.call(_ROUTE["list_users"]))

    async def revoke_user(self, user: str) -> Revocation:
        """Revoke all credentials that a user has now."""
        return answer_as(Revocation, await self.call(_ROUTE["revoke_user"], user=user))

    async def revoke_machine_identity(self, machine: str) -> Revocation:
        """Revoke all certificates that a host has now."""
        answer = await self.call(_ROUTE["revoke_machine_identity"], machine=machine)
        return answer_as(Revocation, answer)

    async def list_duplicates(self) -> Duplicates:
        """Return the hosts that have the identity of another one."""
        return answer_as(Duplicates, await self.call(_ROUTE["list_duplicates"]))

    async def forget_duplicate(self, machine: str) -> None:
        """Check the hosts with a machine's identity again."""
        await self.call(_ROUTE["forget_duplicate"], machine=machine)

    async def show_restored(self) -> RestoredView:
        """Return how machines differ from the copy that the store was restored from."""
        return answer_as(RestoredView, await self.call(_ROUTE["show_restored"]))

    async def release_restored(self) -> Restored:
        """Release the restored store, so that the control plane acts on its records."""
        return answer_as(Restored, await self.call(_ROUTE["release_restored"]))

    async def let_task_go(self, machine: str, task: str) -> None:
        """Stop a task that the restored store does not contain."""
        await self.call(_ROUTE["let_task_go"], machine=machine, unknown=task)

    async def list_audit(self, **query: float | str | None) -> AuditPage:
        """Return a part of the audit log: `before`, `limit`, `since`, `who`, `object`."""
        given: dict[str, Any] = dict(query)
        return answer_as(AuditPage, await self.call(_ROUTE["list_audit"], timeout_s=60.0, **given))

    async def get_roots(self) -> AuthorityView:
        """Return the authority's roots, and how many hosts trust and use each."""
        return answer_as(AuthorityView, await self.call(_ROUTE["get_roots"]))

    async def step_roots(self, step: Step, *, force: bool = False) -> AuthorityView:
        """Take one step of a root rotation."""
        request = RotationStep(step=step, force=force)
        return answer_as(
            AuthorityView, await self.call(_ROUTE["step_roots"], request, timeout_s=60.0)
        )
