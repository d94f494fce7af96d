"""The process of one shard: scheduler, allocator, dispatcher, switcher and health of its machines.

It has the actors of a whole control plane, and runs those of its shard. It holds no key of the
authority and serves no users: the core authorizes each request and calls the shard.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from agent.api import ImageInfo
from control_plane.agents.polled import PolledAgent, PollPatience
from control_plane.api.machines import MachineRecord
from control_plane.client import ControlPlaneClient
from control_plane.config import Config
from control_plane.front_end.shard_front_end import ShardFrontEnd
from control_plane.identity.from_file import FileIdentity, RevokedHosts
from control_plane.process import boot_id, load_despite_damage, open_store, run_until, version
from control_plane.roles import ControlPlane
from control_plane.runtime.garbage import permanent_heap
from control_plane.runtime.runtime import Runtime
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import OwnRole, RoleLeaders
from control_plane.store import Store
from control_plane.task_control.caller import ControllerCaller
from control_plane.task_control.core.addresses import address_rules
from wire.errors import TwineError
from wire.listen import serving, tcp_socket

log = logging.getLogger(__name__)
_CACHED_S = 5.0
"""Seconds for which the core's images are cached; signatures may be added after an upload."""


async def serve_shard(
    config: Config, role: OwnRole, stopping: asyncio.Event, started: Callable[[str], None]
) -> None:
    """Run a shard until `stopping` is set; `started` is called with the URL it serves at.

    Raises `Busy` if no core has led, `ConfigError` if a setting cannot be used.
    """
    async with AsyncExitStack() as stack:
        identity, runtime = FileIdentity(Path(config.shard_credential), role.name), Runtime()
        store = await open_store(stack, config, role, stopping, runtime)
        if store is None:
            return
        tcp = stack.enter_context(tcp_socket(*config.listen_on()))
        with permanent_heap():
            plane = await load_despite_damage(
                lambda: _load(stack, config, store, role, identity, runtime), [store]
            )
        app = ShardFrontEnd(plane, store, identity.cluster).app(version())
        await stack.enter_async_context(
            serving(app, tcp, identity.server_context(require_client=True), None)
        )
        log.info("serving", extra={"url": role.url, "role": role.name})
        started(role.url)
        await run_until(stopping, plane.wait_failed(), identity.reload_forever())
        log.info("shutting down; tasks continue to run")


async def _load(
    stack: AsyncExitStack,
    config: Config,
    store: Store,
    role: OwnRole,
    identity: FileIdentity,
    runtime: Runtime,
) -> ControlPlane:
    """Make the actors of a shard and load them; it can be called again after a load that failed."""
    tls = identity.agents_context()
    ownership, processes = OwnershipMap(store), RoleLeaders(store, role)
    images = _CachedImages(processes, identity.core_context(), runtime)
    rules = address_rules(config.controller_networks, config.reachable_at())
    patience = PollPatience(config.scheduler.poll_wait_s, config.scheduler.poll_patience_s)

    def agent_client(machine: MachineRecord) -> PolledAgent:
        client = PolledAgent(f"https://{machine.address}", tls, runtime, patience)
        client.expected = f"/host/{machine.machine}"
        client.epoch = ownership.number
        client.headers = lambda: {**processes.headers(), **ownership.headers(machine.machine)}
        return client

    plane = ControlPlane(
        store,
        agent_client,
        runtime,
        config.scheduler,
        images.find,
        portal=config.portal,
        call_controller=ControllerCaller(tls, rules),
        boot_id=boot_id(),
        ownership=ownership,
        processes=processes,
    )
    revoked = RevokedHosts(store, runtime)
    identity.is_void = revoked.people.is_void
    plane.also_follow(revoked)
    await revoked.people.load()
    return await stack.enter_async_context(plane)


class _CachedImages:
    """A cached client of the core's image store."""

    def __init__(self, processes: RoleLeaders, tls: ssl.SSLContext, runtime: Runtime) -> None:
        self._processes, self._tls, self._runtime = processes, tls, runtime
        self._known: dict[str, ImageInfo] = {}
        self._fresh_until = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, digest: str) -> ImageInfo | None:
        """Return the facts of an image, None if the core does not have it."""
        async with self._lock:
            if self._runtime.now() >= self._fresh_until or digest not in self._known:
                try:
                    await self._refresh()
                except TwineError:
                    if digest not in self._known:
                        raise
        return self._known.get(digest)

    async def _refresh(self) -> None:
        async with ControlPlaneClient(self._processes.core_url(), self._tls) as client:
            images = (await client.list_images()).images
        self._known = {image.digest: image for image in images}
        self._fresh_until = self._runtime.now() + _CACHED_S
