"""The agent as a process: its lock, its servers and its watchdog. `composition` creates its parts.

Start: lock → unix socket → journal → adopt running tasks → READY → TLS, once the host has joined.
Stopping the agent does not affect running tasks.
"""

from __future__ import annotations

import asyncio
import fcntl
import grp
import logging
import os
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from aiohttp import web

from agent import api
from agent.api.signing import SIGN_HINT, distrust
from agent.composition import HostParts
from agent.config import AgentConfig
from agent.host.reserved_port import listen
from agent.identity.identity import HostIdentity
from agent.images.images import HostImages
from agent.machine import HostAccess
from agent.machine.acl import allow_group
from agent.machine.notify import watchdog_s
from agent.routes import JOIN_ROUTES
from agent.runtime.crashpoints import arm_from_environment
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import next_round, pause
from agent.server import application
from agent.services import AgentServices
from wire.admission import ConnectionAdmission
from wire.client import WireClient
from wire.errors import Busy, ConfigError, HostError, NotBtrfs, TwineError, Unprocessable
from wire.limits import LOCAL, ConnectionLimits, raise_descriptor_limit
from wire.listen import BACKLOG, local_socket
from wire.notify import WATCHDOG, notify
from wire.server import http_log

log = logging.getLogger(__name__)

_http_log = http_log(__name__)
_LIMITS = ConnectionLimits(connections=512, pending=128, unproved_per_address=64, per_peer=384)
"""Only the control plane calls an agent over TCP, and an agent must use little memory."""
TLS_RETRY_S = 10.0
_SERVICE = "twine-agent.service"
JOIN_POLL_S = 5.0
"""The TLS port opens at most this long after `twine-agent join`; aligned with other checks."""
_FETCH = next(r for r in JOIN_ROUTES if r.name == "fetch_image")


class Agent:
    """One agent on one machine, real or in memory."""

    def __init__(self, config: AgentConfig, machine: HostAccess) -> None:
        """Do nothing until `running` is entered."""
        self.config = config
        self._machine = machine
        self._state = Path(config.state_dir)
        self.identity = HostIdentity(self._state / "identity")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AgentServices]:
        """Adopt the running tasks and serve; leaving the block stops the agent, not the tasks."""
        async with AsyncExitStack() as stack:
            self._lock(stack)
            arm_from_environment(self.config.crash_points)
            lanes = Lanes()
            stack.callback(lanes.close)
            await self._require_btrfs(lanes)
            self._lock_state(stack)
            hardware = await lanes.run("facts", self._machine.hardware)
            parts = HostParts(self.config, self._machine, hardware, self.identity, lanes)
            stack.push_async_callback(parts.prober.close)
            group = await stack.enter_async_context(_cancelled_at_exit())
            stack.callback(parts.units.listen())
            services = parts.services(group, lambda ask: self._pull(parts.images, ask))
            find_spec = services.tasks.find_spec
            await stack.enter_async_context(parts.credentials.serving(find_spec))
            app = application(services, self.config.socket_group)
            runner = web.AppRunner(
                app, handle_signals=False, shutdown_timeout=2.0, logger=_http_log
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.callback(services.events.close)
            await self._serve_socket(runner, stack)
            await _adopt(services, parts)
            tls = self._serve_tls_forever(runner, parts)
            group.create_task(tls, name="tls")
            group.create_task(parts.clones.watch(), name="clone check")
            yield services

    def _lock(self, stack: AsyncExitStack) -> None:
        run = Path(self.config.run_dir)
        with _usable_path("run_dir", run):
            run.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run / "agent.lock").open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise Busy(
                f"another agent runs on this host (it holds {run / 'agent.lock'})",
                hint="systemctl status twine-agent",
            ) from e

    def _lock_state(self, stack: AsyncExitStack) -> None:
        """Raise `Busy` if an agent with another run folder uses the same state.

        The folder itself is locked, which also works on a read-only disk.
        """
        try:
            fd = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise Busy(
                f"another agent uses the state folder {self._state}",
                hint="stop it, or give this agent its own state_dir and run_dir",
            ) from e
        except OSError as e:  # `StateDisk` reports a failing disk
            log.warning("cannot lock the state folder", extra={"why": e.strerror})

    async def _require_btrfs(self, lanes: Lanes) -> None:
        """Raise `ConfigError` on a file system other than btrfs, which images need (F-38)."""
        with _usable_path("state_dir", self._state):
            self._state.mkdir(parents=True, exist_ok=True)
        try:
            await lanes.run("btrfs", self._machine.btrfs.containing_subvolume, self._state)
        except NotBtrfs as e:
            raise ConfigError(
                f"{self._state} is not on a btrfs file system",
                hint=f"is it mounted? create one with mkfs.btrfs and mount it at {self._state}",
            ) from e
        except TwineError as e:  # `StateDisk` reports a failing disk
            log.warning("cannot read the state folder", extra={"why": str(e)})

    async def _serve_socket(self, runner: web.AppRunner, stack: AsyncExitStack) -> None:
        path = Path(self.config.socket)
        with _usable_path("socket", path):
            listener = stack.enter_context(local_socket(path))
        try:
            allow_group(path, grp.getgrnam(self.config.socket_group).gr_gid)
        except (KeyError, OSError) as e:
            fields = {"socket": str(path), "why": str(e)}
            log.warning(
                "only the owner of the socket may use it: its group could not be set", extra=fields
            )
        admission = ConnectionAdmission(runner, listener, None, LOCAL, _http_log)
        await stack.enter_async_context(admission)

    async def _serve_tls_forever(self, runner: web.AppRunner, parts: HostParts) -> None:
        """Serve TLS and try again after a failure; tools on the host do not need TLS (AG4)."""
        while True:
            try:
                await self._serve_tls(runner, parts)
            except TwineError as e:
                log.error("cannot serve TLS", extra={"code": e.code, "why": str(e)})
            except Exception:
                log.exception("serving TLS failed; this is a bug")
            await asyncio.sleep(TLS_RETRY_S)

    async def _serve_tls(self, runner: web.AppRunner, parts: HostParts) -> None:
        """Open the TCP port once the host has an identity, and renew that identity."""
        while parts.disk.is_hung or self.identity.find() is None:
            await pause(JOIN_POLL_S)
        host, port = self.config.address()
        tls = self.identity.server_context()
        listener = listen((host, port), BACKLOG)
        limits = _LIMITS.within(raise_descriptor_limit())
        async with ConnectionAdmission(runner, listener, tls, limits, _http_log):
            at, own_port = listener.getsockname()[:2]
            log.info("serving", extra={"address": f"{at}:{own_port}"})
            parts.clones.served.set()
            await self.identity.renew_forever()

    async def _pull(self, images: HostImages, request: api.ImagePull) -> api.ImageInfo:
        if why := distrust(request.digest, request.trust):
            raise Unprocessable(f"image pulls are off: {why}", hint=SIGN_HINT)
        if info := await images.find_and_touch(request.digest):
            return info
        held = self.identity.find()
        if held is None:
            raise Unprocessable(
                "cannot pull: this host has joined no control plane",
                hint="put the image instead, or join a control plane",
            )
        expected = _FETCH.url(digest=request.digest)
        if request.path not in (expected, f"/v1/images/{request.digest}/stream"):
            raise Unprocessable(f"images are pulled from {expected}, not from {request.path}")
        context: ssl.SSLContext = self.identity.client_context()
        async with WireClient(held.control_plane_url, context) as client:
            chunks = client.stream(_FETCH, digest=request.digest)
            return await images.receive(request.digest, request.format, chunks)


