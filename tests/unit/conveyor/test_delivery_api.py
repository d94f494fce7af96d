"""The service's API over its socket and TLS, its gates over HTTP, its command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner
from msgspec.structs import replace

from control_plane.cli import main as twinectl
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    open_authority,
)
from control_plane.process import open_or_stand_by
from control_plane.runtime.runtime import Runtime
from control_plane.store.sqlite import SqliteStore
from control_plane.web.services import ServiceReader
from conveyor import gates
from conveyor.api import ControlRequest, ControlVerb, PipelineGate, PipelineStage
from conveyor.client import ConveyorClient
from conveyor.config import ConveyorConfig, load, open_store
from conveyor.gates import GateMeter
from conveyor.notifications import notify
from conveyor.routes import IDENTITY, READS, ROUTES, WRITES
from conveyor.runs import GateOutcome, JobProgress, PipelineRun, StepTime
from conveyor.server import DeliveryAccess, serving
from tests.unit.conveyor.delivery_model import World, a_pipeline, digest
from wire import tls
from wire.client import WireClient
from wire.errors import ConfigError, Forbidden, InvalidInput, NotFound, Unreachable
from wire.prometheus import PrometheusData

PAUSE = ControlRequest(verb=ControlVerb.PAUSE)


def test_every_route_names_its_role_and_only_writers_may_change():
    for route in ROUTES:
        assert route.needs == (WRITES if route.is_change else READS), route.name


@asynccontextmanager
async def served(world: World, folder: Path, authority: CertificateAuthority) -> AsyncIterator[str]:
    """Serve on a socket in the folder and over TLS. Yield the URL."""
    subject = CertificateSubject("controller", "conveyor", ("127.0.0.1",))
    context = tls.server_context(authority.credential(subject, ""), require_client=True)
    access = DeliveryAccess(frozenset({"ann"}))
    port = await _free_port()
    async with serving(world.service, access, folder / "c.sock", ("127.0.0.1", port, context)):
        yield f"https://127.0.0.1:{port}"


async def _free_port() -> int:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return int(port)


@pytest.mark.behaviour("BUG-UX141")
async def test_users_may_read_writers_may_change_and_others_are_refused(tmp_path: Path):
    authority = open_authority(tmp_path / "a.pem", "twine")
    foreign = open_authority(tmp_path / "b.pem", "twine")
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)

    def client(
        url: str, role: str, name: str, of: CertificateAuthority = authority
    ) -> ConveyorClient:
        held = of.credential(CertificateSubject(role, name), "")
        held = msgspec.structs.replace(held, ca_pem=authority.ca_pem)
        return ConveyorClient(url, tls.client_context(held, IDENTITY))

    async with served(world, tmp_path, authority) as url:
        async with client(url, "user", "bob") as bob:
            assert (await bob.get_pipeline("web")).record.active is not None
            for refused in (
                bob.control_run("web", PAUSE),
                bob.apply_pipeline(a_pipeline()),
                bob.remove_pipeline("web"),
            ):
                with pytest.raises(Forbidden, match="may not change pipelines"):
                    await refused
        for role in ("host", "component", "controller"):
            async with client(url, role, "ann") as other:
                with pytest.raises(Forbidden, match="is not a user"):
                    await other.get_pipeline("web")
        async with client(url, "user", "ann", foreign) as foreign_client:
            with pytest.raises(Unreachable):
                await foreign_client.get_pipeline("web")
        async with client(url, "user", "ann") as ann:
            view = await ann.control_run("web", PAUSE)
    assert view.record.active is not None
    assert view.record.active.log[-1].who == "user:ann"


@pytest.mark.behaviour("BUG-UX151")
async def test_the_console_reads_pipelines_with_the_credential_of_a_user(tmp_path: Path):
    authority = open_authority(tmp_path / "a.pem", "twine")
    world = await World().begin()
    tls.save(authority.credential(CertificateSubject("user", "console"), ""), tmp_path / "u.json")
    tls.save(authority.credential(CertificateSubject("host", "h1"), ""), tmp_path / "h.json")
    async with served(world, tmp_path, authority) as url:
        reader = ServiceReader(conveyor=url, credential=str(tmp_path / "u.json"))
        assert [one.record.spec.name for one in (await reader.pipelines()).pipelines] == ["web"]
        assert (await reader.pipeline("web")).record.spec.jobs == ["web"]
        assert (await reader.runs("web", 10)).runs == []
        with pytest.raises(NotFound):
            await reader.pipeline("none")
        other = ServiceReader(conveyor=url, credential=str(tmp_path / "h.json"))
        with pytest.raises(Unreachable, match="is not a user"):
            await other.pipelines()
        without = ServiceReader(conveyor=url)
        with pytest.raises(Unreachable, match="the conveyor cannot be read"):
            await without.pipelines()


@pytest.mark.behaviour("FE6")
async def test_twinectl_pipeline_over_the_socket(tmp_path: Path):
    authority = open_authority(tmp_path / "a.pem", "twine")
    world = await World().begin()
    file = tmp_path / "web.json"
    file.write_bytes(msgspec.json.encode(a_pipeline()))

    async def ctl(*arguments: str) -> tuple[int, str]:
        service = f"unix:{tmp_path / 'c.sock'}"
        argv = ["pipeline", "--service", service, *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, twinectl, argv)
        return result.exit_code, result.output

    async with served(world, tmp_path, authority):
        assert (await ctl("plan", str(file)))[0] == 0, "nothing changes"
        assert await ctl("apply", str(file)) == (0, "pipeline web: idle\n")
        assert (await ctl("status", "missing"))[0] == 3
        await world.rounds(1)
        code, reply = await ctl("pause", "web")
        assert (code, "it has no run" in reply) == (5, True)
        code, reply = await ctl("start", "web", "--image", "sha256:ab")
        assert (code, "--image" in reply) == (64, True)
        code, reply = await ctl("start", "web", "--image", digest(2), "--reason", "try")
        assert (code, "run 2 of image" in reply) == (0, True)
        await world.rounds(5)
        code, reply = await ctl("status", "web")
        assert "[>] canary 1" in reply
        assert "[ ] 50 %" in reply
        assert (await ctl("skip", "web"))[0] == 64
        assert (await ctl("pause", "web", "--reason", "lunch"))[0] == 0
        assert (await ctl("resume", "web"))[0] == 0
        await world.until("done")
        code, reply = await ctl("history", "web")
        assert "local: pauses: lunch" in reply
        assert "OUTCOME" in reply
        code, reply = await ctl("history", "web", "-o", "json")
        assert json.loads(reply)["runs"][0]["state"] == "done"
        code, reply = await ctl("list")
        assert "done" in reply
        assert (await ctl("remove", "web"))[0] == 64
        assert (await ctl("remove", "web", "--yes"))[0] == 0


@pytest.mark.behaviour("BUG-CP110")
async def test_a_history_of_no_runs_or_of_a_part_of_a_run_is_refused(tmp_path: Path):
    authority, world = open_authority(tmp_path / "a.pem", "twine"), await World().begin()
    (history,) = (route for route in ROUTES if route.name == "get_history")
    async with (
        served(world, tmp_path, authority),
        WireClient(f"unix:{tmp_path / 'c.sock'}") as client,
    ):
        for name, value in (("limit", "0"), ("limit", "1.5"), ("run", "1.5")):
            with pytest.raises(InvalidInput, match=f"parameter {name} must be a whole number"):
                await client.call(history, pipeline="web", **{name: value})


# -- gates


@asynccontextmanager
async def answering(answer: Any, status: int = 200) -> AsyncIterator[str]:
    """Serve one answer to every request. A function gets the query of the form."""

    async def handler(request: web.Request) -> web.Response:
        form = await request.post()
        found = answer(form["query"]) if callable(answer) else answer
        text = found if isinstance(found, str) else json.dumps(found)
        return web.Response(text=text, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    port = await _free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def a_gate(**kind: Any) -> PipelineGate:
    return msgspec.convert(kind, PipelineGate)


SEEN = [
    JobProgress(job="web", size=3, new=1, new_tasks=("web-0",), stable_tasks=("web-1", "web-2"))
]
QUERY = a_gate(query={"promql": 'errors{task=~"$tasks"}', "at_most": 1})


async def measured(gate: PipelineGate, url: str) -> Any:
    stage = {"kind": "all", "gates": ["one"]}
    spec = replace(a_pipeline(), gates={"one": gate}, prometheus=url or "http://127.0.0.1:9")
    run = PipelineRun(
        number=1,
        image=digest(2),
        trigger="hand",
        by="ann",
        created=0.0,
        spec=replace(spec, stages=[msgspec.convert(stage, PipelineStage)]),
        steps=(StepTime(name="all", began=0.0, reached=0.0, restarts=0),),
    )
    return await GateMeter().measure("one", run, SEEN, 1000.0)


async def test_a_query_asks_for_the_new_tasks_and_reads_every_series():
    queries = []

    def answer(query: str) -> object:
        queries.append(query)
        result = [{"metric": {"task": "web-0"}, "value": [1, "0.5"]}]
        return {"status": "success", "data": {"resultType": "vector", "result": result}}

    async with answering(answer) as url:
        found = await measured(QUERY, url)
    assert queries == ['errors{task=~"web-0"}']
    assert (found.outcome, found.numbers["max"]) == (GateOutcome.PASS, 0.5)


@pytest.mark.behaviour("BUG-CP138")
async def test_every_series_of_a_task_must_be_within_the_bounds():
    """Formerly the last series of a task hid the others, such as those of other handlers."""

    def answer(_: str) -> object:
        result = [
            {"metric": {"task": "web-0", "handler": "/pay"}, "value": [1, "70"]},
            {"metric": {"task": "web-0", "handler": "/"}, "value": [1, "0"]},
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": result}}

    async with answering(answer) as url:
        found = await measured(QUERY, url)
    assert (found.outcome, found.numbers["series"]) == (GateOutcome.FAIL, 2)
    assert found.reason == "1 of 2 values not at most 1: web-0 70"


async def test_a_comparison_asks_for_both_sides():
    def answer(query: str) -> object:
        slow = 2.0 if "web-0" in query else 1.0
        values = [[n, str(slow + n / 100)] for n in range(20)]
        result = [{"metric": {}, "values": values}]
        return {"status": "success", "data": {"resultType": "matrix", "result": result}}

    async with answering(answer) as url:
        found = await measured(a_gate(compare={"promql": 'l{task=~"$tasks"}'}), url)
    assert found.outcome is GateOutcome.FAIL
    assert found.numbers["new_median"] > found.numbers["stable_median"]


@pytest.mark.behaviour("BUG-CP85")
async def test_a_long_comparison_asks_for_no_more_points_than_prometheus_gives(
    monkeypatch: pytest.MonkeyPatch,
):
    """Formerly, after three hours, a comparison with one point per second had no data and failed
    the stage."""
    queries: list[float] = []

    class Server:
        def __init__(self, _: str) -> None:
            """Connect nowhere."""

        async def __aenter__(self) -> Server:
            return self

        async def __aexit__(self, *_: object) -> None:
            """Close nothing."""

        async def query_range(
            self, _: str, start: float, end: float, step_s: float
        ) -> PrometheusData:
            queries.append((end - start) / step_s)
            return PrometheusData(result_type="matrix", result=[])

    monkeypatch.setattr(gates, "Prometheus", Server)
    gate = a_gate(compare={"promql": "l", "window_s": 86_400.0, "step_s": 1.0}).compare
    assert gate is not None
    await gates._compare(gate, "http://prometheus", [], 86_400.0)
    assert max(queries) <= 10_001


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"status": "error", "error": "parse error"}, 400),
        ("<html>", 502),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, 200),
        ({"status": "success", "data": {"resultType": "vector", "result": [{"value": 3}]}}, 200),
        ({"status": "success", "data": {"resultType": "scalar", "result": []}}, 200),
        ({"status": "success", "data": {"resultType": "scalar", "result": [1, "NaN"]}}, 200),
    ],
)
async def test_unexpected_answers_of_prometheus_are_no_data(answer: object, status: int):
    async with answering(answer, status) as url:
        found = await measured(QUERY, url)
    assert found.outcome is GateOutcome.NO_DATA
    assert found.reason


async def test_an_unreachable_server_gives_no_data():
    port = await _free_port()
    found = await measured(QUERY, f"http://127.0.0.1:{port}")
    assert found.outcome is GateOutcome.NO_DATA
    found = await measured(a_gate(http={"url": f"http://127.0.0.1:{port}/"}), "")
    assert found.outcome is GateOutcome.NO_DATA


async def test_an_http_check_wants_its_status_and_text():
    async with answering("all fine") as url:
        passes = await measured(a_gate(http={"url": url, "contains": "fine"}), "")
        fails = await measured(a_gate(http={"url": url, "contains": "great"}), "")
        other = await measured(a_gate(http={"url": url, "status": 204}), "")
    assert [f.outcome.value for f in (passes, fails, other)] == ["pass", "fail", "fail"]
    assert other.reason == "answered 200, not 204"


async def test_a_hook_that_refuses_is_reported_as_unreachable():
    async with answering("no", 500) as url:
        with pytest.raises(Unreachable, match="answered 500"):
            await notify(url, {"run": 1})
    async with answering("yes") as url:
        await notify(url, {"run": 1})


# -- the program


async def test_a_second_instance_waits_until_the_first_ends(tmp_path: Path):
    config = ConveyorConfig(state=str(tmp_path))
    stopping = asyncio.Event()
    first = open_store(config)
    assert isinstance(first, SqliteStore)
    await first.__aenter__()
    async with AsyncExitStack() as stack:
        waiting = asyncio.ensure_future(
            open_or_stand_by(stack, open_store(config), stopping, Runtime())
        )
        await asyncio.sleep(0)
        assert not waiting.done()
        await first.__aexit__(None, None, None)
        assert await waiting
        third = asyncio.ensure_future(
            open_or_stand_by(stack, open_store(config), stopping, Runtime())
        )
        await asyncio.sleep(0)
        stopping.set()
        assert not await third


def test_all_errors_of_a_configuration_are_reported(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('state = ""\nwriter = ["ann"]\nlisten = 1\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert {e.field for e in caught.value.errors} == {"state", "writer", "listen"}
    file.write_text('listen = "0.0.0.0:7460"\n')
    with pytest.raises(ConfigError, match="server_credential is missing"):
        load(file)
    file.write_text('[fleets.agents]\ninstall = ["x"]\nhosts = ["m2", "m1", "m2"]\n')
    with pytest.raises(ConfigError, match=r"agents\.hosts names twice: m2"):
        load(file)
    assert load(None) == ConveyorConfig()


async def test_missing_objects_are_not_found():
    world = await World().begin()
    for work in (
        world.service.view("missing"),
        world.service.history("web", 10, 7),
        world.service.control("missing", PAUSE, "user:ann"),
    ):
        with pytest.raises(NotFound):
            await work
