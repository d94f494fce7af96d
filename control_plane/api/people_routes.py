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
from control_plane.api.route_rows import operator_row, viewer_row
from wire.routes import Route

_OPERATOR = "/v1/operators/{who}"
_HOST_ADMIN = "/v1/host-admins/{admin}"
_GROUP = "/v1/groups/{group}"

PEOPLE_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "get_current_user",
        "/v1/myself",
        CurrentUser,
        "The caller: name, role, groups, owned entitlements",
    ),
    viewer_row(
        "list_sessions",
        "/v1/console-sessions",
        ConsoleSessions,
        "Browsers of the caller with the web console open; operators see all",
    ),
    Route(
        "end_session",
        "DELETE",
        "/v1/console-sessions/{session}",
        response=Ack,
        needs=Needs.VIEWER,
        summary="End a session of the web console: one's own, or any as an operator",
    ),
    viewer_row("list_operators", "/v1/operators", Grants, "Operators and host admins"),
    operator_row("grant_operator", f"PUT {_OPERATOR}", Grant, "Make a user or a group an operator"),
    operator_row(
        "revoke_operator",
        f"DELETE {_OPERATOR}",
        Ack,
        "Revoke the role of operator from a user or a group",
    ),
    operator_row(
        "grant_host_admin",
        f"PUT {_HOST_ADMIN}",
        Grant,
        "Permit a user or a group to run tasks without a sandbox",
    ),
    operator_row(
        "revoke_host_admin",
        f"DELETE {_HOST_ADMIN}",
        Ack,
        "Revoke the permission to run tasks without a sandbox",
    ),
    viewer_row("list_groups", "/v1/groups", Groups, "All groups and their members"),
    operator_row(
        "put_group", f"PUT {_GROUP}", Group, "Create a group, or set its members", request=GroupSpec
    ),
    operator_row(
        "delete_group",
        f"DELETE {_GROUP}",
        Ack,
        "Remove a group: its members lose the rights they have through it",
    ),
    operator_row(
        "list_users",
        "GET /v1/users",
        Users,
        "Users with a credential, its expiry, and revoked users",
    ),
    operator_row(
        "revoke_user",
        "POST /v1/users/{user}:revoke",
        Revocation,
        "Revoke all present credentials of a user; a new one is valid",
    ),
    operator_row(
        "revoke_machine_identity",
        "POST /v1/machines/{machine}:revoke-identity",
        Revocation,
        "Revoke all present certificates of a host; it has to join again",
    ),
    operator_row(
        "list_duplicates",
        "GET /v1/duplicates",
        Duplicates,
        "Hosts with the identity of another host",
    ),
    operator_row(
        "forget_duplicate",
        "POST /v1/machines/{machine}:forget-duplicate",
        Ack,
        "Check a cloned machine again: its clone is gone, or replaces it",
    ),
    operator_row(
        "get_roots",
        "GET /v1/authority/roots",
        AuthorityView,
        "The authority's roots, the holders that trust them, and obstacles to the next step",
    ),
    operator_row(
        "step_roots",
        "POST /v1/authority/roots",
        AuthorityView,
        "Take a step in the rotation of the root",
        request=RotationStep,
    ),
    operator_row(
        "list_audit",
        "GET /v1/audit",
        AuditPage,
        "Changes with author and address, and refused requests; the newest first",
        query=("before", "limit", "since", "who", "object"),
    ),
)
