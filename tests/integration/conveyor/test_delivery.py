"""A pipeline with the production control plane and Debian's Prometheus.

Agents on machines in memory run the tasks; an exporter provides the metrics of each task's image.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import re
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from click.testing import CliRunner
from msgspec.structs import replace

from agent.api import ImageFormat, Limits
from control_plane.api.jobs import JobSpec, UpdatePolicy, spec_of, task_id
from control_plane.api.updates import Canary
from control_plane.cli import main as twinectl
from control_plane.client import ControlPlaneClient
from conveyor.cli import run_service
from conveyor.client import ConveyorClient
from conveyor.config import ConveyorConfig
from conveyor.runs import PipelineView
from tests.ports import free_port
from vm_lab.fleet import fleet

pytestmark = pytest.mark.behaviour("CV1", "CV2", "CV5")

PATIENCE_S = 60.0
ROUND_S = 0.2
"""The service polls ten times as often as in production; the test waits for real work."""
FILE = """
name = "web"
jobs = ["web"]
prometheus = "{prometheus}"

[[stages]]
kind = "canary"
tasks = 2
soak_s = "3s"
gates = ["errors", "latency", "health"]

[[stages]]
kind = "percent"
percent = 50
soak_s = "2s"
gates = ["errors", "latency", "health"]

[[stages]]
kind = "all"
gates = ["errors"]

[gates.errors]
query = {{ promql = 'app_error_ratio{{task=~"$tasks"}}', at_most = 0.05 }}
every_s = 1
failures = 2

[gates.latency]
every_s = 1
[gates.latency.compare]
promql = 'app_latency_seconds{{task=~"$tasks"}}'
samples = 5
window_s = "15s"
step_s = 1

[gates.health]
health = {{}}
every_s = 1
"""


async def pushed(client: ControlPlaneClient, version: int) -> str:
    """Store an image and return its digest."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        data = f"#!/bin/sh\n# version {version}\n".encode()
        entry = tarfile.TarInfo("bin/serve")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    content = buffer.getvalue()
    digest = "sha256:" + hashlib.sha256(content).hexdigest()

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    await client.push_image(digest, ImageFormat.TAR, chunks())
    return digest


@asynccontextmanager
async def exporter(
    client: ControlPlaneClient, port: int, bad: set[str], slow: set[str]
) -> AsyncIterator[None]:
    """Serve metrics of each task of `web`: bad images have errors, slow ones latency."""

    async def metrics(_: web.Request) -> web.Response:
        record = (await client.get_job("web")).record
        lines = []
        for task in record.tasks:
            if not task.listed:
                continue
            image = spec_of(record, task).image
            is_bad, base_s = image in bad, 0.2 if image in slow else 0.1
            name = task_id("web", task.index)
            noise = 0.01 * math.sin(7 * task.index + asyncio.get_running_loop().time())
            lines.append(f'app_error_ratio{{task="{name}"}} {0.3 if is_bad else 0.01 + noise / 2}')
            lines.append(f'app_latency_seconds{{task="{name}"}} {base_s + noise}')
        return web.Response(text="\n".join(lines) + "\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[str]:
    """Run Debian's Prometheus, which scrapes the exporter each second."""
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: app\n  static_configs:\n"
        f"  - targets: ['127.0.0.1:{target}']\n"
    )
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def _scraped(metrics: str) -> None:
    """Return once Prometheus has the exporter's numbers, some seconds after its start."""
    async with ClientSession() as session:

        async def series() -> list[Any]:
            try:
                async with session.get(
                    f"{metrics}/api/v1/query", params={"query": "app_error_ratio"}
                ) as response:
                    found: list[Any] = (await response.json())["data"]["result"]
                    return found
            except (ClientError, LookupError):
                return []

        await until(series, bool)


