"""Runs load tests: shifts requests to one task by its weight in discovery, step by step.

Only shares of the existing requests change. Weights expire soon after a step. So when this process
crashes, or the front end does not answer, all tasks have the usual share within a minute or two.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from control_plane.api.endpoints import Endpoints
from control_plane.api.jobs import JobPhase, JobStatus, task_id
from control_plane.api.load_tests import LoadTest, LoadTestRequest, LoadTestState, LoadTestStep
from control_plane.api.weights import EndpointWeights
from control_plane.autoscaler.core.load_testing import (
    capacity,
    exceeded_limit,
    multiples,
    query_for,
    weights_for,
)
from control_plane.runtime.runtime import Runtime
from wire.errors import Conflict, NotFound, TwineError, Unprocessable, Unreachable
from wire.prometheus import Prometheus

log = logging.getLogger(__name__)
WEIGHTS_EXPIRE_S, WEIGHTS_RENEW_S = 90.0, 30.0
"""Weights are written again after `WEIGHTS_RENEW_S`. If this process dies they expire after
`WEIGHTS_EXPIRE_S`, and within two minutes all tasks have their usual share."""
READS_PER_STEP = 5
"""Reads of latency and errors in each step; the last one is the step's measurement."""


class WeightsApi(Protocol):
    """The calls of a load test to the front end: `ControlPlaneClient` has all of them."""

    async def get_job(self, job: str) -> JobStatus: ...
    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints: ...
    async def put_weights(self, job: str, weights: EndpointWeights) -> Endpoints: ...


class LoadTester:
    """At most one load test for each job at a time."""

    def __init__(self, runtime: Runtime, api: WeightsApi, prometheus: Prometheus | None) -> None:
        """Without Prometheus every test is refused."""
        self._runtime, self._api, self._prometheus = runtime, api, prometheus
        self._tests: dict[str, LoadTest] = {}
        self._work: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """End all tests, and give all tasks their usual share."""
        for job in list(self._work):
            await self.end(job)

    def find(self, job: str) -> LoadTest:
        """Return the last test of a job, or raise `NotFound`."""
        known = self._tests.get(job)
        if known is None:
            raise NotFound(f"this process has not load-tested job {job!r}")
        return known

    async def begin(self, job: str, request: LoadTestRequest) -> LoadTest:
        """Begin a test; `Conflict` while one runs, `Unprocessable` where the job is not at rest."""
        self._check_idle(job)
        if self._prometheus is None:
            hint = "start it with --prometheus URL"
            raise Unprocessable("this autoscaler has no Prometheus server", hint=hint)
        status = await self._api.get_job(job)
        listed = {endpoint.task for endpoint in (await self._api.endpoints(job)).endpoints}
        name = task_id(job, request.task)
        if status.phase is not JobPhase.STABLE or name not in listed or len(listed) < 2:
            serves = "serves" if name in listed else "does not serve"
            raise Unprocessable(
                f"job {job!r} is not load-tested: it is {status.phase.value}, {len(listed)} of its "
                f"tasks serve, and {name} {serves}",
                hint="a test needs a stable job with at least two tasks that serve",
            )
        self._check_idle(job)  # another test may have begun meanwhile
        test = LoadTest(job=job, task=name, began_at=self._runtime.date())
        self._tests[job] = test
        self._work[job] = asyncio.create_task(self._run(job, request))
        return test

    def _check_idle(self, job: str) -> None:
        if job in self._work:
            raise Conflict(f"job {job!r} is being load-tested", hint="wait for it, or end it")

    async def end(self, job: str) -> None:
        """End a running test; without one nothing happens."""
        work = self._work.get(job)
        if work is not None:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        if self._work.pop(job, None) is not None:  # `_run` had not begun when it was cancelled
            self._set_result(job, LoadTestState.FAILED, "it was ended", None)
            await self._restore(job)

    async def _run(self, job: str, request: LoadTestRequest) -> None:
        try:
            reason = f"{request.most:g} times the usual requests were sent"
            for multiple in multiples(request):
                step, why = await self._run_step(job, request, multiple)
                if why:
                    reason = why
                    break
                self._tests[job] = replace(self._tests[job], steps=[*self._tests[job].steps, step])
            found = capacity(self._tests[job].steps)
            self._set_result(job, LoadTestState.DONE, reason, found)
        except asyncio.CancelledError:
            self._set_result(job, LoadTestState.FAILED, "it was ended", None)
        except TwineError as e:
            self._set_result(job, LoadTestState.FAILED, str(e), None)
        finally:
            self._work.pop(job, None)
            await self._restore(job)

    def _set_result(self, job: str, state: LoadTestState, reason: str, found: float | None) -> None:
        self._tests[job] = replace(self._tests[job], state=state, reason=reason, capacity=found)

    async def _restore(self, job: str) -> None:
        try:
            await self._api.put_weights(job, EndpointWeights())
        except TwineError as e:  # the weights expire by themselves
            log.warning("usual weights were not restored", extra={"job": job, "reason": str(e)})

    async def _run_step(
        self, job: str, request: LoadTestRequest, multiple: float
    ) -> tuple[LoadTestStep, str]:
        """Return the measurement at a multiple, and the limit that it exceeds; empty: none."""
        status = await self._api.get_job(job)
        if status.healthy < status.record.spec.tasks:
            raise Unprocessable(f"{status.healthy} of {status.record.spec.tasks} tasks are healthy")
        others = [i for i in range(status.record.spec.tasks) if i != request.task]
        weights = weights_for(multiple, request.task, others)
        step, why = LoadTestStep(multiple=round(multiple, 2), load=0.0, latency_s=0.0), ""
        for _ in range(READS_PER_STEP):
            await self._hold_weights(job, weights, request.step_s / READS_PER_STEP)
            step = await self._measure(job, request, multiple)
            why = exceeded_limit(request, step)
            if why:
                break
        return step, why

    async def _hold_weights(self, job: str, weights: dict[int, int], seconds: float) -> None:
        """Hold weights for a number of seconds, by writing them again before they expire."""
        ends = self._runtime.now() + seconds
        while (left := ends - self._runtime.now()) > 0:
            await self._api.put_weights(
                job, EndpointWeights(weights=weights, for_s=WEIGHTS_EXPIRE_S)
            )
            await self._runtime.sleep(min(WEIGHTS_RENEW_S, left))

    async def _measure(self, job: str, request: LoadTestRequest, multiple: float) -> LoadTestStep:
        task = task_id(job, request.task)
        return LoadTestStep(
            multiple=round(multiple, 2),
            load=await self._query_value(query_for(request.load, task)),
            latency_s=await self._query_value(query_for(request.latency, task)),
            errors=await self._query_value(query_for(request.errors, task))
            if request.errors
            else 0.0,
        )

    async def _query_value(self, query: str) -> float:
        assert self._prometheus is not None
        series = (await self._prometheus.query(query)).series("vector")
        if len(series) != 1 or series[0].value is None:
            raise Unreachable(f"Prometheus: {query!r} returns {len(series)} series, not one")
        text = series[0].value[1]
        try:
            return float(text)
        except ValueError as e:
            raise Unreachable(
                f"Prometheus: the value of {query!r} is not a number: {text!r}"
            ) from e
