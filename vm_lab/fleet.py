"""Hundreds of real agents on machines in memory: deploy, update, and lose a third of them.

Each agent is the production daemon with its own state folder, identity and TLS port, at its own
loopback address (127.1.x.y); only its machine is in memory. The control plane is the production
daemon, too. All requests use HTTP and mutual TLS. Everything runs in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import resource
import signal
import socket
import tarfile
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from agent.api import ImageFormat, Limits, Location
from agent.config import AgentConfig
from agent.daemon import Agent
from agent.host.facts import FactsReader
from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation
from agent.machine import Usage
from agent.machine.fake import FakeMachine
from agent.machine.fake_systemd import Ended
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase, JobSpec, UpdatePolicy
from control_plane.api.machines import TokenRequest
from control_plane.api.settings import SchedulerSettings
from control_plane.client import ControlPlaneClient
from control_plane.config import Config
from control_plane.daemon import serve
from vm_lab.dev_services import services

T = TypeVar("T")

MSBS, DATACENTERS = 6, 2
PHASE_MAX_S = 1800.0
_NO_SESSION = Ended(code=None, result="a machine in memory runs no program")
LOST_SHARE = 0.3
"""Below `brake_share`, the share at which the control plane suspects its own network."""
CONCURRENT_JOINS = 16
"""Hosts that join at the same time."""
SETTINGS = SchedulerSettings(
    destructive_per_s=1000.0, destructive_burst=1000, agent_grace_s=10.0, join_grace_s=5.0
)
"""The address of a dead agent refuses connections, which may also be a restart of the agent. Here
the control plane waits ten seconds for a restart."""

_TASK_LOG = ("journalctl", "--no-pager", "--quiet", "--output=cat")
"""The first words of the agent's command for the log of a task."""


_SETTINGS = {
    **{"sysctl.net.core.somaxconn": ("4096", 0.4), "sysctl.vm.swappiness": ("10", 0.3)},
    **{"cpu.governor": ("performance", 21.0), "hugepages.2048": ("64", 340.0)},
}
"""Settings of every profile in memory: the value, and about how many milliseconds it takes."""


class ModelledUsage(dict[str, Usage]):
    """The resource usage of tasks in memory: for each task a different wave of a few minutes."""

    def get(self, group: str, _: object = None) -> Usage | None:  # type: ignore[override]
        """Return the present usage of a task's unit; None for other groups."""
        unit = group.rpartition("/")[2]
        if not unit.startswith("twine-task-"):
            return None
        now, phase = time.monotonic(), zlib.crc32(unit.encode()) % 628 / 100
        wave = math.sin(now / 40 + phase)
        memory = int((30 + 6 * wave) * (1 << 20))
        return Usage(
            cpu_s=0.3 * now - 8.0 * math.cos(now / 40 + phase) + 10,
            memory_bytes=memory,
            memory_peak_bytes=37 << 20,
            read_bytes=4 << 20,
            written_bytes=1 << 20,
            processes=3,
            cpu_pressure=max(0.0, 0.05 * wave),
        )