@asynccontextmanager
async def conveyor(config: ConveyorConfig) -> AsyncIterator[None]:
    stopping, started = asyncio.Event(), asyncio.Event()
    running = asyncio.ensure_future(run_service(config, stopping, started.set, ROUND_S))
    waiting = asyncio.ensure_future(started.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield
    finally:
        waiting.cancel()
        stopping.set()
        await running


async def ctl(service: str, endpoint: str, *arguments: str, code: int = 0) -> str:
    argv = ["--endpoint", endpoint, "pipeline", "--service", service, *arguments]
    result = await asyncio.to_thread(CliRunner().invoke, twinectl, argv)
    assert result.exit_code == code, result.output
    return result.output


async def until(read: Any, holds: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not holds(found := await read()):
            await asyncio.sleep(0.1)
    return found


async def test_cv1_cv2_cv5_good_goes_through_and_bad_is_stopped_at_the_canary(tmp_path: Path):
    port = free_port()
    async with prometheus(tmp_path, port) as metrics, fleet(6) as region:
        client = region.client
        await region.entitle()
        one, two, three, four = [await pushed(client, v) for v in (1, 2, 3, 4)]
        spec = JobSpec(
            name="web",
            entitlement="front",
            tasks=6,
            image=one,
            command=["/bin/serve"],
            limits=Limits(memory_max_bytes=64 << 20),
            update=UpdatePolicy(max_unavailable=3, drain_s=0, canary=Canary(tasks=2, hold_s=0)),
        )
        await client.apply_job(spec)
        await until(lambda: client.get_job("web"), lambda s: s.phase == "stable")
        config = ConveyorConfig(
            state=str(tmp_path / "state"),
            socket=str(tmp_path / "conveyor.sock"),
            endpoint=region.endpoint,
        )
        service = f"unix:{config.socket}"
        async with (
            exporter(client, port, {three}, {four}),
            ConveyorClient(service) as delivery,
        ):
            await _scraped(metrics)
            file = tmp_path / "web.toml"
            file.write_text(FILE.format(prometheus=metrics))
            async with conveyor(config):
                plan_output = await ctl(service, region.endpoint, "plan", str(file), code=2)
                assert "50 %: web 3 of 6" in plan_output
                await ctl(service, region.endpoint, "apply", str(file))
                await ctl(service, region.endpoint, "start", "web", "--image", two)
                view = await _at_half(delivery)
                assert view.jobs[0].size == 6
            # the service is down for a while; the job keeps its state, and its size changes
            now = (await client.get_job("web")).record.spec
            await client.apply_job(replace(now, tasks=10))
            status = await until(lambda: client.get_job("web"), lambda s: _new(s, two) == 5)
            assert status.record.spec.tasks == 10
            async with conveyor(config):
                view = await _ended(delivery, 1)
                assert view.last is not None
                assert (view.last.state, view.last.reason) == ("done", "")
                status = await client.get_job("web")
                assert _new(status, two) == 10
                assert status.record.spec.update == spec.update

                await ctl(service, region.endpoint, "start", "web", "--image", three)
                most_bad = 0

                async def watched() -> PipelineView:
                    nonlocal most_bad
                    most_bad = max(most_bad, _new(await client.get_job("web"), three))
                    return await delivery.get_pipeline("web")

                view = await until(watched, lambda v: v.last is not None and v.last.number == 2)
                assert view.last is not None
                assert view.last.state == "rolled-back"
                found = re.search(
                    r"gate errors: ([12]) of 2 values not at most 0.05", view.last.reason
                )
                assert found, view.last.reason
                assert most_bad == 2
                status = await client.get_job("web")
                assert (_new(status, two), status.record.spec.update) == (10, spec.update)

                await ctl(service, region.endpoint, "start", "web", "--image", four)
                view = await _ended(delivery, 3)
                assert view.last is not None
                assert view.last.state == "rolled-back"
                assert "gate latency: worse beyond 10%" in view.last.reason
                assert [s.name for s in view.last.steps] == ["canary 2", "rollback"]
                assert _new(await client.get_job("web"), two) == 10
                plan_output = await ctl(service, region.endpoint, "history", "web")
                print(plan_output)
                assert "0.3" in plan_output
                print(await ctl(service, region.endpoint, "status", "web"))
                drawn = await ctl(service, region.endpoint, "history", "web", "-o", "svg")
                assert ET.fromstring(drawn).tag.endswith("svg")
                (tmp_path / "run.svg").write_text(drawn)


async def _at_half(delivery: ConveyorClient) -> PipelineView:
    view: PipelineView = await until(
        lambda: delivery.get_pipeline("web"),
        lambda v: (
            v.record.active is not None
            and v.record.active.step == 1
            and v.record.active.steps[-1].reached is not None
        ),
    )
    return view


async def _ended(delivery: ConveyorClient, run: int) -> PipelineView:
    view: PipelineView = await until(
        lambda: delivery.get_pipeline("web"),
        lambda v: v.last is not None and v.last.number == run,
    )
    return view


def _new(status: Any, image: str) -> int:
    record = status.record
    return sum(spec_of(record, t).image == image and t.listed for t in record.tasks)
