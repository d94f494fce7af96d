"""The front end's rows about people: their names, their rights, and what they changed."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.authority import AuthorityView, RotationStep
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
    Needs,
    Revocation,
    Users,
)
from wire.routes import Route

_OPERATOR = "/v1/operators/{who}"
_HOST_ADMIN = "/v1/host-admins/{admin}"
_GROUP = "/v1/groups/{group}"

PEOPLE_ROUTES: tuple[Route, ...] = (
    Route(
        "get_current_user",
        "GET",
        "/v1/myself",
        response=CurrentUser,
        needs=Needs.VIEWER,
        summary="The caller: name, role, groups, owned entitlements",
    ),
    Route(
        "list_sessions",
        "GET",
        "/v1/console-sessions",
        response=ConsoleSessions,
        needs=Needs.VIEWER,
        summary="Browsers of the caller with the web console open; operators see all",
    ),
    Route(
        "end_session",
        "DELETE",
        "/v1/console-sessions/{session}",
        response=Ack,
        needs=Needs.VIEWER,
        summary="End a session of the web console: one's own, or any as an operator",
    ),
    Route(
        "list_operators",
        "GET",
        "/v1/operators",
        response=Grants,
        needs=Needs.VIEWER,
        summary="Operators and host admins",
    ),
    Route(
        "grant_operator",
        "PUT",
        _OPERATOR,
        response=Grant,
        needs=Needs.OPERATOR,
        summary="Make a user or a group an operator",
    ),
    Route(
        "revoke_operator",
        "DELETE",
        _OPERATOR,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Revoke the role of operator from a user or a group",
    ),
    Route(
        "grant_host_admin",
        "PUT",
        _HOST_ADMIN,
        response=Grant,
        needs=Needs.OPERATOR,
        summary="Permit a user or a group to run tasks without a sandbox",
    ),
    Route(
        "revoke_host_admin",
        "DELETE",
        _HOST_ADMIN,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Revoke the permission to run tasks without a sandbox",
    ),
    Route(
        "list_groups",
        "GET",
        "/v1/groups",
        response=Groups,
        needs=Needs.VIEWER,
        summary="All groups and their members",
    ),
    Route(
        "put_group",
        "PUT",
        _GROUP,
        request=GroupSpec,
        response=Group,
        needs=Needs.OPERATOR,
        summary="Create a group, or set its members",
    ),
    Route(
        "delete_group",
        "DELETE",
        _GROUP,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Remove a group: its members lose the rights they have through it",
    ),
    Route(
        "list_users",
        "GET",
        "/v1/users",
        response=Users,
        needs=Needs.OPERATOR,
        summary="Users with a credential, its expiry, and revoked users",
    ),
    Route(
        "revoke_user",
        "POST",
        "/v1/users/{user}:revoke",
        response=Revocation,
        needs=Needs.OPERATOR,
        summary="Revoke all present credentials of a user; a new one is valid",
    ),
    Route(
        "revoke_machine_identity",
        "POST",
        "/v1/machines/{machine}:revoke-identity",
        response=Revocation,
        needs=Needs.OPERATOR,
        summary="Revoke all present certificates of a host; it has to join again",
    ),
    Route(
        "list_duplicates",
        "GET",
        "/v1/duplicates",
        response=Duplicates,
        needs=Needs.OPERATOR,
        summary="Hosts with the identity of another host",
    ),
    Route(
        "forget_duplicate",
        "POST",
        "/v1/machines/{machine}:forget-duplicate",
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Check a cloned machine again: its clone is gone, or replaces it",
    ),
    Route(
        "get_roots",
        "GET",
        "/v1/authority/roots",
        response=AuthorityView,
        needs=Needs.OPERATOR,
        summary=(
            "The authority's roots, the holders that trust them, and obstacles to the next step"
        ),
    ),
    Route(
        "step_roots",
        "POST",
        "/v1/authority/roots",
        request=RotationStep,
        response=AuthorityView,
        needs=Needs.OPERATOR,
        summary="Take a step in the rotation of the root",
    ),
    Route(
        "list_audit",
        "GET",
        "/v1/audit",
        query=("before", "limit", "since", "who", "object"),
        response=AuditPage,
        needs=Needs.OPERATOR,
        summary="Changes with author and address, and refused requests; the newest first",
    ),
)