class FleetHost:
    """One machine in memory, and the agent on it while it is on."""

    def __init__(self, folder: Path, number: int, port: int) -> None:
        self.name = f"h{number:04}"
        self.folder = folder / self.name
        self.folder.mkdir()
        msb = number % MSBS
        self.location = Location(
            datacenter=f"dc{msb % DATACENTERS}", msb=f"msb{msb}", rack=f"r{msb}-{number // 60}"
        )
        self.address = f"127.1.{number // 250}.{number % 250 + 1}:{port}"
        self.machine = FakeMachine(self.folder)
        self.machine.cgroups.usage = ModelledUsage()
        self.machine.systemd.programs["find"] = lambda _argv, _properties: Ended(0)
        self.machine.systemd.programs["sidekick"] = self._sidekick
        self.machine.systemd.cannot_run["*exec-*"] = _NO_SESSION
        self.machine.processes.answers[_TASK_LOG] = [b"(a machine in memory runs no program)\n"]
        self.config = AgentConfig(
            state_dir=str(self.folder / "state"),
            run_dir=str(self.folder / "run"),
            socket=str(self.folder / "a.sock"),
            socket_group="root",
            listen=self.address,
            sidekick="/opt/twine/bin/sidekick",
            sidekick_state_dir=str(self.folder / "sidekick"),
        )
        self._stack: AsyncExitStack | None = None

    def _sidekick(self, argv: list[str], _: object) -> Ended:
        """Report at once that the requested profile is verified."""
        options = dict(word[2:].split("=", 1) for word in argv if "=" in word)
        target = {
            "name": argv[2],
            "generation": int(options["generation"]),
            "epoch": int(options["epoch"]),
            "state": "verified",
        }
        slowness = 1 + zlib.crc32(self.name.encode()) % 100 / 50
        times = {name: round(slowness * ms, 2) for name, (_, ms) in _SETTINGS.items()}
        applied = [{"setting": n, "outcome": "applied", "took_ms": ms} for n, ms in times.items()]
        values = ({"wanted": value, "actual": value} for value, _ in _SETTINGS.values())
        verified = [row | value for row, value in zip(applied, values, strict=True)]
        switch = {"command": "apply", "at": time.time(), "took_ms": sum(times.values())}
        switched = target | switch | {"settings": applied}
        report = target | {"settings": verified, "switched": switched}
        folder = self.folder / "sidekick"
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps(report))
        return Ended(0)

    async def join(self, client: ControlPlaneClient) -> None:
        """Become a machine of the region, as `twine-agent join` does."""
        token = await client.create_token(TokenRequest(machine=self.name))
        facts = await asyncio.to_thread(
            FactsReader(self.machine.machine, str(self.folder)).read, self.name
        )
        identity = HostIdentity(Path(self.config.state_dir) / "identity")
        candidate = CandidateIdentity(self.name, self.address, facts, self.location)
        await identity.join(Invitation(token.url, token.token, token.ca_hash), candidate)

    async def start(self) -> None:
        """Start the agent."""
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(Agent(self.config, self.machine.machine).running())

    async def stop(self) -> None:
        """Stop the agent: the machine no longer answers."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.aclose()


class Fleet:
    """The control plane, its hosts, and the steps of a measurement."""

    def __init__(
        self,
        client: ControlPlaneClient,
        hosts: list[FleetHost],
        endpoint: str,
        plane: asyncio.Task[None] | None = None,
    ) -> None:
        self.client, self.hosts, self.endpoint, self.plane = client, hosts, endpoint, plane
        self.times: dict[str, float] = {}

    async def join_hosts(self) -> None:
        """Join and start all hosts, `CONCURRENT_JOINS` at a time."""
        turns = asyncio.Semaphore(CONCURRENT_JOINS)

        async def join_host(host: FleetHost) -> None:
            async with turns:
                await host.join(self.client)
                await host.start()

        with self._timed("join_s"):
            async with asyncio.TaskGroup() as group:
                for host in self.hosts:
                    group.create_task(join_host(host))
            await self._wait_until(self._all_ready)

    async def entitle(self) -> None:
        """Create an entitlement that may hold every host."""
        spec = EntitlementSpec(machines=len(self.hosts), host_profile="web")
        await self.client.put_entitlement("front", spec)

    async def deploy(self, tasks: int, argument: str = "1") -> None:
        """Run a job with this number of tasks; another argument updates it."""
        image = await self._image()
        spec = JobSpec(
            name="web",
            entitlement="front",
            tasks=tasks,
            image=image,
            command=["/bin/serve", argument],
            limits=Limits(memory_max_bytes=64 << 20),
            update=UpdatePolicy(max_unavailable=max(1, tasks // 5), drain_s=0),
        )
        await self.client.apply_job(spec)
        await self._wait_until(self._is_stable)

    async def measure(self, tasks: int) -> dict[str, float]:
        """Deploy, update, lose a third of the hosts; return how long each took."""
        await self.entitle()
        with self._timed("deploy_s"):
            await self.deploy(tasks)
        with self._timed("update_s"):
            await self.deploy(tasks, "2")
        lost = self.hosts[: int(len(self.hosts) * LOST_SHARE)]
        with self._timed("recover_s"):
            await asyncio.gather(*(host.stop() for host in lost))
            gone = {host.name for host in lost}
            await self._wait_until(lambda: self._has_left(gone))
            await self._wait_until(self._is_stable)
        self.times["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {"agents": len(self.hosts), "tasks": tasks, **self.times}

    async def _image(self) -> str:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            entry = tarfile.TarInfo("bin/serve")
            entry.size = 4
            archive.addfile(entry, io.BytesIO(b"#!/\n"))
        data = buffer.getvalue()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()

        async def chunks() -> AsyncIterator[bytes]:
            yield data

        await self.client.push_image(digest, ImageFormat.TAR, chunks())
        return digest

    async def _all_ready(self) -> bool:
        views = (await self.client.list_machines()).machines
        return len(views) == len(self.hosts) and all(view.ready for view in views)

    async def _is_stable(self) -> bool:
        return (await self.client.get_job("web")).phase is JobPhase.STABLE

    async def _has_left(self, machines: set[str]) -> bool:
        tasks = (await self.client.get_job("web")).record.tasks
        return not any(t.placement is not None and t.placement.machine in machines for t in tasks)

    async def _wait_until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(PHASE_MAX_S):
            while not await holds():
                await asyncio.sleep(0.2)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times[name] = round(time.perf_counter() - began, 1)


@asynccontextmanager
async def fleet(agents: int, address: str = "127.0.0.1:0") -> AsyncIterator[Fleet]:
    """Run a control plane on `address` and `agents` agents, joined and ready."""
    with tempfile.TemporaryDirectory(prefix="twine-fleet-") as folder:
        root, stopping = Path(folder), asyncio.Event()
        serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        config = Config(
            state=str(root / "cp"),
            listen=address,
            socket=str(root / "cp.sock"),
            autoscaler=str(root / "autoscaler.sock"),
            conveyor=f"unix:{root}/conveyor.sock",
            scheduler=SETTINGS,
        )
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]  # the same for all: their addresses differ
        plane = asyncio.create_task(serve(config, stopping, serving.set_result))
        try:
            await asyncio.wait((plane, serving), return_when=asyncio.FIRST_COMPLETED)
            if plane.done():
                await plane
            async with ControlPlaneClient(f"unix:{config.socket}") as client:
                hosts = [FleetHost(root, number, port) for number in range(agents)]
                region = Fleet(client, hosts, f"unix:{config.socket}", plane)
                try:
                    await region.join_hosts()
                    yield region
                finally:
                    await asyncio.gather(*(host.stop() for host in hosts))
        finally:
            stopping.set()
            await plane


async def measured(agents: int, tasks: int) -> dict[str, float]:
    """Return how many seconds joining, deploying, updating and recovering took."""
    async with fleet(agents) as region:
        return await region.measure(tasks)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; SIGTERM ends it as Ctrl-C does, so that it removes its files."""

    async def until_signal() -> T:
        working = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        return await working

    try:
        return asyncio.run(until_signal())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@click.command("fleet")
