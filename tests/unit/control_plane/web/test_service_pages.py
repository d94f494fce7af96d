"""The pages of autoscaling and pipelines, whose services may be absent, slow or new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from control_plane.api.autoscale import Autoscale, AutoscaleMode, LoadSignal
from control_plane.api.jobs import JobPhase, JobRecord, Jobs, JobSpec, JobStatus
from control_plane.api.routes import ROUTES
from control_plane.api.sizings import Forecast, Recommendation, SizingView, SizingViews
from control_plane.identity.sessions import BrowserSessions
from control_plane.web import services as services_module
from control_plane.web.core.delivery import run_row, step_rows
from control_plane.web.core.sizes import amount_of
from control_plane.web.services import ServiceReader
from control_plane.web.serving import TEXT_MAX, Console
from conveyor.api import PipelineSpec
from conveyor.pipeline_file import pipeline_spec
from conveyor.runs import (
    GateOutcome,
    GateVerdict,
    JobProgress,
    LogEntry,
    PipelineRecord,
    PipelineRun,
    PipelineView,
    PipelineViews,
    RunHistory,
    RunState,
    StepTime,
)
from wire.errors import NotFound, Unreachable
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call

IMAGE = "sha256:" + "ab" * 32


def job(name: str, policy: Autoscale | None = None, tasks: int = 4) -> JobStatus:
    spec = JobSpec(
        name=name,
        entitlement="front",
        tasks=tasks,
        image=IMAGE,
        command=["/bin/serve"],
        autoscale=policy,
    )
    record = JobRecord(name=name, spec=spec, version=1, tasks=[])
    counts = dict.fromkeys(("wanted", "running", "healthy", "updated"), tasks)
    return JobStatus(record=record, phase=JobPhase.STABLE, **counts)


def policy(**changes: Any) -> Autoscale:
    return Autoscale(**{"minimum": 2, "maximum": 9, "target": 0.5, **changes})


def sizing(name: str, tasks: int = 4, **changes: Any) -> SizingView:
    found = {"at": 1000.0, "tasks": tasks, "was": 4, "reason": "load 1.5 cores; 4 tasks needed"}
    found |= {"load": 1.5, "forecast": Forecast(load=2.25, expected=2.0)}
    view = {key: changes.pop(key) for key in ("written", "loads", "day_peaks") if key in changes}
    return SizingView(
        job=name,
        entitlement="front",
        mode=AutoscaleMode.APPLY,
        tasks=4,
        healthy=4,
        recommendation=Recommendation(**{**found, **changes}),
        **view,
    )


def spec(**changes: Any) -> PipelineSpec:
    document: dict[str, Any] = {
        "name": "shop",
        "jobs": ["web"],
        "stages": [
            {"kind": "canary", "tasks": 1, "gates": ["errors", "release"]},
            {"kind": "percent", "percent": 50},
            {"kind": "all"},
        ],
        "gates": {"errors": {"health": {}}, "release": {"approval": {"by": ["ann"]}}},
        "on_failure": {"notify": ["https://hooks.example/secret-token"]},
        **changes,
    }
    return pipeline_spec(document, "the test's pipeline")


def run(number: int, **changes: Any) -> PipelineRun:
    begun = {"number": number, "image": IMAGE, "trigger": "hand", "by": "ann", "created": 1000.0}
    return PipelineRun(**{**begun, "spec": spec(), "state": RunState.RUNNING, **changes})


class Region:
    """A front end with jobs."""

    def __init__(self, *jobs: JobStatus) -> None:
        self.sessions, self.jobs = BrowserSessions(), {one.record.name: one for one in jobs}
        self.handlers = {"list_jobs": self._list, "get_job": self._get}

    def authorize(self, _: web.Request, __: Route) -> Peer:
        return Peer("user", "ann")

    def check(self, _: Call) -> None:
        pass

    async def audit_refusal(self, *_: object) -> None:
        pass

    async def _list(self, _: Call) -> Jobs:
        return Jobs(jobs=list(self.jobs.values()))

    async def _get(self, call: Call) -> JobStatus:
        if call.path["job"] not in self.jobs:
            raise NotFound(f"there is no job {call.path['job']!r}")
        return self.jobs[call.path["job"]]


class Programs:
    """An autoscaler and a conveyor with these answers."""

    def __init__(self, *sizings: SizingView, failing: str = "") -> None:
        self.all = SizingViews(sizings=list(sizings), failing=failing, round_at=1000.0)
        self.views = dict[str, PipelineView]()
        self.history = RunHistory(runs=[])

    async def sizings(self) -> SizingViews:
        return self.all

    async def sizing(self, name: str) -> SizingView:
        for one in self.all.sizings:
            if one.job == name:
                return one
        raise NotFound(f"job {name!r} is not autoscaled, or was not listed yet", hint="wait")

    async def pipelines(self) -> PipelineViews:
        return PipelineViews(pipelines=list(self.views.values()))

    async def pipeline(self, name: str) -> PipelineView:
        if name not in self.views:
            raise NotFound(f"there is no pipeline {name!r}")
        return self.views[name]

    async def runs(self, name: str, limit: int, number: int | None = None) -> RunHistory:
        runs = [one for one in self.history.runs if number in (None, one.number)][:limit]
        if number is not None and not runs:
            raise NotFound(f"pipeline {name} has no run {number}, or it is not kept any more")
        return RunHistory(runs=runs, verdicts=self.history.verdicts)


@asynccontextmanager
async def pages(region: Region, services: Any) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """Yield a function that returns status and text of a page."""
    app = web.Application()
    Console(region, ROUTES, lambda: 1, services=services, clock=lambda: 1060.0).add_to(app)
    async with TestClient(TestServer(app)) as client:

        async def get(path: str) -> tuple[int, str]:
            answer = await client.get(path)
            return answer.status, await answer.text()

        yield get


@pytest.mark.behaviour("FE1", "BUG-UX150")
async def test_the_page_of_autoscaling_shows_size_bounds_load_and_the_reason_of_each_job() -> None:
    jobs = [job(name, policy()) for name in ("calm", "held", "took", "new")]
    programs = Programs(
        sizing("calm"),
        sizing("held", held="the load is not measured"),
        sizing("took", 6, written="4 to 6 was refused: ann owns the size"),
        failing="could not read 1 jobs",
    )
    async with pages(Region(*jobs, job("plain")), programs) as get:
        _, text = await get("/ui/autoscaling")
        data = json.loads((await get("/ui/autoscaling?format=json"))[1])
        _, held = await get("/ui/autoscaling?only=held")
        _, named = await get("/ui/autoscaling?search=ca")
        assert (await get("/ui/autoscaling?only=good"))[0] == 400
        assert (await get("/ui/autoscaling?first=-1"))[0] == 400
    assert "plain" not in text
    for words in ("2 to 9", "1.5 cores", "2.25 cores", "Sizes are held: could not read 1 jobs"):
        assert words in text
    assert "4 to 6 was refused: ann owns the size" in text
    assert {one["job"]["record"]["name"]: one["state"] for one in data["sizes"]} == {
        **{"calm": "as recommended", "held": "held", "took": "refused", "new": "not evaluated"}
    }
    assert "the load is not measured" in held
    assert "/ui/autoscaling/calm" not in held
    assert "1 of 4 jobs" in named


@pytest.mark.behaviour("BUG-UX150")
async def test_a_thousand_autoscaled_jobs_are_shown_in_pages() -> None:
    jobs = [job(f"j{number:04}", policy()) for number in range(1000)]
    async with pages(Region(*jobs), Programs(*(sizing(f"j{n:04}") for n in range(1000)))) as get:
        _, first = await get("/ui/autoscaling")
        _, last = await get("/ui/autoscaling?first=800")
        _, beyond = await get("/ui/autoscaling?first=5000")
    assert ("j0199" in first, "j0200" in first) == (True, False)
    assert "first=200" in first
    assert ("j0999" in last, "first=1000" in last) == (True, False)
    assert "first page" in beyond


@pytest.mark.behaviour("BUG-UX150", "BUG-UX153")
async def test_the_page_of_a_size_has_charts_of_any_length() -> None:
    """Regression: a chart's points were cut as texts of users are; nothing read day peaks."""
    loads = [(300.0 * n, 1.0 + n % 7) for n in range(864)]
    peaks = [(86_400.0 * n, 5.0) for n in range(371)]
    jobs = job("web", policy(schedule=[])), job("plain")
    programs = Programs(sizing("web", loads=loads, day_peaks=peaks))
    async with pages(Region(*jobs), programs) as get:
        _, text = await get("/ui/autoscaling/web")
        assert (await get("/ui/autoscaling/plain"))[0] == 404
        assert (await get("/ui/autoscaling/none"))[0] == 404
    drawn = [one.partition('"')[0].split() for one in text.split('<polyline points="')[1:]]
    assert [len(points) for points in drawn] == [864, 371]
    assert len(" ".join(drawn[0])) > TEXT_MAX
    assert "4 tasks needed" in text


