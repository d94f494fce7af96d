"""`twine-control-plane`: starts the parts of the control plane in order, serves, and stops them.

Start: stores (sole ownership), authority, sockets, images, control plane, front end. Shutdown is
the reverse: it closes connections and files. Tasks continue to run.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from control_plane import config as configuration
from control_plane.commands import CONFIG, STATE, fail, run, until_signal
from control_plane.config import Config
from control_plane.copy_commands import backup, forget_store, migrate_store, restore_store
from control_plane.credential_commands import (
    controller,
    front_end_credential,
    shard_credential,
    user,
)
from control_plane.notify import notify, standing_by
from control_plane.process import (
    before,
    boot_id,
    despite_damage,
    make_folder,
    until,
    url_of,
    version,
)
from wire import log as logs
from wire.errors import TwineError

if TYPE_CHECKING:
    from aiohttp import web

    from agent.api.presence import Presence
    from control_plane.api.machines import MachineRecord
    from control_plane.api.people import IssuedCredential
    from control_plane.identity.authority import CertificateAuthority, OwnIdentity
    from control_plane.identity.rotation import Rotation
    from control_plane.roles import ControlPlane
    from control_plane.runtime.runtime import Runtime
    from control_plane.shards.processes import OwnRole
    from control_plane.store import Store

log = logging.getLogger(__name__)

_ROOMS = ("roles", "front_end.frontend", "identity.registrar", "task_control.caller", "web.serving")
"""Modules that import all others, which takes a second."""
_ROLES = ("all", "core", "shard", "front-end")
Started = Callable[[str], None]


async def serve(config: Config, stopping: asyncio.Event, started: Started) -> None:
    """Run the control plane until `stopping` is set; calls `started` with its URL.

    Raises `Busy` if another process owns the state, `ConfigError` if a setting cannot be used.
    """
    from control_plane.front_end.listen import serving, tcp_socket, unix_socket
    from control_plane.identity.authority import OwnIdentity, open_authority
    from control_plane.identity.loss import refuse_if_lost
    from control_plane.runtime.runtime import Runtime
    from control_plane.store.opening import check_alone, main_store

    async with AsyncExitStack() as stack:
        make_folder(config.state_path, "state folder")
        role = _role_of(config)
        for room in _ROOMS:  # imported in advance, so that a standby takes over at once
            importlib.import_module(f"control_plane.{room}")
        opened = main_store(config, standing_by, role.lock, role.announced)
        opening = asyncio.ensure_future(stack.enter_async_context(opened))
        runtime = Runtime()
        if not await before(stopping, opening, runtime):
            return
        store = opening.result()
        if config.etcd.endpoints:
            notify("STATUS=leads, loading")
        if role.name == "all":
            await check_alone(store)
        broker_stores = await _open_broker_stores(stack, config, store)
        await refuse_if_lost(store, config.authority_path)
        authority = open_authority(
            config.authority_path,
            config.cluster,
            leaf_life_s=config.leaf_life_s,
            task_leaf_life_s=config.task_leaf_life_s,
        )
        tcp = stack.enter_context(tcp_socket(*config.listen_on()))
        local = stack.enter_context(unix_socket(Path(config.socket), config.socket_group))
        stack.callback(Path(config.socket).unlink, missing_ok=True)
        url = url_of(config.reachable_at()[0], tcp.getsockname()[1])
        identity = OwnIdentity(authority, config.reachable_at())
        control_plane, app, rotation = await _build(
            stack, config, (store, role), broker_stores, (authority, identity), url, runtime
        )
        servers = serving(
            app,
            tcp,
            identity.server_context(),
            local,
            is_void=lambda *of: identity.is_void(*of),
        )
        await stack.enter_async_context(servers)
        log.info("serving", extra={"url": url, "socket": config.socket})
        started(url)
        ends = identity.end_connections_forever(control_plane.disconnect)
        loops = control_plane.wait_failed(), identity.renew_forever(), ends, rotation.run()
        await until(stopping, *loops)
        log.info("shutting down; tasks continue to run")


async def _open_broker_stores(
    stack: AsyncExitStack, config: Config, main: Store
) -> dict[str, Store]:
    """Return the stores of data centers that have one of their own, after verifying them."""
    from control_plane.broker.stores import OwnStore, claim
    from control_plane.store.sqlite import SqliteStore

    own: dict[str, OwnStore] = {}
    for datacenter, folder in config.broker_stores.items():
        make_folder(Path(folder), f"folder of broker_stores.{datacenter},")
        store = await stack.enter_async_context(SqliteStore(Path(folder)))
        own[datacenter] = OwnStore(store, folder)
    await claim(main, own)
    return {datacenter: found.store for datacenter, found in own.items()}


async def _build(
    stack: AsyncExitStack,
    config: Config,
    opened: tuple[Store, OwnRole],
    broker_stores: Mapping[str, Store],
    trust: tuple[CertificateAuthority, OwnIdentity],
    url: str,
    runtime: Runtime,
) -> tuple[ControlPlane, web.Application, Rotation]:
    """Return the running control plane, its front end, and its authority's rotation."""
    from control_plane.agents.polled import PolledAgent, PollPatience
    from control_plane.api.routes import ROUTES
    from control_plane.front_end.access import Access
    from control_plane.front_end.frontend import FrontEnd
    from control_plane.front_end.trail import Trail
    from control_plane.identity.issued import FOLDER
    from control_plane.identity.issued import read as read_issued
    from control_plane.identity.people import People
    from control_plane.identity.registrar import Registrar
    from control_plane.images.store import ImageStore
    from control_plane.roles import ControlPlane
    from control_plane.runtime.garbage import heap_that_stays
    from control_plane.shards.ownership import OwnershipMap
    from control_plane.shards.processes import CORE, RoleLeaders
    from control_plane.store.opening import OwnTerm
    from control_plane.task_control.caller import ControllerCaller
    from control_plane.task_control.core.addresses import rules_of
    from control_plane.web.services import ServiceReader
    from control_plane.web.serving import Console

    authority, identity = trust
    store, role = opened
    processes = RoleLeaders(store, role) if role.name == CORE else None
    settings = config.scheduler
    patience = PollPatience(settings.poll_wait_s, settings.poll_patience_s)

    context, ownership = identity.agents_context(), OwnershipMap(store)
    own_term = OwnTerm(store)

    def term() -> Mapping[str, str]:
        return processes.headers() if processes is not None else own_term.headers()

    rules = rules_of(config.controller_networks, config.reachable_at())

    def agent_client(machine: MachineRecord) -> PolledAgent:
        client = PolledAgent(
            f"https://{machine.address}",
            context,
            runtime,
            patience,
        )
        client.expected = f"/host/{machine.machine}"
        client.epoch = ownership.number
        client.headers = lambda: {**term(), **ownership.headers(machine.machine)}
        return client

    def identity_client(machine: str) -> PolledAgent:
        """Return a client for calls that need no owner: another process may own the machine."""
        client = agent_client(control_plane.inventory.get(machine).record)
        client.headers = term
        return client

    most, of_owner = config.image_max_bytes, config.images_of_owner_max_bytes
    images = ImageStore(config.state_path / "images", time.time, most, of_owner)
    people = People(store, runtime, config.operators, config.portal.approvers)
    trail = Trail(store, runtime, config.audit_entries)

    async def load() -> ControlPlane:
        nonlocal ownership, processes
        ownership = OwnershipMap(store)
        processes = RoleLeaders(store, role) if processes is not None else None
        await people.load()
        await trail.load()
        return await stack.enter_async_context(
            ControlPlane(
                store,
                agent_client,
                runtime,
                config.scheduler,
                images.find,
                portal=config.portal,
                broker_stores=broker_stores,
                call_controller=ControllerCaller(context, rules),
                boot_id=boot_id(),
                ownership=ownership,
                processes=processes,
            )
        )

    with heap_that_stays():
        control_plane = await despite_damage(load, [store, *broker_stores.values()])
    registrar = Registrar(store, authority, control_plane, url, runtime, config.reachable_at())

    async def have_renewed(machine: str) -> None:
        async with identity_client(machine) as client:
            await client.renew_identity()

    rotation = registrar.rotation
    await rotation.load()
    rotation.file, rotation.taken = config.authority_path, identity.renew
    rotation.hosts, rotation.ask = control_plane.inventory.joined, have_renewed
    identity.is_void = people.is_void
    control_plane.identity_ends = identity.ends

    async def issued() -> list[IssuedCredential]:
        return await runtime.offload(read_issued, config.state_path / FOLDER, time.time())

    def ending() -> list[str]:
        return control_plane.inventory.known(identity.ending())

    rotation.issued = issued

    async def presence_of(machine: str) -> Presence:
        async with identity_client(machine) as client:
            return await client.get_presence()

    duplicates = registrar.duplicates
    await duplicates.load()
    duplicates.ask, duplicates.audit = presence_of, trail.record_clone
    duplicates.disconnect, control_plane.duplicates = control_plane.disconnect, duplicates.known
    shard_tls = identity.agents_context() if processes is not None else None
    front_end = FrontEnd(control_plane, registrar, images, people, trail, issued, ending, shard_tls)
    access = Access(os.getuid(), config.socket_group, config.cluster)
    front_end.store_failure = store.failure
    app = front_end.app(access, version())
    if config.web != "off":
        services = ServiceReader(config.autoscaler, config.conveyor, config.conveyor_credential)
        writes = config.web == "full"
        Console(front_end, ROUTES, store.revision, services=services, writes=writes).add_to(app)
    return control_plane, app, rotation


