"""A release of the agent by a pipeline, with the production control plane and agents.

The agents are on machines in memory, and an installation is a command from the fleet's
configuration. It ends the agent of a host and starts it again with another version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from agent.api import MachineFacts
from agent.host.facts import FactsReader
from conveyor.client import ConveyorClient
from conveyor.config import ConveyorConfig, FleetSettings
from conveyor.fleet_hosts import CommandHosts
from tests.integration.conveyor.test_delivery import conveyor, ctl, until
from tests.ports import free_port
from vm_lab.fleet import Fleet, FleetHost, fleet
from wire.errors import HostError

pytestmark = pytest.mark.behaviour("CV3", "AV15")

OLD, NEW, BROKEN = "0.1.0", "0.2.0", "0.3.0"
FILE = """
name = "twine"
fleets = ["agents"]

[[stages]]
kind = "canary"
tasks = 1
soak_s = "2s"
gates = ["health"]

[[stages]]
kind = "all"
gates = ["health"]

[gates.health]
health = {}
every_s = 1
"""


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folder of an agent's state → the version that the agent reports."""
    found: dict[str, str] = {}
    read = FactsReader.read

    def versioned(self: FactsReader, name: str) -> MachineFacts:
        return replace(read(self, name), agent_version=found.get(self._state_dir, OLD))

    monkeypatch.setattr(FactsReader, "read", versioned)
    return found


@asynccontextmanager
async def installer(region: Fleet, versions: dict[str, str], port: int) -> AsyncIterator[list[str]]:
    """Serve a command that installs a release on a host: `POST /HOST/RELEASE`; yield the
    installations.
    """
    hosts, put = {host.name: host for host in region.hosts}, list[str]()

    async def install(request: web.Request) -> web.Response:
        host: FleetHost = hosts[request.match_info["host"]]
        release = request.match_info["release"]
        put.append(f"{host.name} {release}")
        await host.stop()
        if release == BROKEN:
            return web.Response(status=500, reason="the agent does not start")
        versions[host.config.state_dir] = release
        await host.start()
        return web.Response()

    app = web.Application()
    app.router.add_post("/{host}/{release}", install)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield put
    finally:
        await runner.cleanup()


def units_of(region: Fleet) -> dict[str, str]:
    """Return unit of a task → its invocation, on all machines."""
    found: dict[str, str] = {}
    for host in region.hosts:
        systemd: Any = host.machine.systemd
        for state in systemd.units("twine-task-*"):
            found[f"{host.name} {state.unit}"] = state.invocation_id
    return found


async def _watch(region: Fleet, missing: list[str], tasks: int) -> None:
    """Poll discovery as a client does, and record when a task is not listed."""
    while True:
        listed = (await region.client.endpoints("web")).endpoints
        if len(listed) != tasks:
            missing.append(f"{len(listed)} of {tasks} tasks are listed")
        await asyncio.sleep(0.05)


async def test_cv3_av15_agents_are_released_host_by_host_and_a_broken_one_is_taken_back(
    tmp_path: Path, versions: dict[str, str]
) -> None:
    """No task restarts, and none is missing from discovery at any moment."""
    file, port, missing = tmp_path / "twine.toml", free_port(), list[str]()
    file.write_text(FILE)
    words = ["curl", "--fail", "--silent", "--show-error", "-X", "POST"]
    words.append(f"http://127.0.0.1:{port}/$host/$release")
    agents = FleetSettings(install=words, settle_s=0.5, healthy_s=60.0)
    async with fleet(4) as region, installer(region, versions, port) as put:
        await region.entitle()
        await region.deploy(6)
        before = units_of(region)
        assert len(before) == 6
        config = ConveyorConfig(
            state=str(tmp_path / "state"),
            socket=str(tmp_path / "conveyor.sock"),
            endpoint=region.endpoint,
            fleets={"agents": agents},
        )
        service = f"unix:{config.socket}"
        watching = asyncio.create_task(_watch(region, missing, 6))
        async with conveyor(config), ConveyorClient(service) as client:

            async def ends(release: str) -> Any:
                await ctl(service, region.endpoint, "start", "twine", "--release", release)
                found = await until(
                    lambda: client.get_pipeline("twine"),
                    lambda v: v.record.active is None and v.record.waiting is None,
                )
                return found.last

            planned = await ctl(service, region.endpoint, "plan", str(file), code=2)
            assert "fleet/agents 1 of 4" in planned
            await ctl(service, region.endpoint, "apply", str(file))
            run = await ends(NEW)
            assert (run.state.value, run.reason) == ("done", "")
            assert put == [f"h000{n} {NEW}" for n in range(4)]
            views = (await region.client.list_machines()).machines
            assert {v.record.facts.agent_version for v in views if v.record.facts} == {NEW}

            run = await ends(BROKEN)
            assert run.state.value == "rolled-back"
            assert put[4:] == [f"h0000 {BROKEN}", f"h0000 {NEW}"]
            assert "host h0000: curl ended with 22" in run.reason
            page = await ctl(service, region.endpoint, "status", "twine")
            assert f"last finished: {NEW}" in page
            assert f"last: run 2 of release {BROKEN} rolled-back" in page
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert missing == []
        assert units_of(region) == before
        views = (await region.client.list_machines()).machines
        assert all(view.ready for view in views)


async def test_output_of_a_command_explains_why_a_package_does_not_start():
    """dpkg repeats its own error over four lines after the output of the maintainer script."""
    messages = [
        "Setting up twine-agent (0.3.0) ...",
        "twine-agent: the agent does not start; tasks run on. Why:",
        '  File "daemon.py", line 9, in serve',
        "    raise RuntimeError(why)",
        "RuntimeError: this release does not start",
        "twine-agent: mend that, then: dpkg --configure twine-agent",
        "dpkg: error processing package twine-agent (--install):",
        " installed twine-agent package post-installation script returned error exit status 1",
        "Errors were encountered while processing:",
        " twine-agent",
    ]
    script = "\n".join(["cat <<'end'", *messages, "end", "exit 1"])
    fleet = FleetSettings(install=["sh", "-c", script.replace("$", "$$")])
    client: Any = None  # commands need no front end
    with pytest.raises(HostError, match=r"sh ended with 1: .*this release does not start"):
        await CommandHosts(client).install(fleet, "m1", "0.3.0")
