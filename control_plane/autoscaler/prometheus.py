"""Measures the load of jobs by queries to a Prometheus server.

Only `query_range` is used. Whatever the server answers, the result is a load with its time, or the
reason why there is none: the caller then holds the size.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
import msgspec

from control_plane.api.autoscale import Autoscale
from control_plane.api.jobs import JobStatus
from control_plane.autoscaler.core.history import DAY_S, FINE, HALF_HOUR_S, HALF_HOURS, SLOT_S
from control_plane.autoscaler.signals import LoadReading
from control_plane.runtime.runtime import Runtime

TIMEOUT_S = 10.0
STEP_S, WINDOW_S = 30.0, 300.0
AT_ONCE = 8
ANSWER_MAX = 4 << 20
"""Bytes; a series of 11,000 points, the most that Prometheus returns, has 300 KB."""


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result_type: str = msgspec.field(name="resultType", default="")
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""


class QueryFailed(Exception):
    """A query gave no load; the text says why."""


class PrometheusSource:
    """Runs the `query` of each policy at one server: `url` is that of its web interface."""

    def __init__(self, url: str, runtime: Runtime, timeout_s: float = TIMEOUT_S) -> None:
        self._url, self._runtime = url.rstrip("/") + "/api/v1/query_range", runtime
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def forget(self, jobs: set[str]) -> None:
        """Do nothing: no job is remembered."""

    async def measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        """Return the newest point of the job's query within the last five minutes."""
        del status
        end = self._runtime.date()
        try:
            points = await self._points(policy.query, end - WINDOW_S, end, STEP_S)
        except QueryFailed as e:
            return LoadReading(missing=f"Prometheus: {e}")
        if not points:
            return LoadReading(missing="Prometheus: the query returns nothing of the last 5 min")
        at, load = points[-1]
        if not math.isfinite(load) or load < 0:
            return LoadReading(missing=f"Prometheus: the query returns {load:g}")
        return LoadReading(load=load, at=at)

    async def past(self, status: JobStatus, policy: Autoscale) -> list[tuple[float, float]]:
        """Return half hours of the last 8 weeks and 5-minute points of the last 3 days."""
        del status
        end = self._runtime.date()
        fine = end - FINE * SLOT_S
        parts = ((end - HALF_HOURS * HALF_HOUR_S, fine, HALF_HOUR_S), (fine, end - SLOT_S, SLOT_S))
        found = list[tuple[float, float]]()
        try:
            for start, until, step in parts:
                found += await self._points(policy.query, start, until, float(step))
        except QueryFailed:
            return []  # the history begins now
        return [(at, load) for at, load in found if math.isfinite(load) and load >= 0]

    async def _points(
        self, query: str, start: float, end: float, step: float
    ) -> list[tuple[float, float]]:
        asked = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        async with self._gate:
            answer = await self._ask(asked)
        if answer.status != "success":
            raise QueryFailed(f"it refuses the query: {answer.error[:300] or answer.status}")
        if answer.data.result_type not in ("matrix", ""):
            raise QueryFailed(f"it answers with a {answer.data.result_type[:50]}, not a matrix")
        if len(answer.data.result) > 1:
            raise QueryFailed(
                f"the query returns {len(answer.data.result)} series; aggregate them, as sum(…)"
            )
        values = answer.data.result[0].values if answer.data.result else []
        try:
            found = [(at, float(text)) for at, text in values]
        except ValueError as e:
            raise QueryFailed(f"a value is no number: {e}") from e
        return sorted(p for p in found if start - DAY_S <= p[0] <= end + DAY_S)

    async def _ask(self, asked: dict[str, str]) -> _Answer:
        session = self._session
        if session is None or session.closed:
            session = self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with session.post(self._url, data=asked) as response:
                body = await response.content.read(ANSWER_MAX + 1)
                while len(body) <= ANSWER_MAX and not response.content.at_eof():
                    body += await response.content.read(ANSWER_MAX + 1 - len(body))
                status = response.status
        except TimeoutError as e:
            raise QueryFailed(f"no answer within {self._timeout.total:g} s") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise QueryFailed(f"it cannot be reached: {_one_line(e)}") from e
        if len(body) > ANSWER_MAX:
            raise QueryFailed(f"its answer is over {ANSWER_MAX >> 20} MiB")
        try:
            return msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
            raise QueryFailed(f"its answer cannot be read (HTTP {status})") from e


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
