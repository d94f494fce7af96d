"""Measures gates: Prometheus queries, HTTP checks, task health. A failed request gives no data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp

from conveyor.api import CompareGate, HttpGate, QueryGate
from conveyor.core import evaluation
from conveyor.core.evaluation import Measurement
from conveyor.runs import JobProgress, PipelineRun
from wire.errors import TwineError, Unreachable
from wire.prometheus import Prometheus

TEXT_MAX_BYTES = 64 << 10
POINTS_MAX = 10_000
"""Points of a series in one query: Prometheus refuses more than 11,000."""
NONE_MATCHES = "$^"
"""A regular expression that matches no task."""


class GateMeasurements(Protocol):
    """Measures gates of every kind (`GateMeter`), or of kind `command` (`CommandChecks`)."""

    async def measure(
        self, name: str, run: PipelineRun, jobs: Sequence[JobProgress], now: float
    ) -> Measurement | None:
        """Return one measurement of a gate; None: the measurement has not ended."""
        ...

    async def end(self, run: PipelineRun) -> None:
        """Stop the checks that measurements of an ended run left behind."""
        ...


class GateMeter:
    """Measures the gates of a step; `checks` runs command gates."""

    def __init__(self, checks: GateMeasurements | None = None) -> None:
        self._checks = checks

    async def measure(
        self, name: str, run: PipelineRun, jobs: Sequence[JobProgress], now: float
    ) -> Measurement | None:
        """Return one measurement of a gate; None: the measurement has not ended.

        `now` is in seconds since 1970. Never raises `TwineError`: a failed request gives no data.
        """
        gate, prometheus, time = run.spec.gates[name], run.spec.prometheus, run.steps[-1]
        reached = time.reached or now
        try:
            if gate.command is not None and self._checks is not None:
                return await self._checks.measure(name, run, jobs, now)
            if gate.health is not None:
                return evaluation.evaluate_health(gate.health, jobs, time.restarts or 0)
            if gate.query is not None:
                return await _query(gate.query, prometheus, jobs)
            if gate.compare is not None:
                return await _compare(gate.compare, prometheus, jobs, now - reached)
            assert gate.http is not None
            return await _http(gate.http)
        except TwineError as e:
            prefix = "" if gate.http or gate.command else f"Prometheus at {prometheus}: "
            return evaluation.no_data(f"{prefix}{e}")

    async def end(self, run: PipelineRun) -> None:
        """Stop the checks that measurements of an ended run left behind."""
        if self._checks is not None:
            await self._checks.end(run)


def tasks_pattern(tasks: Sequence[str]) -> str:
    """Return a regular expression (RE2) of exactly these task ids."""
    return "|".join(tasks) if tasks else NONE_MATCHES


async def _query(gate: QueryGate, prometheus: str, jobs: Sequence[JobProgress]) -> Measurement:
    tasks = tasks_pattern([task for job in jobs for task in job.new_tasks])
    query = gate.promql.replace("$tasks", tasks)
    async with Prometheus(prometheus) as server:
        answer = await server.query(query)
    if (text := answer.scalar()) is not None:
        return evaluation.evaluate_query(gate, [("scalar", _number(text))])
    series = [
        (_series_name(result.metric), _number(result.value[1]))
        for result in answer.series("vector")
        if result.value is not None
    ]
    return evaluation.evaluate_query(gate, series)


async def _compare(
    gate: CompareGate, prometheus: str, jobs: Sequence[JobProgress], age_s: float
) -> Measurement:
    window_s = max(0.0, min(gate.window_s, age_s))
    step_s = max(gate.step_s, window_s / POINTS_MAX)
    sides = []
    async with Prometheus(prometheus) as server:
        for tasks in (
            [task for job in jobs for task in job.new_tasks],
            [task for job in jobs for task in job.stable_tasks],
        ):
            query = gate.promql.replace("$tasks", tasks_pattern(tasks))
            end = time.time()  # Prometheus' clock is assumed to agree
            answer = await server.query_range(query, end - window_s, end, step_s)
            sides.append([_number(text) for r in answer.series("matrix") for _, text in r.values])
    return evaluation.evaluate_comparison(gate, *sides)


async def _http(gate: HttpGate) -> Measurement:
    began = time.monotonic()
    status, body = await _get(gate.url, gate.timeout_s, TEXT_MAX_BYTES)
    text = body.decode(errors="replace")
    return evaluation.evaluate_http(
        gate.status, gate.contains, status, text, time.monotonic() - began
    )


async def _get(url: str, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) >= max_bytes:
                    break
            return response.status, bytes(body[:max_bytes])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        raise Unreachable(f"no answer from {url}: {str(e) or type(e).__name__}") from e


def _series_name(metric: Mapping[str, str]) -> str:
    return metric.get("task") or metric.get("instance") or ",".join(metric.values()) or "value"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
