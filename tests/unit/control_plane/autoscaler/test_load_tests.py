"""Load tests of one task: they shift requests to it up to a limit, and always shift them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from virtual_time import run

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus
from control_plane.api.load_tests import LoadTest, LoadTestRequest, LoadTestState, LoadTestStep
from control_plane.api.weights import EndpointWeights
from control_plane.autoscaler.core.load_testing import (
    capacity,
    exceeded_limit,
    multiples,
    weights_for,
)
from control_plane.autoscaler.load_tester import LoadTester
from control_plane.autoscaler.service import Autoscaler
from control_plane.autoscaler.serving import serving
from control_plane.cli import main
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, NotFound, Unprocessable, Unreachable
from wire.prometheus import PrometheusData

REQUEST = LoadTestRequest(
    load='rate{task="$task"}', latency='latency{task="$task"}', latency_max_s=1.0, step_s=0.05
)
TASKS, RATE, CARRIES = 4, 40.0, 33.0


class ModelService:
    """Four tasks behind a proxy with weights. Each task answers more slowly near its capacity."""

    def __init__(self) -> None:
        self.weights: list[dict[int, int]] = []
        self.phase, self.healthy = JobPhase.STABLE, TASKS
        self.trouble: Exception | None = None
        self.queries: list[str] = []

    def load(self) -> float:
        now = self.weights[-1] if self.weights else {}
        return RATE * now.get(0, 100) / sum(now.get(i, 100) for i in range(TASKS))

    async def get_job(self, job: str) -> JobStatus:
        spec = JobSpec(name=job, entitlement="front", tasks=TASKS, image=f"sha256:{'a' * 64}")
        record = JobRecord(name=job, spec=spec, version=1)
        return JobStatus(
            record=record,
            phase=self.phase,
            wanted=TASKS,
            running=TASKS,
            healthy=self.healthy,
            updated=TASKS,
        )

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        listed = [
            Endpoint(task=f"{job}-{i}", machine="m", host="::1", ports={}, version=1)
            for i in range(TASKS)
        ]
        return Endpoints(job=job, revision=1, endpoints=listed)

    async def put_weights(self, job: str, weights: EndpointWeights) -> Endpoints:
        self.weights.append(weights.weights)
        return await self.endpoints(job)

    async def query(self, promql: str) -> PrometheusData:
        self.queries.append(promql)
        if self.trouble is not None:
            raise self.trouble
        load = self.load()
        value = load if promql.startswith("rate") else 0.05 / max(1e-3, 1 - load / CARRIES)
        return PrometheusData(
            result_type="vector", result=[{"metric": {}, "value": [0.0, str(value)]}]
        )


async def outcome(model: ModelService, request: LoadTestRequest = REQUEST) -> LoadTest:
    tester = LoadTester(Runtime(), model, model)  # type: ignore[arg-type]
    await tester.begin("web", request)
    async with asyncio.timeout(60):
        while tester.find("web").state is LoadTestState.RUNNING:
            await asyncio.sleep(0.01)
    await tester.close()
    return tester.find("web")


@pytest.mark.behaviour("AS1")
async def test_the_capacity_of_a_task_is_found_with_the_requests_that_there_are() -> None:
    """The test measures what a task carries: the task gets more and more of the requests, up to a
    limit."""
    model = ModelService()
    found = await outcome(model)
    assert found.state is LoadTestState.DONE
    assert found.capacity is not None
    assert 0.6 * CARRIES <= found.capacity < CARRIES
    assert found.reason == "8 times the usual requests were sent"
    loads = [step.load for step in found.steps]
    assert loads == sorted(loads)
    assert loads[0] == pytest.approx(RATE / TASKS)
    assert model.weights[-1] == {}  # each task has its usual share again
    assert "web-0" in model.queries[0]


async def test_it_stops_at_the_limit_and_restores() -> None:
    model = ModelService()
    found = await outcome(model, LoadTestRequest(**_fields(latency_max_s=0.12)))
    assert found.state is LoadTestState.DONE
    assert found.reason.startswith("latency of")
    assert found.capacity is not None
    assert found.capacity < 20.0
    assert model.weights[-1] == {}


def _fields(**changes: object) -> dict[str, object]:
    return {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__} | changes


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda m: setattr(m, "trouble", Unreachable("no answer")), "no answer"),
        (lambda m: setattr(m, "healthy", 3), "3 of 4 tasks are healthy"),
    ],
)
async def test_trouble_ends_it_and_restores(
    fault: Callable[[ModelService], None], reason: str
) -> None:
    model = ModelService()
    fault(model)
    found = await outcome(model)
    assert (found.state, found.capacity) == (LoadTestState.FAILED, None)
    assert reason in found.reason
    assert model.weights[-1] == {}


async def test_only_a_job_at_rest_is_tested_and_once_at_a_time() -> None:
    model = ModelService()
    tester = LoadTester(Runtime(), model, model)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        tester.find("web")
    model.phase = JobPhase.PROGRESSING
    with pytest.raises(Unprocessable, match="progressing"):
        await tester.begin("web", REQUEST)
    assert model.weights == []
    model.phase = JobPhase.STABLE
    with pytest.raises(Unprocessable, match="web-9 does not serve"):
        await tester.begin("web", LoadTestRequest(**_fields(task=9)))
    await tester.begin("web", LoadTestRequest(**_fields(step_s=3600.0)))
    with pytest.raises(Conflict):
        await tester.begin("web", REQUEST)
    await tester.end("web")
    assert tester.find("web").reason == "it was ended"
    assert model.weights[-1:] == [{}]
    with pytest.raises(Unprocessable, match="no Prometheus"):
        await LoadTester(Runtime(), model, None).begin("web", REQUEST)


@pytest.mark.behaviour("BUG-CP72")
async def test_of_two_tests_that_begin_at_once_one_is_refused() -> None:
    """Formerly both ran, and the end of one hid the other."""
    model = ModelService()
    tester = LoadTester(Runtime(), model, model)  # type: ignore[arg-type]
    slow = LoadTestRequest(**_fields(step_s=3600.0))
    found = await asyncio.gather(
        *(tester.begin("web", slow) for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in found] == [LoadTest, Conflict]
    await tester.close()


@pytest.mark.behaviour("BUG-CP86")
def test_weights_end_within_two_minutes_of_the_process() -> None:
    """Formerly the weights lasted for twice the step: ten minutes and more with a long step."""

    async def main() -> None:
        model, loop = ModelService(), asyncio.get_running_loop()
        put = model.put_weights
        ends = list[tuple[float, float]]()

        async def noted(job: str, weights: EndpointWeights) -> Endpoints:
            if weights.weights:
                ends.append((loop.time(), loop.time() + weights.for_s))
            return await put(job, weights)

        model.put_weights = noted  # type: ignore[method-assign]
        tester = LoadTester(Runtime(), model, model)  # type: ignore[arg-type]
        await tester.begin("web", LoadTestRequest(**_fields(step_s=600.0)))
        await asyncio.sleep(1500)
        await tester.close()
        assert max(end - at for at, end in ends) <= 120.0
        assert all(after[0] < before[1] for before, after in pairwise(ends)), "no gap"
        assert ends[-1][0] > 1400.0

    run(main())


def test_weights_are_what_proxies_take() -> None:
    assert multiples(REQUEST)[0] == 1.0
    assert multiples(REQUEST)[-1] == pytest.approx(8.0)
    for multiple in (1.0, 1.4, 2.7, 8.0, 50.0):
        weights = weights_for(multiple, 0, [1, 2])
        assert all(1 <= weight <= 256 for weight in weights.values())
        assert weights[0] / weights[1] == pytest.approx(multiple, rel=0.05)


@pytest.mark.behaviour("BUG-CP124")
async def test_an_answer_that_is_no_number_ends_it_and_restores() -> None:
    """It was shown as running forever, and nobody read why it had ended."""
    model = ModelService()

    async def query(promql: str) -> PrometheusData:
        return PrometheusData(result_type="vector", result=[{"metric": {}, "value": [0.0, "x"]}])

    model.query = query  # type: ignore[method-assign]
    test = await outcome(model)
    assert (test.state, "is not a number: 'x'" in test.reason) == (LoadTestState.FAILED, True)
    assert model.weights[-1] == {}


def test_a_measurement_that_is_no_number_is_a_limit() -> None:
    assert exceeded_limit(REQUEST, LoadTestStep(multiple=1, load=float("nan"), latency_s=0.1))
    assert "errors" in exceeded_limit(
        REQUEST, LoadTestStep(multiple=1, load=1, latency_s=0.1, errors=0.5)
    )
    assert exceeded_limit(REQUEST, LoadTestStep(multiple=1, load=1, latency_s=0.1)) == ""
    assert capacity([]) is None


def typed(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["autoscale", "load-test", "web", "--socket", str(path), *arguments]
    )


async def test_twinectl_runs_a_test_and_reports_what_the_task_carries(tmp_path: Path) -> None:
    """Through the autoscaler's socket. The command lists every mistake before it sends a
    request."""
    model, runtime = ModelService(), Runtime()
    tester = LoadTester(runtime, model, model)  # type: ignore[arg-type]
    follower = Autoscaler(runtime, model, MemoryStore(), {}, model)  # type: ignore[arg-type]
    queries = (
        "--load",
        REQUEST.load,
        "--latency",
        REQUEST.latency,
        "--step",
        "5s",
        "--most",
        "1.4",
    )
    async with serving(follower, tester, tmp_path / "s", ""):
        bad = await asyncio.to_thread(typed, tmp_path / "s", *queries, "--latency-max", "2h")
        assert bad.exit_code != 0
        assert "latency_max_s" in bad.output
        assert model.weights == []
        done = await asyncio.to_thread(typed, tmp_path / "s", *queries, "--latency-max", "60ms")
    assert done.exit_code == 0, done.output
    assert "done: latency of 0.0" in done.output
    assert "web-0 carries an unknown load" in done.output
    assert model.weights[-1] == {}