@pytest.mark.parametrize(
    ("signal", "shown"),
    [
        (LoadSignal.CPU, "2048 cores"),
        (LoadSignal.MEMORY, "2 KiB"),
        (LoadSignal.NETWORK, "2 KiB/s"),
        (LoadSignal.QUERY, "2048"),
    ],
)
def test_a_load_is_shown_with_its_unit(signal: LoadSignal, shown: str) -> None:
    amount = amount_of(lambda value: f"{value / 1024:g} KiB")
    assert (amount(signal, 2048.0), amount(signal, None)) == (shown, "–")


@pytest.mark.behaviour("BUG-UX150", "BUG-UX151")
async def test_pages_of_absent_services_say_why_and_what_to_set() -> None:
    async with pages(Region(job("web", policy())), ServiceReader(conveyor="unix:/none")) as get:
        status, text = await get("/ui/autoscaling")
        assert status == 200
        assert "this control plane has no address of the autoscaler" in text
        assert "set `autoscaler` in the configuration" in text
        assert "/ui/autoscaling/web" in text, "jobs and bounds are known without it"
        status, text = await get("/ui/autoscaling/web")
        assert (status, "2 to 9" in text, "no address of the autoscaler" in text) == (
            200,
            True,
            True,
        )
        status, text = await get("/ui/pipelines")
        assert (status, "the conveyor cannot be read" in text) == (200, True)
        assert "There is no pipeline" not in text
        status, text = await get("/ui/pipelines/web")
        assert (status, "set `conveyor` in the configuration" in text) == (503, True)


