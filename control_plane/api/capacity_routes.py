"""The capacity portal's rows of the route table."""

from __future__ import annotations

from agent.api import Ack
from agent.wire.routes import Route
from control_plane.api.capacity import (
    DecisionNote,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
    EntitlementWish,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.entitlement_rules import entitlement_relations, wish_relations

_USER = ("user", "local")
_ALL = "/v1/entitlements"
_ONE = "/v1/entitlements/{entitlement}"
_REQUEST = "/v1/entitlement-requests/{request}"


def _decision(name: str, summary: str) -> Route:
    return Route(
        f"{name}_request",
        "POST",
        f"{_REQUEST}/{name}",
        request=DecisionNote,
        response=EntitlementRequest,
        roles=_USER,
        summary=summary,
    )


CAPACITY_ROUTES: tuple[Route, ...] = (
    Route(
        "list_entitlements",
        "GET",
        _ALL,
        response=Entitlements,
        roles=_USER,
        summary="All entitlements",
    ),
    Route(
        "get_entitlement",
        "GET",
        _ONE,
        response=EntitlementView,
        roles=_USER,
        summary="One entitlement",
    ),
    Route(
        "put_entitlement",
        "PUT",
        _ONE,
        request=EntitlementSpec,
        response=EntitlementView,
        roles=_USER,
        relations=entitlement_relations,
        summary="Create an entitlement or change it, at once or not at all",
    ),
    Route(
        "delete_entitlement",
        "DELETE",
        _ONE,
        response=Ack,
        roles=_USER,
        summary="Remove an entitlement that has no jobs",
    ),
    Route(
        "request_entitlement",
        "POST",
        f"{_ONE}/requests",
        request=EntitlementWish,
        response=EntitlementRequest,
        roles=_USER,
        relations=wish_relations,
        summary="Ask for an entitlement, a change, or a removal; it is granted or waits",
    ),
    Route(
        "list_requests",
        "GET",
        "/v1/entitlement-requests",
        query=("all",),
        response=EntitlementRequests,
        roles=_USER,
        summary="Requests that wait for a decision; with `all`, decided ones too",
    ),
    Route(
        "get_request",
        "GET",
        _REQUEST,
        response=EntitlementRequest,
        roles=_USER,
        summary="One request",
    ),
    _decision("approve", "Grant a request; for operators and the portal's approvers"),
    _decision("deny", "Refuse a request; for operators and the portal's approvers"),
    _decision("withdraw", "Take one's own request back"),
    Route(
        "get_capacity",
        "GET",
        "/v1/capacity",
        response=CapacityReport,
        roles=_USER,
        summary="What is granted, held, used and left over",
    ),
)
