"""A control plane whose roles are real processes on a real etcd, with agents in this process.

Tests and benches use it. Its agents are the production daemon on machines in memory
(`vm_lab.fleet`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase, JobSpec, UpdatePolicy
from control_plane.client import ControlPlaneClient
from tests.etcd import Cluster
from tests.ports import free_port
from vm_lab.fleet import Fleet, FleetHost
from wire.errors import TwineError

PATIENCE_S = 180.0
"""Long, because a busy machine is slow. Leases are long for the same reason."""
_DAEMON = (sys.executable, "-m", "control_plane.daemon")


class PlaneProcess:
    """One `twine-control-plane serve` with a role."""

    def __init__(self, name: str, config: Path, log: Path) -> None:
        self.name, self._config, self.log = name, config, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Its output is in `log`."""
        with self.log.open("ab") as log:
            argv = (*_DAEMON, "serve", "--config", str(self._config))
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP and SIGCONT pause it."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End the process and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        return process.wait(PATIENCE_S)

    def has_logged(self, text: str) -> bool:
        """Return whether the output since the first start contains a text."""
        return text in self.log.read_text()

    async def until_logged(self, text: str) -> None:
        """Wait until the output contains a text. Fail if the process ends before."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.has_logged(text):
                if self.process is None or self.process.poll() is not None:
                    raise AssertionError(f"{self.name} ended: {self.log.read_text()[-3000:]}")
                await asyncio.sleep(0.05)


class RegionOfProcesses:
    """A core, processes of shards, and hosts in memory."""

    def __init__(self, folder: Path, cluster: Cluster, shards: int, ttl_s: int = 15) -> None:
        self.folder, self.shards = folder, shards
        self._urls, self._ttl_s = cluster.urls, ttl_s
        self.socket = folder / "core.sock"
        self.client = ControlPlaneClient(f"unix:{self.socket}")
        self.hosts: list[FleetHost] = []
        self.processes: list[PlaneProcess] = []
        self._ports: dict[str, int] = {}
        self.regions: dict[str, str] = {}
        """Shard → its region, as the core's configuration has it."""

    def url(self, name: str) -> str:
        """Return the URL at which a process takes requests."""
        return f"https://127.0.0.1:{self._ports[name]}"

    def made(self, name: str, role: str, shard: int = 0) -> PlaneProcess:
        """Return a process with its own configuration, not started yet."""
        state = self.folder / name
        state.mkdir()
        self._ports[name] = free_port()
        urls = ", ".join(f'"{url}"' for url in self._urls)
        lines = [
            f'state = "{state}"',
            f'socket = "{self.folder / name}.sock"',
            f'listen = "127.0.0.1:{self._ports[name]}"',
            f'role = "{role}"',
            *(
                [f"shard = {shard}", f'shard_credential = "{self.credential(shard)}"']
                if shard
                else []
            ),
            "[etcd]",
            f"endpoints = [{urls}]",
            f'prefix = "{self.folder}"',
            f"ttl_s = {self._ttl_s}",
            "[scheduler]",
            f"shards = {self.shards}",
            "destructive_per_s = 1000.0",
            "destructive_burst = 1000",
            "agent_grace_s = 600.0",
            "join_grace_s = 5.0",
        ]
        if role == "core" and self.regions:
            lines += ["[scheduler.shard_regions]"]
            lines += [f'{number} = "{at}"' for number, at in self.regions.items()]
        config = self.folder / f"{name}.toml"
        config.write_text("\n".join(lines) + "\n")
        made = PlaneProcess(name, config, self.folder / f"{name}.log")
        self.processes.append(made)
        return made

    def front_end(self, name: str) -> PlaneProcess:
        """Return a front end, not started yet, after writing its credential."""
        self._ports[name] = free_port()
        credential, config = self.folder / f"{name}.credential", self.folder / f"{name}.toml"
        text = ("front-end-credential", "--host", "127.0.0.1", "--out", str(credential))
        core = ("--config", str(self.folder / "core.toml"))
        subprocess.run((*_DAEMON, *text, *core), check=True, capture_output=True)
        lines = [
            f'listen = "127.0.0.1:{self._ports[name]}"',
            'role = "front-end"',
            f'front_end_credential = "{credential}"',
            f'cores = ["{self.url("core")}"]',
        ]
        config.write_text("\n".join(lines) + "\n")
        made = PlaneProcess(name, config, self.folder / f"{name}.log")
        self.processes.append(made)
        return made

    def credential(self, shard: int) -> Path:
        """Return the file with the credential of a shard."""
        return self.folder / f"shard-{shard}.credential"

    def write_credential(self, shard: int) -> None:
        """Have the core's authority write the credential of a shard."""
        text = ("shard-credential", str(shard), "--host", "127.0.0.1")
        where = ("--out", str(self.credential(shard)), "--config", str(self.folder / "core.toml"))
        subprocess.run((*_DAEMON, *text, *where), check=True, capture_output=True)

    async def join(self, hosts: int, region: str = "local") -> None:
        """Join hosts of a region and start them."""
        port, first = free_port(), len(self.hosts)
        made = [FleetHost(self.folder, first + n, port) for n in range(hosts)]
        for host in made:
            host.location = replace(host.location, region=region)
        self.hosts += made
        turns = asyncio.Semaphore(16)

        async def one(host: FleetHost) -> None:
            async with turns:
                await host.join(self.client)
                await host.start()

        await asyncio.gather(*map(one, made))

        async def ready() -> bool:
            views = (await self.client.list_machines()).machines
            return len(views) == len(self.hosts) and all(view.ready for view in views)

        await self.until(ready, "hosts are ready")

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until a condition holds. Temporary errors are ignored."""
        last = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        if await holds():
                            return
                    except TwineError as e:
                        last = f"{type(e).__name__}: {e}"
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE_S:g} s until {what}; {last}") from None

    async def entitle(self, name: str, machines: int, shard: int) -> None:
        """Create an entitlement and assign it to a shard."""
        await self.client.put_entitlement(
            name, EntitlementSpec(machines=machines, host_profile="web")
        )
        await self.client.move_entitlement(name, shard)

    async def image(self) -> str:
        """Return the digest of an image of the core's store."""
        return await Fleet(self.client, self.hosts, "")._image()

    async def run(self, job: str, entitlement: str, tasks: int, image: str) -> None:
        """Run a job, and wait until it is stable."""
        spec = JobSpec(
            name=job,
            entitlement=entitlement,
            tasks=tasks,
            image=image,
            command=["/bin/serve"],
            limits=Limits(memory_max_bytes=64 << 20),
            update=UpdatePolicy(max_unavailable=max(1, tasks // 5), drain_s=0),
        )
        await self.client.apply_job(spec)
        await self.until(lambda: self.is_stable(job), f"{job} is stable")

    async def is_stable(self, job: str) -> bool:
        """Return whether a job has reached its wanted state."""
        return (await self.client.get_job(job)).phase is JobPhase.STABLE

    def started(self) -> list[str]:
        """Return each start of a task on any host, in any order."""
        return sorted(
            f"{host.name} {unit}"
            for host in self.hosts
            for unit in host.machine.systemd.started
            if unit.startswith("twine-task")
        )


@asynccontextmanager
async def region_of_processes(
    folder: Path,
    cluster: Cluster,
    shards: int,
    ttl_s: int = 15,
    regions: Mapping[str, str] | None = None,
) -> AsyncIterator[RegionOfProcesses]:
    """Run a core, and a process for each shard from 1 on; leases end after `ttl_s`."""
    region = RegionOfProcesses(folder, cluster, shards, ttl_s)
    region.regions.update(regions or {})
    core = region.made("core", "core")
    try:
        core.start()
        await core.until_logged("serving at")
        for number in range(1, shards):
            await asyncio.to_thread(region.write_credential, number)
            region.made(f"shard{number}", "shard", number).start()
        for process in region.processes[1:]:
            await process.until_logged("serving at")
        yield region
    finally:
        await region.client.close()
        for host in region.hosts:
            with contextlib.suppress(Exception):
                await host.stop()
        for process in region.processes:
            process.end()


def used(process: PlaneProcess) -> tuple[float, int]:
    """Return the CPU seconds and the resident bytes of a process (proc(5))."""
    assert process.process is not None
    folder = Path(f"/proc/{process.process.pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int((folder / "statm").read_text().split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")
