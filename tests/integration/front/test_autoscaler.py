"""`twine-autoscaler` as a process with a real front end and a real Prometheus that scrapes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from control_plane.api.autoscale import (
    Autoscale,
    AutoscaleMode,
    Headroom,
    LatencyTarget,
    LoadSignal,
)
from control_plane.api.intent_changes import JobIntents, SizeChange
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus
from control_plane.autoscaler import stored_jobs
from control_plane.autoscaler.core.latency import LearntLatency, load_at_limit, with_latency
from control_plane.autoscaler.core.observing import LoadReading
from control_plane.autoscaler.core.recommendation import JobSizing, SizingState
from control_plane.autoscaler.prometheus import PrometheusSource
from control_plane.autoscaler.stored_jobs import AutoscaledJob
from control_plane.cli import main
from control_plane.runtime.runtime import Runtime
from control_plane.store import Operation
from control_plane.store.sqlite import SqliteStore
from tests.ports import free_port
from wire.prometheus import Prometheus

from .conftest import Region

PATIENCE_S = 120.0
PROMETHEUS = "/usr/bin/prometheus"
POLICY = Autoscale(
    minimum=2,
    maximum=30,
    target=50.0,
    mode=AutoscaleMode.APPLY,
    signal=LoadSignal.QUERY,
    query="sum(active_users)",
    headroom=Headroom.NONE,
)
SPEC = JobSpec(
    name="web",
    entitlement="front",
    tasks=4,
    image="sha256:" + "a" * 64,
    command=["/bin/serve"],
    autoscale=POLICY,
)
STATUS = JobStatus(
    record=JobRecord(name="web", spec=SPEC, version=1),
    phase=JobPhase.STABLE,
    wanted=4,
    running=4,
    healthy=4,
    updated=4,
)


class Exporter(ThreadingHTTPServer):
    """Exports the values that a test sets; counts nothing itself."""

    def __init__(self) -> None:
        self.text = "active_users 0\n"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.server.text.encode()  # type: ignore[attr-defined]
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Print nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    server = Exporter()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prometheus(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "p.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        f"- job_name: web\n  static_configs: [{{targets: ['127.0.0.1:{exporter.server_port}']}}]\n"
    )
    port = free_port()
    words = (
        f"--config.file={folder}/p.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with running(PROMETHEUS, *words):
        url = f"http://127.0.0.1:{port}"
        until(lambda: measured(url, "up").load == 1.0)
        yield url


def measured(
    url: str, query: str, timeout_s: float = 10.0, latency: LatencyTarget | None = None
) -> LoadReading:
    async def work() -> LoadReading:
        async with Prometheus(url, timeout_s) as server:
            source = PrometheusSource(server, Runtime())
            return await source.measure(STATUS, replace(POLICY, query=query, latency=latency))

    return asyncio.run(work())


@pytest.mark.behaviour("AS2")
def test_a_real_server_gives_a_load_with_its_time(exporter: Exporter, prometheus: str) -> None:
    """The load is a business metric from a real server."""
    exporter.text = 'active_users{site="a"} 400\nactive_users{site="b"} 240\n'
    until(lambda: measured(prometheus, "sum(active_users)").load == 640.0)
    found = measured(prometheus, "sum(active_users)")
    assert abs(found.at - time.time()) < 60
    several = measured(prometheus, "active_users")
    assert several.load is None
    assert "2 series; aggregate them" in several.missing


@pytest.mark.behaviour("AS2")
def test_a_counter_reset_gives_no_negative_load(exporter: Exporter, prometheus: str) -> None:
    """Counter resets."""
    exporter.text = "requests_total 1000000\n"
    until(lambda: measured(prometheus, "requests_total").load == 1e6)
    exporter.text = "requests_total 5\n"
    until(lambda: measured(prometheus, "requests_total").load == 5.0)
    found = measured(prometheus, "sum(rate(requests_total[1m]))")
    assert found.load is not None
    assert 0 <= found.load < 100


@pytest.mark.behaviour("AS2")
@pytest.mark.parametrize(
    ("text", "query", "why"),
    [
        ("active_users NaN\n", "sum(active_users)", "the query returns nan"),
        ("active_users -5\n", "sum(active_users)", "the query returns -5"),
        ("active_users 5\n", "sum(nothing)", "the query returns nothing for the last 5 min"),
        ("active_users 5\n", "sum(", "it refuses the query"),
        ("active_users 5\n", "active_users / 0", "the query returns inf"),
    ],
)
def test_an_invalid_load_gives_a_reason(
    exporter: Exporter, prometheus: str, text: str, query: str, why: str
) -> None:
    """NaN, negative, infinite and missing values give a reason, not a load."""
    exporter.text = text
    until(lambda: why in measured(prometheus, query).missing)
    assert measured(prometheus, query).load is None


class Odd(BaseHTTPRequestHandler):
    """A server with answers that no Prometheus gives."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body: bytes = self.server.body  # type: ignore[attr-defined]
        self.server.released.wait(self.server.wait_s)  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()
        with suppress(OSError):  # the reader left
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


