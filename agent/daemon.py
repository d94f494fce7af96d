"""Composition root of the agent: builds machine, services and servers, in order.

Start: lock → journal → adopt what runs → READY → unix socket → TLS, once the host joined.
Stopping the agent leaves every task alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import grp
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from agent import api
from agent.api.signing import SIGN_HINT, distrust
from agent.config import AgentConfig
from agent.credentials.credentials import CredentialHolder
from agent.host.core.pressure import Waits, starts_at_once
from agent.host.facts import FactsReader
from agent.host.gc import Ledger
from agent.host.host_profile import HostProfile
from agent.host.logs import Logs
from agent.host.metrics import AgentMetrics
from agent.host.pressure import Pressure
from agent.host.reserved_port import listen
from agent.host.usage import UsageReader
from agent.identity.clone_check import CloneCheck
from agent.identity.identity import LAST_OWNERS, LAST_TERM, HostIdentity
from agent.identity.task_identities import TaskIdentities
from agent.images.core.retention import Room
from agent.images.images import HostImages
from agent.images.oci import Registries
from agent.images.roots import FreshRoot, TaskRoots
from agent.lease.contact import Contact
from agent.lease.fencing import FencingOwners, FencingTerm
from agent.machine import HostAccess
from agent.machine.acl import let_group
from agent.machine.notify import notify, watchdog_s
from agent.network.core.resolver_files import Resolver
from agent.network.name_files import NameFiles
from agent.network.networks import Networks, site_with
from agent.notices.notices import TaskNotices
from agent.resources.exclusive_cpus import ExclusiveCpus
from agent.resources.huge_pages import HugePages
from agent.resources.memory_protection import MemoryProtection
from agent.resources.task_limits import TaskLimits
from agent.routes import JOIN_ROUTES
from agent.runtime.core.records import TASK_UNITS
from agent.runtime.crashpoints import arm_from_environment
from agent.runtime.disk import StateDisk
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import next_round, pause
from agent.runtime.reserve import Reserve
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from agent.server import AgentServices, application
from agent.tasks.context import HostCapacity, TaskContext
from agent.tasks.core import own_init
from agent.tasks.exec import Sessions
from agent.tasks.inside import Inside
from agent.tasks.journal_repair import rebuild
from agent.tasks.oomd import Oomd
from agent.tasks.prober import Prober
from agent.tasks.shutdown import HostShutdown
from agent.tasks.starts import Starts
from agent.tasks.tasks import HostTasks
from agent.tasks.unit import SystemContainer, UnitOfTask
from agent.tasks.unit_view import UnitView
from agent.volumes.volume_service import VolumeService
from agent.volumes.volumes import Volumes
from wire import durable
from wire.admission import open_admission
from wire.client import WireClient
from wire.errors import Busy, ConfigError, NotBtrfs, TwineError, Unprocessable
from wire.limits import LOCAL, ConnectionLimits, raise_descriptor_limit
from wire.server import http_log

log = logging.getLogger(__name__)

_http_log = http_log(__name__)
_BACKLOG = 4096
_LIMITS = ConnectionLimits(connections=512, strangers=128, strangers_per_address=64, per_peer=384)
"""An agent is called by the control plane alone, and has little memory to give."""
TLS_RETRY_S = 10.0
JOIN_POLL_S = 5.0
"""How soon after `twine-agent join` the TLS port opens; with the other looks of an idle agent."""
_FETCH = next(r for r in JOIN_ROUTES if r.name == "fetch_image")


class Agent:
    """One agent over one machine, real or in memory."""

    def __init__(self, config: AgentConfig, machine: HostAccess) -> None:
        """Touch nothing yet; see `running`."""
        self.config = config
        self._machine = machine
        self._state = Path(config.state_dir)
        self.identity = HostIdentity(self._state / "identity")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AgentServices]:
        """Adopt what runs on the host and serve; leaving stops the agent, not the tasks."""
        async with AsyncExitStack() as stack:
            self._lock(stack)
            arm_from_environment(self.config.crash_points)
            lanes = Lanes()
            stack.callback(lanes.close)
            await self._require_btrfs(lanes)
            prober = Prober()
            stack.push_async_callback(prober.close)
            group = await stack.enter_async_context(_cancelled_at_exit())
            services = await self._services(lanes, prober, group, stack)
            app = application(services, self.config.socket_group)
            runner = web.AppRunner(
                app, handle_signals=False, shutdown_timeout=2.0, logger=_http_log
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.callback(services.events.close)
            await self._serve_socket(runner, stack)
            await self._adopt(services, lanes)
            group.create_task(self._serve_tls_forever(runner), name="tls")
            group.create_task(self._uniqueness.watch(), name="uniqueness")
            yield services

    def _lock(self, stack: AsyncExitStack) -> None:
        run = Path(self.config.run_dir)
        run.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((run / "agent.lock").open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise Busy(
                f"another agent runs on this host (it holds {run / 'agent.lock'})",
                hint="systemctl status twine-agent",
            ) from e

    async def _require_btrfs(self, lanes: Lanes) -> None:
        """Refuse to begin where no image could ever be taken in (F-38)."""
        self._state.mkdir(parents=True, exist_ok=True)
        try:
            await lanes.run("btrfs", self._machine.btrfs.top, self._state)
        except NotBtrfs as e:
            raise ConfigError(
                f"{self._state} is not on a btrfs file system",
                hint=f"is it mounted? make one with mkfs.btrfs and mount it at {self._state}",
            ) from e
        except TwineError as e:  # a disk that fails is a state, and told as one
            log.warning("cannot look at the state folder", extra={"why": str(e)})

    async def _services(
        self, lanes: Lanes, prober: Prober, group: asyncio.TaskGroup, stack: AsyncExitStack
    ) -> AgentServices:
        config, machine = self.config, self._machine
        hardware = await lanes.run("facts", machine.hardware)
        events = HostEvents(hardware.boot_id)
        reserve = Reserve(self._state / "reserve", machine.btrfs.sync)
        disk = StateDisk(self._state, events, reserve, lanes)
        units = Units(machine.systemd, lanes)
        stack.callback(units.listen())
        images = HostImages(
            self._state,
            machine.btrfs,
            units,
            machine.processes,
            lanes,
            events,
            Registries(config.registry_tls_verify, config.registry_credentials_file),
        )
        roots = TaskRoots(machine.btrfs, self._state / "tasks", images.folder)
        site = site_with(
            config.network_prefix6,
            config.network_prefix4,
            config.network_address,
            config.address()[1],
        )
        networks = Networks(machine.network, lanes, site)
        leaving = HostShutdown(units, events, machine.boottime_s)
        self.identity.boot_id = hardware.boot_id
        self._uniqueness = uniqueness = CloneCheck(self.identity, hardware.boot_id, events)
        uniqueness.wake = units.wake_all
        credentials = CredentialHolder(Path(config.run_dir) / "credentials.sock")
        own = Path(config.run_dir) / "identities"
        identities = TaskIdentities(own, self.identity, lanes, events)

        cgroups, run = machine.cgroups, Path(config.run_dir)
        cpus = ExclusiveCpus(units, cgroups, lanes, machine.cores, run / "own-cpus")
        with_pages = "hugetlb" in hardware.cgroup_controllers
        pages = HugePages(units, cgroups, lanes, machine.hugepages, controller=with_pages)
        memory = MemoryProtection(units, cgroups, lanes)
        volumes = Volumes(machine.btrfs, self._state)
        notices = TaskNotices(run / "notices", lanes)
        volume_service = VolumeService(volumes, lambda: tasks.specs(), lanes)
        dns = Resolver(*config.dns())
        stages: tuple[TaskStage, ...] = (
            credentials,
            identities,
            notices,
            SystemContainer(config.state_dir, config.run_dir),
            cpus,
            pages,
            memory,
            TaskLimits(units, cgroups, lanes, cpus, pages),
            FreshRoot(roots, lanes),
            volume_service,
            networks,
            NameFiles(roots.path, machine, lanes, dns, hardware.hostname),
        )
        unit = UnitOfTask(roots, stages)
        host = TaskContext(
            boot_id=hardware.boot_id,
            units=units,
            journal=Journal(self._state / "journal", reserve, run / "records"),
            events=events,
            lanes=lanes,
            roots=roots,
            stages=stages,
            unit=unit,
            inside=Inside(units, unit),
            prober=prober,
            oomd=Oomd(machine.processes),
            contact=Contact(run / "fence", hardware.boot_id, machine.boottime_s),
            starts=Starts(starts_at_once(hardware.cpu.online, Waits())),
            leaving=leaving,
            uniqueness=uniqueness,
            told=networks.gates.told,
        )
        capacity = HostCapacity(
            roots=roots,
            cpus=cpus,
            pages=pages,
            memory=memory,
            volumes=volumes,
            cgroups=cgroups,
            lanes=lanes,
            no_containers=lambda: own_init.missing(config.own_init, machine.has_program),
        )
        self._host = host
        sidekick_state = Path(config.sidekick_state_dir)

        standing = FactsReader(machine, config.state_dir, own_init=config.own_init)

        async def facts() -> api.MachineFacts:
            found = await lanes.run("facts", standing.read, self._name())
            problems = [p for p in (disk.problem, networks.problem) if p]
            return replace(found, problems=problems, leaving=leaving.now())

        last_term = FencingTerm(self._state / "identity" / LAST_TERM)
        last_owners = FencingOwners(self._state / "identity" / LAST_OWNERS)

        async def noted(path: Path, data: bytes) -> None:
            await lanes.run("last-term", durable.write, path, data)

        group.create_task(last_term.watch(noted), name="last term")
        group.create_task(last_owners.watch(noted), name="last owners")
        group.create_task(disk.watch(), name="disk")

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            group.create_task(_logged(work))

        tasks = HostTasks(
            host,
            capacity,
            hardware,
            group,
            reserve_bytes=config.reserve_memory_bytes,
        )
        accounts = Ledger(
            (self._state, run),
            host,
            capacity,
            networks,
            images,
            tasks,
            machine,
            Room(0, config.image_free_bytes, config.image_keep_s),
        )
        await stack.enter_async_context(credentials.serving(tasks.find_spec))
        reader = UsageReader(machine.cgroups, tasks, lanes, machine.boottime_s, machine.host_text)
        usage = reader.read
        pressure = Pressure(
            machine.cgroups,
            tasks,
            reader,
            host.starts,
            host.oomd,
            (hardware.cpu.online, machine.boottime_s),
        )
        group.create_task(pressure.watch(), name="pressure")
        group.create_task(units.watch(TASK_UNITS), name="units")
        group.create_task(identities.watch(tasks.to_run), name="identities")
        group.create_task(notices.watch(tasks.records), name="notices")
        return AgentServices(
            tasks=tasks,
            usage=usage,
            metrics=AgentMetrics(tasks, images, prober, machine.cgroups, lanes, usage),
            images=images,
            logs=Logs(machine.processes),
            unit_view=UnitView(machine.processes, lanes, unit),
            events=events,
            contact=host.contact,
            credentials=credentials,
            leaving=leaving,
            sessions=Sessions(host.inside, units, Path(config.run_dir) / "exec"),
            networks=networks,
            notices=notices,
            profile=HostProfile(
                units,
                events,
                Path(config.sidekick),
                sidekick_state,
                hardware.boot_id,
                machine.boottime_s,
            ),
            facts=facts,
            pull=lambda request: self._pull(images, request),
            accounts=accounts,
            volumes=volume_service,
            spawn=spawn,
            renew=self.identity.renew_when_asked,
            uniqueness=uniqueness,
            last_term=last_term,
            last_owners=last_owners,
            domain=self.identity.domain,
        )

    def _name(self) -> str:
        held = self.identity.find()
        return held.machine if held else ""

    async def _adopt(self, services: AgentServices, lanes: Lanes) -> None:
        await services.images.tidy()
        await services.sessions.tidy()
        host = self._host
        replay = await lanes.run("journal", host.journal.replay)
        replay = await rebuild(replay, host.units, host.journal, lanes, services.events)
        specs = {t: record.spec for t, record in replay.tasks.items()}
        services.networks.expect(specs, replay.unreadable)
        await services.tasks.adopt(replay)
        services.spawn(services.networks.adopt())
        services.spawn(services.networks.gates.keep())
        services.spawn(services.profile.adopt())
        services.spawn(services.profile.watch())
        services.spawn(services.accounts.watch())
        services.ready = True
        services.events.add("agent", self._name() or "agent", "ready")
        log.info("ready", extra={"tasks": len(replay.tasks)})

    async def _serve_socket(self, runner: web.AppRunner, stack: AsyncExitStack) -> None:
        path = Path(self.config.socket)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        finally:
            os.umask(before)
        try:
            let_group(path, grp.getgrnam(self.config.socket_group).gr_gid)
        except (KeyError, OSError) as e:
            fields = {"socket": str(path), "why": str(e)}
            log.warning("the socket is for its owner only", extra=fields)
        door = open_admission(runner, listener, None, LOCAL, _http_log)
        await stack.enter_async_context(door)
        stack.callback(path.unlink, missing_ok=True)

    async def _serve_tls_forever(self, runner: web.AppRunner) -> None:
        """Try again where TLS cannot be served: the host's own tools need no TLS (AG4)."""
        while True:
            try:
                await self._serve_tls(runner)
            except TwineError as e:
                log.error("cannot serve TLS", extra={"code": e.code, "why": str(e)})
            except Exception:
                log.exception("serving TLS failed; this is a bug")
            await asyncio.sleep(TLS_RETRY_S)

    async def _serve_tls(self, runner: web.AppRunner) -> None:
        """Open the TCP port once the host has an identity, and keep that identity fresh."""
        while self.identity.find() is None:
            await pause(JOIN_POLL_S)
        host, port = self.config.address()
        tls = self.identity.server_context()
        listener = listen((host, port), _BACKLOG)
        limits = _LIMITS.within(raise_descriptor_limit())
        async with open_admission(runner, listener, tls, limits, _http_log):
            at, own_port = listener.getsockname()[:2]
            log.info("serving", extra={"address": f"{at}:{own_port}"})
            self._uniqueness.served.set()
            await self.identity.renew_forever()

    async def _pull(self, images: HostImages, request: api.ImagePull) -> api.ImageInfo:
        if why := distrust(request.digest, request.trust):
            raise Unprocessable(f"nothing is fetched: {why}", hint=SIGN_HINT)
        if info := images.find(request.digest):
            return info
        held = self.identity.find()
        if held is None:
            raise Unprocessable(
                "cannot pull: this host has joined no control plane",
                hint="put the image instead, or join",
            )
        expected = _FETCH.url(digest=request.digest)
        if request.path not in (expected, f"/v1/images/{request.digest}/stream"):
            raise Unprocessable(f"images are pulled from {expected}, not from {request.path}")
        context: ssl.SSLContext = self.identity.client_context()
        async with WireClient(held.control_plane_url, context) as client:
            chunks = client.stream(_FETCH, digest=request.digest)
            return await images.receive(request.digest, request.format, chunks)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Run work in the background; where it fails, the agent goes on without it."""
    try:
        await work
    except Exception:
        log.exception("a background job failed; this is a bug")


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks end with the block, however it is left."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            raise _Leave
    except* _Leave:
        pass


class _Leave(Exception):
    """Leaves the task group, which cancels what runs in it."""


async def serve(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    from agent.machine.real import real_machine

    agent = Agent(config, real_machine())
    async with agent.running() as services:
        notify("READY=1", f"STATUS={len(services.tasks.all())} tasks")
        await _heartbeat(services, stop)
        notify("STOPPING=1")


async def _heartbeat(services: AgentServices, stop: asyncio.Event) -> None:
    """Tell systemd's watchdog, from the event loop itself, that we are alive, until `stop`."""
    loop = asyncio.get_running_loop()
    every_s = (watchdog_s() or 30.0) / 3
    told = 0
    timer: asyncio.TimerHandle

    def beat() -> None:
        nonlocal told, timer
        timer = loop.call_at(next_round(loop.time(), every_s), beat)
        # Where nothing happened there is nothing new to count, and systemd knows the number.
        changed, told = services.events.latest != told, services.events.latest
        notify("WATCHDOG=1", *([f"STATUS={len(services.tasks.all())} tasks"] if changed else []))

    beat()
    try:
        await stop.wait()
    finally:
        timer.cancel()