async def _adopt(services: AgentServices, parts: HostParts) -> None:
    """Adopt the tasks and objects on the host, then mark the services as ready."""
    await services.images.tidy()
    await services.sessions.tidy()
    replay = await parts.context.storage.replay(parts.units, parts.events)
    specs = {t: record.spec for t, record in replay.tasks.items()}
    services.networks.expect(specs, replay.unreadable)
    await services.tasks.adopt(replay)
    services.spawn(services.networks.adopt())
    services.spawn(services.networks.gates.watch())
    services.spawn(services.profile.adopt())
    services.spawn(services.profile.watch())
    services.spawn(services.accounts.watch())
    services.spawn(_forget_restarts(parts))
    services.ready = True
    services.events.add("agent", parts.name() or "agent", "ready")
    log.info("ready", extra={"tasks": len(replay.tasks)})


async def _forget_restarts(parts: HostParts) -> None:
    """Reset systemd's count of restarts: this agent has started successfully."""
    try:
        await parts.units.forget_restarts(_SERVICE)
    except TwineError as e:
        log.warning("systemd still counts restarts of the agent", extra={"why": str(e)})


@contextmanager
def _usable_path(setting: str, path: Path) -> Iterator[None]:
    """Raise `HostError` if a path of the configuration cannot be used."""
    try:
        yield
    except (OSError, ValueError, ConfigError) as e:
        cause = e.__cause__ or e
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise HostError(
            f"{setting} = {str(path)!r} cannot be used: {why}",
            hint="correct it; `twine-agent config show --origin` shows where it is set",
        ) from e


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """Return a task group whose tasks are cancelled when the block ends for any reason."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            raise _CancelTasks
    except* _CancelTasks:
        pass


class _CancelTasks(Exception):
    """Leaves the task group, which cancels its tasks."""


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
    """Notify systemd's watchdog from the event loop until `stop` is set."""
    loop = asyncio.get_running_loop()
    every_s = (watchdog_s() or 30.0) / 3
    reported = 0
    timer: asyncio.TimerHandle

    def beat() -> None:
        nonlocal reported, timer
        timer = loop.call_at(next_round(loop.time(), every_s), beat)
        # Without a new event the number of tasks has not changed.
        changed, reported = services.events.latest != reported, services.events.latest
        notify(WATCHDOG, *([f"STATUS={len(services.tasks.all())} tasks"] if changed else []))

    beat()
    try:
        await stop.wait()
    finally:
        timer.cancel()
