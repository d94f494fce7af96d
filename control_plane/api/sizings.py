"""The autoscaler's recommendations with reasons, the cost of other policies, and the routes."""

from __future__ import annotations

import msgspec

from control_plane.api.autoscale import Autoscale, AutoscaleMode
from wire.routes import Route


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The load that is not exceeded within the horizon, in the wanted share of cases."""

    load: float
    expected: float
    """The forecast without the margin."""
    by: dict[str, float] = {}
    """Predictor → its share of the forecast."""
    horizon_s: float = 0.0


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A size, and its reason with numbers."""

    at: float
    tasks: int
    was: int
    reason: str
    wanted: int = 0
    """Size before bounds and limits; 0: not computed, because data is missing."""
    held: str = ""
    """Why the size is kept or not reduced although the load differs."""
    load: float | None = None
    forecast: Forecast | None = None
    capacity: float = 1.0
    """Load of one task at target 1."""


class ReplayCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of sizes over a load."""

    minutes: int = 0
    missing: float = 0.0
    """Task-minutes that were missing."""
    idle: float = 0.0
    """Task-minutes that were too many."""
    cost: float = 0.0
    """Missing (with its penalty) and idle task-minutes together."""
    short_minutes: int = 0
    """Minutes in which a task was missing."""
    changes: int = 0
    mean_size: float = 0.0
    peak_size: int = 0


class SizingView(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the autoscaler sees it."""

    job: str
    entitlement: str
    mode: AutoscaleMode
    tasks: int
    """Its size."""
    healthy: int
    recommendation: Recommendation | None = None
    """None: it was not evaluated yet."""
    written: str = ""
    """The outcome of the last written change; empty: there was none."""
    start_s: float | None = None
    """Seconds that the slowest of the last increases took until its tasks were healthy."""
    forecasts_held: float | None = None
    """Share of the forecasts that the load did not exceed."""
    history_from: float | None = None
    """When its history begins, in seconds since 1970."""
    carried: float | None = None
    """Load of a task at which its latency reaches the limit, as learnt; None: not learnt."""
    latency_at: float | None = None
    """When that was last measured, in seconds since 1970."""
    loads: list[tuple[float, float]] = []
    """Time and load of the last 3 days, oldest first; empty in a list of jobs."""
    day_peaks: list[tuple[float, float]] = []
    """Begin and largest load of each measured day of a year; empty in a list of jobs."""


class SizingViews(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs that are autoscaled, by name."""

    sizings: list[SizingView]
    failing: str = ""
    """Why the last round failed; empty: it did not."""
    round_at: float = 0.0
    """When the last successful round ended, in seconds since 1970."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a job, replayed under its policy and under another one."""

    job: str
    days: float
    """Days of its history that were replayed."""
    start_s: float
    """Time after which a new task counts as healthy."""
    own: ReplayCost
    other: ReplayCost
    fixed: ReplayCost
    """Cost with a constant size, as its peak needs."""


AUTOSCALER_ROUTES: tuple[Route, ...] = (
    Route(
        "list_sizings",
        "GET",
        "/v1/sizings",
        response=SizingViews,
        summary="All autoscaled jobs, with size, recommendation and reason",
    ),
    Route(
        "get_sizing",
        "GET",
        "/v1/sizings/{job}",
        response=SizingView,
        summary="One autoscaled job",
    ),
    Route(
        "simulate_sizing",
        "POST",
        "/v1/sizings/{job}/simulation",
        request=Autoscale,
        response=Simulation,
        changes=False,
        is_costly=True,
        summary="What another policy would have cost over the job's own history",
    ),
)
"""Served by `twine-autoscaler` on its unix socket."""
