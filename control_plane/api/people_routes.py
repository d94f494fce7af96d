"""The front end's rows about people: their names, their rights, and what they changed."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.authority import AuthorityView, RotationStep
from control_plane.api.duplicates import Duplicates
from control_plane.api.people import (
    AuditPage,
    ConsoleSessions,
    Grant,
    Grants,
    Group,
    Groups,
    GroupSpec,
    Myself,
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
        "get_myself",
        "GET",
        "/v1/myself",
        response=Myself,
        needs=Needs.VIEWER,
        summary="The caller: name, role, groups, owned entitlements",
    ),
    Route(
        "list_sessions",
        "GET",
        "/v1/console-sessions",
        response=ConsoleSessions,
        needs=Needs.VIEWER,
        summary="Browsers of the caller that have the web console open; for operators all",
    ),
    Route(
        "end_session",
        "DELETE",
        "/v1/console-sessions/{session}",
        response=Ack,
        needs=Needs.VIEWER,
        summary="End a session of the web console: the caller's own, or as an operator any",
    ),
    Route(
        "list_operators",
        "GET",
        "/v1/operators",
        response=Grants,
        needs=Needs.VIEWER,
        summary="Who is an operator, and who a host admin",
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
        summary="Make a user or a group an operator no longer",
    ),
    Route(
        "grant_host_admin",
        "PUT",
        _HOST_ADMIN,
        response=Grant,
        needs=Needs.OPERATOR,
        summary="Let a user or a group run tasks without a sandbox",
    ),
    Route(
        "revoke_host_admin",
        "DELETE",
        _HOST_ADMIN,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Let a user or a group run tasks without a sandbox no longer",
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
        summary="Create a group, or say who belongs to it",
    ),
    Route(
        "delete_group",
        "DELETE",
        _GROUP,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Remove a group: its members own nothing through it any more",
    ),
    Route(
        "list_users",
        "GET",
        "/v1/users",
        response=Users,
        needs=Needs.OPERATOR,
        summary="Who has a credential, until when, and whose was revoked",
    ),
    Route(
        "revoke_user",
        "POST",
        "/v1/users/{user}:revoke",
        response=Revocation,
        needs=Needs.OPERATOR,
        summary="Let no credential count that a user has now; a new one does",
    ),
    Route(
        "revoke_machine_identity",
        "POST",
        "/v1/machines/{machine}:revoke-identity",
        response=Revocation,
        needs=Needs.OPERATOR,
        summary="Let no certificate count that a host has now; it has to join again",
    ),
    Route(
        "list_duplicates",
        "GET",
        "/v1/duplicates",
        response=Duplicates,
        needs=Needs.OPERATOR,
        summary="Hosts that have the identity of another one",
    ),
    Route(
        "forget_duplicate",
        "POST",
        "/v1/machines/{machine}:forget-duplicate",
        response=Ack,
        needs=Needs.OPERATOR,
        summary="The clone of a machine is gone, or is to be the machine: check again",
    ),
    Route(
        "get_roots",
        "GET",
        "/v1/authority/roots",
        response=AuthorityView,
        needs=Needs.OPERATOR,
        summary="The authority's roots, who goes along, and what hinders the next step",
    ),
    Route(
        "step_roots",
        "POST",
        "/v1/authority/roots",
        request=RotationStep,
        response=AuthorityView,
        needs=Needs.OPERATOR,
        summary="Take a step in the exchange of one root for another",
    ),
    Route(
        "list_audit",
        "GET",
        "/v1/audit",
        query=("before", "limit", "since", "who", "object"),
        response=AuditPage,
        needs=Needs.OPERATOR,
        summary="What was changed, by whom, and what was refused; the newest first",
    ),
)