def values(*pairs: Any) -> bytes:
    series = [{"metric": {}, "values": list(pairs)}]
    data = {"resultType": "matrix", "result": series}
    return json.dumps({"status": "success", "data": data}).encode()


@pytest.mark.behaviour("AS2")
@pytest.mark.parametrize(
    ("status", "body", "wait_s", "why"),
    [
        (200, b"<html>", 0, "its answer cannot be read (HTTP 200)"),
        (502, b"bad gateway", 0, "its answer cannot be read (HTTP 502)"),
        (200, b"[" * 100_000, 0, "its answer cannot be read"),
        (200, b" " * (5 << 20), 0, "its answer is over 4 MiB"),
        (200, values([time.time(), "five"]), 0, "a value is not a number"),
        (200, values([1e18, "5"]), 0, "returns nothing"),
        (200, b'{"status": "success", "data": {"resultType": "vector"}}', 0, "with a vector"),
        (200, values([time.time(), "5"]), 30, "no answer within 0.5 s"),
    ],
)
def test_a_slow_or_wrong_server_gives_a_reason(
    status: int, body: bytes, wait_s: float, why: str
) -> None:
    """Prometheus answers wrongly or slowly, or is down."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.status, server.body = status, body  # type: ignore[attr-defined]
    server.wait_s, server.released = wait_s, threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = measured(f"http://127.0.0.1:{server.server_port}", "x", 0.5 if wait_s else 30.0)
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    assert found.load is None
    assert why in found.missing
    gone = measured(f"http://127.0.0.1:{server.server_port}", "x")
    assert "it cannot be reached" in gone.missing


def ctl(region: Region, answers: Path, *arguments: str) -> Result:
    env = {"TWINE_ENDPOINT": f"unix:{region.socket}", "TWINE_AUTOSCALER": str(answers)}
    return CliRunner().invoke(main, arguments, env=env)


def resizable(region: Region, spec: JobSpec) -> None:
    """Add a job whose size can be written to a region."""
    region.control_plane.jobs[spec.name] = spec
    intents = region.control_plane.intents

    async def resize(
        name: str, request: SizeChange, _writer: str, _also: Sequence[Operation]
    ) -> JobIntents:
        known = region.control_plane.jobs[name]
        region.control_plane.jobs[name] = replace(known, tasks=request.tasks)
        return await intents.show(name)

    intents.resize = resize  # type: ignore[method-assign]


@pytest.mark.behaviour("AS2", "AS8", "BUG-UX93", "BUG-UX153")
def test_a_job_grows_with_its_active_users_and_twinectl_shows_the_reason(
    region: Region, exporter: Exporter, prometheus: str, tmp_path: Path
) -> None:
    exporter.text = "active_users 710\n"
    until(lambda: measured(prometheus, POLICY.query).load == 710.0)
    resizable(region, SPEC)
    answers = tmp_path / "a.sock"
    file = tmp_path / "web.json"
    document = {"minimum": 2, "maximum": 30, "target": 25, "signal": "query", "query": POLICY.query}
    job = {"name": "web", "entitlement": "front", "tasks": 1, "image": "web:v1"}  # BUG-UX93
    file.write_text(json.dumps({**job, "command": ["/bin/x"], "autoscale": document}))
    words = (
        *("--endpoint", f"unix:{region.socket}", "--state", str(tmp_path / "state")),
        *("--socket", str(answers), "--prometheus", prometheus),
    )
    program = (sys.executable, "-m", "control_plane.autoscaler.daemon", *words)
    with running(*program) as process:
        until(lambda: region.control_plane.jobs["web"].tasks == 8)
        shown = ctl(region, answers, "autoscale", "status")
        assert shown.exit_code == 0, shown.output
        assert "web  apply" in shown.output
        explained = ctl(region, answers, "autoscale", "explain", "web").output
        assert "load 710" in explained
        assert "speed limit of 100% in 300 s: 8 now" in explained
        assert "4 to 8" in explained
        assert re.search(r"largest load +709.8 on \d{4}-\d\d-\d\d, of 1 days", explained)
        replayed = ctl(region, answers, "autoscale", "simulate", str(file), "-o", "json")
        assert replayed.exit_code == 0, replayed.output
        assert json.loads(replayed.output)["job"] == "web"
        assert ctl(region, answers, "autoscale", "explain", "nope").exit_code == 3
        with running(*program) as standby:
            assert process.poll() is None
            process.kill()
            process.wait(30)
            until(lambda: ctl(region, answers, "autoscale", "status").exit_code == 0)
            assert standby.poll() is None
    assert region.control_plane.jobs["web"].tasks >= 8


LATENCY = LatencyTarget(
    query="histogram_quantile(0.95, sum by (le) (rate(answers_bucket[1m])))", limit_s=0.3
)


@pytest.mark.behaviour("AS1")
def test_latency_is_measured_together_with_the_load(exporter: Exporter, prometheus: str) -> None:
    """The latency is a real histogram's quantile; without requests it is NaN, which is a reason."""
    text = 'active_users 9\nanswers_bucket{{le="0.1"}} {0}\nanswers_bucket{{le="+Inf"}} {0}\n'

    def latency() -> LoadReading:
        found = measured(prometheus, "active_users", latency=LATENCY)
        assert found.latency is not None
        return found.latency

    exporter.text = text.format(1000)
    until(lambda: "the query returns nan" in latency().missing)
    for count in range(1100, 100_000, 100):
        exporter.text = text.format(count)
        if latency().load is not None:
            break
        time.sleep(0.2)
    assert latency().load == pytest.approx(0.095)
    exporter.text = text.format(0)  # a restart: no negative rate
    until(lambda: measured(prometheus, "answers_bucket{le='0.1'}").load == 0.0)
    assert latency().load in (None, pytest.approx(0.095))