@click.option("--agents", type=click.IntRange(1, 5000), default=200, show_default=True)
@click.option("--tasks", type=click.IntRange(1), help="[default: one and a half for each agent]")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(agents: int, tasks: int | None, as_json: bool) -> None:
    """Run real agents on machines in memory: join, deploy, update, lose three in ten."""
    logging.disable(logging.WARNING)
    figures = run(measured(agents, tasks or agents * 3 // 2))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            click.echo(f"{name:12} {value:g}")


@click.command("dev")
@click.option("--agents", type=click.IntRange(1, 500), default=10, show_default=True)
def dev_command(agents: int) -> None:
    """Run a control plane and agents on machines in memory until Ctrl-C or SIGTERM."""
    logging.disable(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        run(_run_dev_region(agents))


async def _run_dev_region(agents: int) -> None:
    click.echo(f"starting a control plane and {agents} agents …")
    async with fleet(agents) as region:
        await region.entitle()
        await region.deploy(max(1, agents // 2))
        folder = Path(region.endpoint.removeprefix("unix:")).parent
        async with services(region.endpoint, folder) as variables:
            click.echo(
                f"{agents} machines joined; job web runs. Tasks are simulated; everything else is "
                f"the production code.\n\n    export TWINE_ENDPOINT={region.endpoint}"
            )
            for name, value in variables.items():
                click.echo(f"    export {name}={value}")
            click.echo(
                "\n    twinectl machine list\n    twinectl job status web\n"
                "    twinectl pipeline list\n    twinectl autoscale status\n\nCtrl-C ends it."
            )
            assert region.plane is not None
            await asyncio.wait([region.plane])
        click.echo("error: the control plane ended", err=True)
