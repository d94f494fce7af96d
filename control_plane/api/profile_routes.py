"""The front end's routes about host profiles that change; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.people import Needs
from control_plane.api.profiles import ProfileStats, ProfileView, ProfileWish
from wire.routes import Route

_PROFILE = "/v1/entitlements/{entitlement}/profile"

PROFILE_ROUTES: tuple[Route, ...] = (
    Route(
        "propose_profile",
        "PUT",
        _PROFILE,
        request=ProfileWish,
        response=ProfileView,
        query=("dry_run",),
        needs=Needs.OWNER,
        summary="Bring the machines of an entitlement to a changed profile, a few at a time",
    ),
    Route(
        "get_profile_rollout",
        "GET",
        _PROFILE,
        response=ProfileView,
        needs=Needs.VIEWER,
        summary="The host profile of an entitlement, and how far a change of it is",
    ),
    Route(
        "rollback_profile",
        "POST",
        f"{_PROFILE}/rollback",
        response=ProfileView,
        needs=Needs.OWNER,
        summary="Bring the machines of an entitlement back to the profile before",
    ),
    Route(
        "profile_stats",
        "GET",
        "/v1/profile-stats",
        response=ProfileStats,
        needs=Needs.VIEWER,
        summary="How long hosts take to change each kind of setting",
    ),
)
