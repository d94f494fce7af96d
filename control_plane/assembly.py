"""Makes the control plane of a process, with its users, images, identities and front end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiohttp import web

from agent.api.presence import Presence
from control_plane.agents.polled import PolledAgent, PollPatience
from control_plane.api.machines import MachineRecord
from control_plane.api.people import IssuedCredential
from control_plane.api.routes import ROUTES
from control_plane.config import Config
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.identity.authority import CertificateAuthority, OwnIdentity
from control_plane.identity.issued import FOLDER, read_issued
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.identity.rotation import Rotation
from control_plane.images.store import ImageStore
from control_plane.process import boot_id, load_despite_damage, version
from control_plane.roles import ControlPlane
from control_plane.runtime.garbage import permanent_heap
from control_plane.runtime.runtime import Runtime
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import CORE, OwnRole, RoleLeaders
from control_plane.store import Store
from control_plane.store.opening import OwnTerm
from control_plane.task_control.caller import ControllerCaller
from control_plane.task_control.core.addresses import address_rules
from control_plane.web.services import ServiceReader
from control_plane.web.serving import Console


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """The inputs of an `Assembly`: configuration, open stores, and the identity of the process."""

    config: Config
    store: Store
    broker_stores: Mapping[str, Store]
    role: OwnRole
    authority: CertificateAuthority
    identity: OwnIdentity
    url: str
    runtime: Runtime


class Assembly:
    """Connects the control plane of one process."""

    def __init__(self, parts: ProcessParts) -> None:
        self._parts = parts
        self._store, self._runtime, self._config = parts.store, parts.runtime, parts.config
        self._term = OwnTerm(parts.store)
        self._context = parts.identity.agents_context()
        config = parts.config
        self._images = ImageStore(
            config.state_path / "images",
            time.time,
            config.image_max_bytes,
            config.images_of_owner_max_bytes,
        )
        approvers = config.portal.approvers
        self._people = People(parts.store, parts.runtime, config.operators, approvers)
        self._trail = Trail(parts.store, parts.runtime, config.audit_entries)

    async def build(self, stack: AsyncExitStack) -> tuple[ControlPlane, web.Application, Rotation]:
        """Return the running control plane, its front end, and its authority's rotation."""
        parts = self._parts
        with permanent_heap():
            self._plane = await load_despite_damage(
                lambda: self._load(stack), [parts.store, *parts.broker_stores.values()]
            )
        registrar = Registrar(
            parts.store,
            parts.authority,
            self._plane,
            parts.url,
            parts.runtime,
            self._config.reachable_at(),
        )
        await self._connect_identities(registrar)
        return self._plane, self._front_end(registrar), registrar.rotation

    async def _load(self, stack: AsyncExitStack) -> ControlPlane:
        """Load everything; it can be called again after a load that failed."""
        self._ownership = OwnershipMap(self._store)
        is_core = self._parts.role.name == CORE
        self._processes = RoleLeaders(self._store, self._parts.role) if is_core else None
        await self._people.load()
        await self._trail.load()
        config = self._config
        rules = address_rules(config.controller_networks, config.reachable_at())
        return await stack.enter_async_context(
            ControlPlane(
                self._store,
                self._agent_client,
                self._runtime,
                config.scheduler,
                self._images.find,
                portal=config.portal,
                broker_stores=self._parts.broker_stores,
                call_controller=ControllerCaller(self._context, rules),
                boot_id=boot_id(),
                ownership=self._ownership,
                processes=self._processes,
            )
        )

    # -- clients of agents

    def _agent_client(self, machine: MachineRecord) -> PolledAgent:
        settings = self._config.scheduler
        client = PolledAgent(
            f"https://{machine.address}",
            self._context,
            self._runtime,
            PollPatience(settings.poll_wait_s, settings.poll_patience_s),
        )
        client.expected = f"/host/{machine.machine}"
        client.epoch = self._ownership.number
        client.headers = lambda: {
            **self._term_headers(),
            **self._ownership.headers(machine.machine),
        }
        return client

    def _identity_client(self, machine: str) -> PolledAgent:
        """Return a client for calls about identities: another process may own the machine."""
        client = self._agent_client(self._plane.inventory.get(machine).record)
        client.headers = self._term_headers
        return client

    def _term_headers(self) -> Mapping[str, str]:
        return (self._processes or self._term).headers()

    async def _ask_to_renew(self, machine: str) -> None:
        async with self._identity_client(machine) as client:
            await client.renew_identity()

    async def _ask_presence(self, machine: str) -> Presence:
        async with self._identity_client(machine) as client:
            return await client.get_presence()

    # -- identities and the front end

    async def _connect_identities(self, registrar: Registrar) -> None:
        """Connect the rotation of the authority, and the checks for clones, to other services."""
        plane, identity, rotation = self._plane, self._parts.identity, registrar.rotation
        await rotation.load()
        rotation.file, rotation.on_step = self._config.authority_path, identity.renew
        rotation.hosts, rotation.ask = plane.inventory.joined, self._ask_to_renew
        rotation.issued = self._issued
        identity.is_void = self._people.is_void
        plane.identity_ends = identity.ends
        duplicates = registrar.duplicates
        await duplicates.load()
        duplicates.ask, duplicates.audit = self._ask_presence, self._trail.record_clone
        duplicates.disconnect, plane.duplicates = plane.disconnect, duplicates.known

    async def _issued(self) -> list[IssuedCredential]:
        folder = self._config.state_path / FOLDER
        return await self._runtime.offload(read_issued, folder, time.time())

    def _ending_identities(self) -> list[str]:
        return self._plane.inventory.known(self._parts.identity.ending())

    def _front_end(self, registrar: Registrar) -> web.Application:
        identity, config = self._parts.identity, self._config
        front_end = FrontEnd(
            self._plane,
            registrar,
            self._images,
            self._people,
            self._trail,
            self._issued,
            self._ending_identities,
            identity.agents_context() if self._processes is not None else None,
        )
        front_end.store_failure = self._store.failure
        access = Access(os.getuid(), config.socket_group, config.cluster)
        app = front_end.app(access, version())
        if config.web != "off":
            services = ServiceReader(config.autoscaler, config.conveyor, config.conveyor_credential)
            writes, revision = config.web == "full", self._store.revision
            Console(front_end, ROUTES, revision, services=services, writes=writes).add_to(app)
        return app
