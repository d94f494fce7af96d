"""Routes about capacity and host profiles of entitlements; joined into `api.routes`."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.capacity import (
    DecisionNote,
    EntitlementChange,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.elastic import Buffers, CapacitySignal, ElasticReport
from control_plane.api.entitlement_rules import change_relations, entitlement_relations
from control_plane.api.ownership import ShardLoads, ShardMove, ShardMoved
from control_plane.api.people import Needs
from control_plane.api.profiles import ProfileProposal, ProfileStats, ProfileView
from wire.routes import Route

_ALL = "/v1/entitlements"
_ONE = "/v1/entitlements/{entitlement}"
_REQUEST = "/v1/entitlement-requests/{request}"


def _decision(name: str, needs: Needs, summary: str) -> Route:
    return Route(
        f"{name}_request",
        "POST",
        f"{_REQUEST}/{name}",
        request=DecisionNote,
        response=EntitlementRequest,
        needs=needs,
        summary=summary,
    )


CAPACITY_ROUTES: tuple[Route, ...] = (
    Route(
        "list_entitlements",
        "GET",
        _ALL,
        response=Entitlements,
        needs=Needs.VIEWER,
        summary="All entitlements",
    ),
    Route(
        "get_entitlement",
        "GET",
        _ONE,
        response=EntitlementView,
        needs=Needs.VIEWER,
        summary="One entitlement",
    ),
    Route(
        "put_entitlement",
        "PUT",
        _ONE,
        request=EntitlementSpec,
        response=EntitlementView,
        needs=Needs.OPERATOR,
        relations=entitlement_relations,
        summary="Create an entitlement or change it; granted at once or refused",
    ),
    Route(
        "delete_entitlement",
        "DELETE",
        _ONE,
        response=Ack,
        needs=Needs.OWNER,
        summary="Remove an entitlement that has no jobs",
    ),
    Route(
        "request_entitlement",
        "POST",
        f"{_ONE}/requests",
        request=EntitlementChange,
        response=EntitlementRequest,
        needs=Needs.ASKER,
        relations=change_relations,
        summary="Request an entitlement, a change, or a removal; it is granted or waits",
    ),
    Route(
        "list_requests",
        "GET",
        "/v1/entitlement-requests",
        query=("all",),
        response=EntitlementRequests,
        needs=Needs.VIEWER,
        summary="Requests that wait for a decision; with `all`, also decided ones",
    ),
    Route(
        "get_request",
        "GET",
        _REQUEST,
        response=EntitlementRequest,
        needs=Needs.VIEWER,
        summary="One request",
    ),
    _decision(
        "approve", Needs.APPROVER, "Grant a request; for operators and the portal's approvers"
    ),
    _decision("deny", Needs.APPROVER, "Refuse a request; for operators and the portal's approvers"),
    _decision("withdraw", Needs.VIEWER, "Withdraw one's own request"),
    Route(
        "get_capacity",
        "GET",
        "/v1/capacity",
        response=CapacityReport,
        needs=Needs.VIEWER,
        summary="Capacity granted, held, used and remaining",
    ),
    Route(
        "get_elastic",
        "GET",
        "/v1/capacity/elastic",
        response=ElasticReport,
        needs=Needs.VIEWER,
        summary="Loans and borrowers, entitlements that wait, and how promises were kept",
    ),
    Route(
        "get_buffers",
        "GET",
        "/v1/capacity/buffers",
        response=Buffers,
        needs=Needs.VIEWER,
        summary="Spare machines that the region needs, and that owners would need separately",
    ),
    Route(
        "get_signal",
        "GET",
        f"{_ONE}/signal",
        response=CapacitySignal,
        needs=Needs.VIEWER,
        summary=(
            "Whether a borrower has the machines that it wants, and when it loses the next one"
        ),
    ),
    Route(
        "list_shards",
        "GET",
        "/v1/shards",
        response=ShardLoads,
        needs=Needs.VIEWER,
        summary="The shards and their load",
    ),
    Route(
        "move_entitlement",
        "POST",
        f"{_ONE}/shard",
        request=ShardMove,
        response=ShardMoved,
        query=("dry_run",),
        needs=Needs.OPERATOR,
        summary="Give an entitlement to another shard; no task restarts",
    ),
)


_PROFILE = "/v1/entitlements/{entitlement}/profile"

PROFILE_ROUTES: tuple[Route, ...] = (
    Route(
        "propose_profile",
        "PUT",
        _PROFILE,
        request=ProfileProposal,
        response=ProfileView,
        query=("dry_run",),
        needs=Needs.OWNER,
        summary="Roll out a changed profile to the machines of an entitlement, a few at a time",
    ),
    Route(
        "get_profile_rollout",
        "GET",
        _PROFILE,
        response=ProfileView,
        needs=Needs.VIEWER,
        summary="The host profile of an entitlement, and the progress of a change",
    ),
    Route(
        "rollback_profile",
        "POST",
        f"{_PROFILE}/rollback",
        response=ProfileView,
        needs=Needs.OWNER,
        summary="Roll the machines of an entitlement back to the previous profile",
    ),
    Route(
        "profile_stats",
        "GET",
        "/v1/profile-stats",
        response=ProfileStats,
        needs=Needs.VIEWER,
        summary="Time that hosts take to change each kind of setting",
    ),
)