@pytest.mark.behaviour("BUG-UX150", "BUG-UX151")
async def test_a_service_that_never_answers_does_not_hold_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module, "SERVICE_S", 0.05)
    ended = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    path = str(tmp_path / "s.sock")
    async with await asyncio.start_unix_server(silent, path):
        reader = ServiceReader(path, f"unix:{path}")
        async with pages(Region(job("web", policy())), reader) as get:
            for page in ("/ui/autoscaling", "/ui/autoscaling/web", "/ui/pipelines"):
                status, text = await get(page)
                assert (status, "cannot be read" in text) == (200, True)
        ended.set()


@pytest.mark.behaviour("BUG-UX151")
async def test_a_refusal_by_a_service_is_not_one_of_the_viewer(tmp_path: Path) -> None:
    """A file of a credential that is missing, and a broken answer, are faults of the connection."""

    async def broken(_: web.Request) -> web.Response:
        return web.json_response({"pipelines": [{"record": 7}]})

    app = web.Application()
    app.router.add_get("/v1/pipelines", broken)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s.sock")).start()
    for reader in (
        ServiceReader(conveyor=f"unix:{tmp_path}/s.sock"),
        ServiceReader(conveyor="https://127.0.0.1:1", credential=str(tmp_path / "none")),
    ):
        with pytest.raises(Unreachable, match="the conveyor cannot be read"):
            await reader.pipelines()
    await runner.cleanup()


def delivering() -> Programs:
    programs = Programs()
    verdict = GateVerdict(
        gate="errors", step=0, at=1050.0, outcome=GateOutcome.PASS, reason="1 of 1 tasks healthy"
    )
    active = run(
        3,
        steps=(StepTime(name="canary 1", began=1010.0, reached=1020.0),),
        verdicts={"errors": verdict},
        waits="canary 1: waits for approval release",
        log=(LogEntry(at=1000.0, who="ann", what="starts"),),
    )
    old = run(
        2,
        state=RunState.ROLLED_BACK,
        reason="gate errors: 3 of 4 unhealthy",
        steps=(StepTime(name="canary 1", began=1, ended=2), StepTime(name="rollback", began=2)),
        ended=3.0,
    )
    record = PipelineRecord(spec=spec(), active=active, waiting=run(4), good={"web": IMAGE})
    progress = [JobProgress(job="web", size=4, new=1, new_healthy=1, updating=True)]
    programs.views["shop"] = PipelineView(record=record, jobs=progress, last=old, trouble="no api")
    programs.history = RunHistory(runs=[run(4), active, old], verdicts={3: [verdict]})
    return programs