@pytest.mark.behaviour("AS1")
def test_a_job_follows_the_load_that_its_latency_allows(
    region: Region, exporter: Exporter, prometheus: str, tmp_path: Path
) -> None:
    """A model from before a restart sizes the job; twinectl shows the model with its age."""
    limit, learnt, now = (
        replace(LATENCY, query="sum(latency_seconds)"),
        LearntLatency(),
        time.time(),
    )
    for minute in range(120):
        load = 30.0 + 30.0 * (minute % 4)  # a queue that keeps tasks busy at 150 each
        at = now - 600 - 60.0 * (120 - minute)
        learnt = with_latency(learnt, limit, at, load, 0.05 / (1 - load / 150))
    carries = load_at_limit(learnt, limit.limit_s)
    assert carries == pytest.approx(125.0, rel=0.05)
    signal = f"query {POLICY.query}"
    sizing = JobSizing(state=SizingState(latency=learnt))
    job = AutoscaledJob(sizing=sizing, signal=signal, seen_at=now)

    async def seed() -> None:
        async with SqliteStore(tmp_path / "state", 100) as store:
            await stored_jobs.save(store, {"web": job})

    asyncio.run(seed())
    exporter.text = "active_users 710\nlatency_seconds 0.2\n"
    until(lambda: measured(prometheus, limit.query).load == 0.2)
    policy = replace(POLICY, query="sum(active_users)", target=None, latency=limit)
    resizable(region, replace(SPEC, autoscale=policy))
    answers, file = tmp_path / "a.sock", tmp_path / "web.json"
    document = {"minimum": 2, "maximum": 30, "signal": "query", "query": POLICY.query}
    document |= {"latency": {"query": limit.query, "limit_s": 0.5}}
    named = {"name": "web", "entitlement": "front", "tasks": 1, "image": SPEC.image}
    file.write_text(json.dumps({**named, "command": ["/bin/x"], "autoscale": document}))
    words = (
        *("--endpoint", f"unix:{region.socket}", "--state", str(tmp_path / "state")),
        *("--socket", str(answers), "--prometheus", prometheus),
    )
    with running(sys.executable, "-m", "control_plane.autoscaler.daemon", *words):
        until(lambda: region.control_plane.jobs["web"].tasks == 8)  # 710 at 0.8 x 125
        explained = ctl(region, answers, "autoscale", "explain", "web").output
        assert f"a task carries {carries:.4g} within 0.3 s, learnt from 120 min" in explained
        assert f"{carries:.4g}; latency last measured 1" in explained  # minutes
        replayed = ctl(region, answers, "autoscale", "simulate", str(file), "-o", "json")
        assert replayed.exit_code == 0, replayed.output
