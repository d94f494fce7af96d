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
from control_plane.api.route_rows import operator_row, owner_row, viewer_row
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
    viewer_row("list_entitlements", _ALL, Entitlements, "All entitlements"),
    viewer_row("get_entitlement", _ONE, EntitlementView, "One entitlement"),
    operator_row(
        "put_entitlement",
        f"PUT {_ONE}",
        EntitlementView,
        "Create an entitlement or change it; granted at once or refused",
        request=EntitlementSpec,
        relations=entitlement_relations,
    ),
    owner_row(
        "delete_entitlement", f"DELETE {_ONE}", Ack, "Remove an entitlement that has no jobs"
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
    viewer_row(
        "list_requests",
        "/v1/entitlement-requests",
        EntitlementRequests,
        "Requests that wait for a decision; with `all`, also decided ones",
        query=("all",),
    ),
    viewer_row("get_request", _REQUEST, EntitlementRequest, "One request"),
    _decision(
        "approve", Needs.APPROVER, "Grant a request; for operators and the portal's approvers"
    ),
    _decision("deny", Needs.APPROVER, "Refuse a request; for operators and the portal's approvers"),
    _decision("withdraw", Needs.VIEWER, "Withdraw one's own request"),
    viewer_row(
        "get_capacity", "/v1/capacity", CapacityReport, "Capacity granted, held, used and remaining"
    ),
    viewer_row(
        "get_elastic",
        "/v1/capacity/elastic",
        ElasticReport,
        "Loans and borrowers, entitlements that wait, and how promises were kept",
    ),
    viewer_row(
        "get_buffers",
        "/v1/capacity/buffers",
        Buffers,
        "Spare machines that the region needs, and that owners would need separately",
    ),
    viewer_row(
        "get_signal",
        f"{_ONE}/signal",
        CapacitySignal,
        "Whether a borrower has the machines that it wants, and when it loses the next one",
    ),
    viewer_row("list_shards", "/v1/shards", ShardLoads, "The shards and their load"),
    operator_row(
        "move_entitlement",
        f"POST {_ONE}/shard",
        ShardMoved,
        "Give an entitlement to another shard; no task restarts",
        request=ShardMove,
        query=("dry_run",),
    ),
)


_PROFILE = "/v1/entitlements/{entitlement}/profile"

PROFILE_ROUTES: tuple[Route, ...] = (
    owner_row(
        "propose_profile",
        f"PUT {_PROFILE}",
        ProfileView,
        "Roll out a changed profile to the machines of an entitlement, a few at a time",
        request=ProfileProposal,
        query=("dry_run",),
    ),
    viewer_row(
        "get_profile_rollout",
        _PROFILE,
        ProfileView,
        "The host profile of an entitlement, and the progress of a change",
    ),
    owner_row(
        "rollback_profile",
        f"POST {_PROFILE}/rollback",
        ProfileView,
        "Roll the machines of an entitlement back to the previous profile",
    ),
    viewer_row(
        "profile_stats",
        "/v1/profile-stats",
        ProfileStats,
        "Time that hosts take to change each kind of setting",
    ),
)