@pytest.mark.behaviour("FE1", "BUG-UX151")
async def test_pages_of_pipelines_show_runs_steps_gates_and_jobs() -> None:
    programs = delivering()
    programs.views["idle"] = PipelineView(record=PipelineRecord(spec=spec(name="idle")))
    async with pages(Region(), programs) as get:
        _, listed = await get("/ui/pipelines")
        _, text = await get("/ui/pipelines/shop")
        _, past = await get("/ui/pipelines/shop?run=2")
        _, data = await get("/ui/pipelines/shop?format=json")
        _, idle = await get("/ui/pipelines/idle?run=0")
        assert (await get("/ui/pipelines/none"))[0] == 404
        assert (await get("/ui/pipelines/shop?run=99"))[0] == 404
        assert (await get("/ui/pipelines/shop?run=x"))[0] == 400
        assert (await get("/ui/pipelines?search=shop"))[0] == 400
    assert "1 of 3, canary 1" in listed
    assert "Next: run 4" in listed
    assert ">idle</span>" in listed
    for words in ('href="/ui/jobs/web"', "1 of 4 tasks", "waits for ann", "1 of 1 tasks healthy"):
        assert words in text
    for words in ("canary 1: waits for approval release", "no api", "ann: starts", "not begun"):
        assert words in text
    assert "3 of 4 unhealthy" in past
    assert ">stopped<" in past
    assert "There is no run" not in idle
    assert "secret-token" not in data + text + listed, "values of the file are not shown"


def test_states_of_steps_follow_the_end_of_a_run() -> None:
    def states(state: RunState, *steps: StepTime, paused: bool = False) -> list[str]:
        return [row.state for row in step_rows(run(1, state=state, steps=steps, paused=paused))]

    first = StepTime(name="canary 1", began=1)
    ended = StepTime(name="canary 1", began=1, ended=2)
    half, back = StepTime(name="50 %", began=3, ended=4), StepTime(name="rollback", began=4)
    assert states(RunState.WAITING) == ["not begun"] * 3
    assert states(RunState.RUNNING, first, paused=True)[0] == "paused"
    assert states(RunState.RUNNING, ended, first)[:2] == ["begun again", "running"]
    assert states(RunState.ROLLING_BACK, ended, half, back) == ["done", "stopped", "rolling-back"]
    assert states(RunState.ABORTED, ended, half) == ["done", "stopped"]
    assert states(RunState.DONE, ended, half) == ["done", "done"]
    assert run_row(run(1, steps=(ended, half, back))).step == "rollback"


@pytest.mark.behaviour("BUG-UX151")
async def test_a_pipeline_of_many_steps_shows_those_around_the_present_one() -> None:
    many = spec(jobs=[f"j{number}" for number in range(100)])
    begun = tuple(StepTime(name=f"j{n // 3}: all", began=1.0, ended=2.0) for n in range(120))
    now = run(3, spec=many, step=120, steps=(*begun, StepTime(name="j40: canary 1", began=3.0)))
    programs = Programs()
    record = PipelineRecord(spec=many, active=now)
    programs.views["shop"] = PipelineView(record=record)
    programs.history = RunHistory(runs=[now])
    async with pages(Region(), programs) as get:
        data = json.loads((await get("/ui/pipelines/shop?format=json"))[1])
        _, text = await get("/ui/pipelines/shop")
    names = [step["name"] for step in data["steps"]]
    assert (len(names), data["hidden"]) == (100, 200)
    assert names[49:51] == ["j40: canary 1", "j40: 50 %"]
    assert "200 more" in text
    assert "121 of 300, j40: canary 1" in text
    assert "and 80 more" in text