def _role_of(config: Config) -> OwnRole:
    from control_plane.shards.processes import OwnRole

    host, port = config.reachable_at()[0], config.listen_on()[1]
    name = f"shard-{config.shard}" if config.role == "shard" else config.role
    return OwnRole(
        name=name,
        shard=config.shard if config.role == "shard" else None,
        url=url_of(host, port),
        shards=config.scheduler.shards,
    )


async def _serve_role(config: Config, stopping: asyncio.Event) -> None:
    def started(url: str) -> None:
        notify(f"READY=1\nSTATUS=serving at {url}")
        where = "" if config.role in ("shard", "front-end") else f" and {config.socket}"
        click.echo(f"serving at {url}{where}", err=True)

    try:
        if config.role == "shard":
            from control_plane.shard_daemon import serve_shard

            await serve_shard(config, _role_of(config), stopping, started)
        elif config.role == "front-end":
            from control_plane.front_end_daemon import serve_front_end

            await serve_front_end(config, stopping, started)
        else:
            await serve(config, stopping, started)
    finally:
        notify("STOPPING=1")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster")
def main() -> None:
    """The control plane of a region."""


@main.command("serve")
@CONFIG
@STATE
@click.option("--listen", metavar="HOST:PORT", help="For hosts and users, with TLS.")
@click.option(
    "--advertise", metavar="HOST", multiple=True, help="Address at which they reach it; repeat."
)
@click.option("--socket", "socket_", metavar="PATH", help="Unix socket for this host's operators.")
@click.option(
    "--role", type=click.Choice(["all", "core", "shard", "front-end"]), help="See docs/scale.md."
)
@click.option("--shard", type=int, metavar="N", help="Number of the shard, with --role shard.")
@click.option("--cluster", metavar="NAME", help="Trust domain of all certificates.")
@click.option(
    "--down-after",
    "--down-after-s",
    metavar="DURATION",
    help="Silence after which a machine is down.",
)
def serve_command(
    file: Path | None, socket_: str | None, down_after: str | None, **given: Any
) -> None:
    """Run the control plane; SIGTERM ends it, and all tasks continue to run."""
    try:
        config = configuration.load(file, {**given, "socket": socket_})
        if down_after is not None:
            config = configuration.with_down_after(config, down_after)
        config.listen_on()
        logs.configure("twine-control-plane", config.log_level)
    except TwineError as e:
        fail(e)
        return
    run(until_signal(partial(_serve_role, config)))


@main.command("check-store")
@click.option("--quarantine", "aside", metavar="NAME", help="Set this record aside.")
@click.option("--forget", metavar="NAME", help="Permanently remove a record that was set aside.")
@CONFIG
@STATE
def check_store(aside: str | None, forget: str | None, **given: Any) -> None:
    """List stored records that cannot be used; the control plane is stopped.

    The control plane sets them aside at its start. The exit code is 2 while there are any.
    """
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
    except TwineError as e:
        fail(e)
        return
    from control_plane.check_store import check

    run(check(config, aside, forget))


@main.command("new-authority")
@click.confirmation_option(
    "--yes",
    prompt=(
        "Every host has to join again, and every credential has to be created again. Continue?"
    ),
)
@CONFIG
@STATE
def new_authority(**given: Any) -> None:
    """Create a new authority after the loss of its key; the control plane is stopped."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
    except TwineError as e:
        fail(e)
        return
    from control_plane.new_authority import begin

    run(begin(config))


main.add_command(backup)
main.add_command(restore_store)
for command in (migrate_store, forget_store, user, controller):
    main.add_command(command)
for command in (shard_credential, front_end_credential):
    main.add_command(command)

if __name__ == "__main__":
    main()
