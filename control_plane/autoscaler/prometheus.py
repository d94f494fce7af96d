"""Measures the load of jobs by queries to a Prometheus server.

Only `query_range` is used. Whatever the server answers, the result is a load with its time, or the
reason why there is none. In that case the caller holds the size.
"""

from __future__ import annotations

import asyncio
import math

from msgspec.structs import replace

from control_plane.api.autoscale import Autoscale
from control_plane.api.jobs import JobStatus
from control_plane.autoscaler.core.history import DAY_S, FINE, HALF_HOUR_S, HALF_HOURS, SLOT_S
from control_plane.autoscaler.core.observing import LoadReading
from control_plane.runtime.runtime import Runtime
from wire.errors import Unreachable
from wire.prometheus import Prometheus

STEP_S, WINDOW_S = 30.0, 300.0
AT_ONCE = 8


class PrometheusSource:
    """Runs the `query` of each policy at one server, which the caller closes."""

    def __init__(self, server: Prometheus, runtime: Runtime) -> None:
        self._server, self._runtime = server, runtime
        self._gate = asyncio.Semaphore(AT_ONCE)

    def forget(self, jobs: set[str]) -> None:
        """Do nothing: this source keeps no state of jobs."""

    async def measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        """Return the newest load and latency of a job within the last five minutes."""
        del status
        load = await self._newest(policy.query)
        if policy.latency is None:
            return load
        return replace(load, latency=await self._newest(policy.latency.query))

    async def _newest(self, query: str) -> LoadReading:
        end = self._runtime.date()
        try:
            points = await self._points(query, end - WINDOW_S, end, STEP_S)
        except Unreachable as e:
            return LoadReading(missing=f"Prometheus: {e}")
        if not points:
            return LoadReading(missing="Prometheus: the query returns nothing for the last 5 min")
        at, load = points[-1]
        if not math.isfinite(load) or load < 0:
            return LoadReading(missing=f"Prometheus: the query returns {load:g}")
        return LoadReading(load=load, at=at)

    async def past(self, status: JobStatus, policy: Autoscale) -> list[tuple[float, float]] | None:
        """Return half hours of the last 8 weeks and 5-minute points of the last 3 days."""
        del status
        end = self._runtime.date()
        fine = end - FINE * SLOT_S
        parts = ((end - HALF_HOURS * HALF_HOUR_S, fine, HALF_HOUR_S), (fine, end - SLOT_S, SLOT_S))
        points = list[tuple[float, float]]()
        try:
            for start, until, step in parts:
                points += await self._points(policy.query, start, until, float(step))
        except Unreachable:
            return None
        return [(at, load) for at, load in points if math.isfinite(load) and load >= 0]

    async def _points(
        self, query: str, start: float, end: float, step: float
    ) -> list[tuple[float, float]]:
        async with self._gate:
            answer = await self._server.query_range(query, start, end, step)
        series = answer.series("matrix")
        if len(series) > 1:
            raise Unreachable(f"the query returns {len(series)} series; aggregate them, as sum(…)")
        values = series[0].values if series else []
        try:
            points = [(at, float(text)) for at, text in values]
        except ValueError as e:
            raise Unreachable(f"a value is not a number: {e}") from e
        return sorted(p for p in points if start - DAY_S <= p[0] <= end + DAY_S)
