"""`twine-control-plane`: starts the parts of the control plane in order, serves, and stops them.

Start: stores (sole ownership), authority, sockets, images, control plane, front end. Shutdown is
the reverse: it closes connections and files. Tasks continue to run.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from control_plane import config as configuration
from control_plane.commands import CONFIG, STATE, configured, fail, run, until_signal
from control_plane.config import Config
from control_plane.copy_commands import backup, forget_store, migrate_store, restore_store
from control_plane.credential_commands import (
    controller,
    front_end_credential,
    shard_credential,
    user,
)
from control_plane.process import make_folder, open_store, run_until, url_of
from wire import log as logs
from wire.errors import TwineError
from wire.notify import notify

if TYPE_CHECKING:
    from control_plane.shards.processes import OwnRole
    from control_plane.store import Store

log = logging.getLogger(__name__)

Started = Callable[[str], None]


async def serve(config: Config, stopping: asyncio.Event, started: Started) -> None:
    """Run the control plane until `stopping` is set; calls `started` with its URL.

    Raises `Busy` if another process owns the state, `ConfigError` if a setting cannot be used.
    """
    # All modules are imported here, so that a standby takes over at once.
    from control_plane.assembly import Assembly, ProcessParts
    from control_plane.identity.authority import OwnIdentity, open_authority
    from control_plane.identity.lost_authority import refuse_if_lost
    from control_plane.runtime.runtime import Runtime
    from control_plane.store.opening import check_no_shard_leads
    from wire.listen import serving

    async with AsyncExitStack() as stack:
        role, runtime = _role_of(config), Runtime()
        store = await open_store(stack, config, role, stopping, runtime)
        if store is None:
            return
        if config.etcd.endpoints:
            notify("STATUS=leads, loading")
        if role.name == "all":
            await check_no_shard_leads(store)
        broker_stores = await _open_broker_stores(stack, config, store)
        await refuse_if_lost(store, config.authority_path)
        authority = open_authority(
            config.authority_path,
            config.cluster,
            leaf_life_s=config.leaf_life_s,
            task_leaf_life_s=config.task_leaf_life_s,
        )
        tcp, local = _sockets(stack, config)
        url = url_of(config.reachable_at()[0], tcp.getsockname()[1])
        identity = OwnIdentity(authority, config.reachable_at())
        parts = ProcessParts(config, store, broker_stores, role, authority, identity, url, runtime)
        control_plane, app, rotation = await Assembly(parts).build(stack)
        tls, is_void = identity.server_context(), lambda *holder: identity.is_void(*holder)
        await stack.enter_async_context(serving(app, tcp, tls, local, is_void=is_void))
        log.info("serving", extra={"url": url, "socket": config.socket})
        started(url)
        ends = identity.end_connections_forever(control_plane.disconnect)
        loops = control_plane.wait_failed(), identity.renew_forever(), ends, rotation.run()
        await run_until(stopping, *loops)
        log.info("shutting down; tasks continue to run")


def _sockets(stack: AsyncExitStack, config: Config) -> tuple[socket.socket, socket.socket]:
    """Return the TCP socket for hosts and users, and the unix socket for this host's operators."""
    from wire.listen import tcp_socket, unix_socket

    tcp = stack.enter_context(tcp_socket(*config.listen_on()))
    local = stack.enter_context(unix_socket(Path(config.socket), config.socket_group))
    stack.callback(Path(config.socket).unlink, missing_ok=True)
    return tcp, local


async def _open_broker_stores(
    stack: AsyncExitStack, config: Config, main: Store
) -> dict[str, Store]:
    """Return the stores of data centers with a separate store, after checking whose they are."""
    from control_plane.broker.stores import OwnStore, claim
    from control_plane.store.sqlite import SqliteStore

    own: dict[str, OwnStore] = {}
    for datacenter, folder in config.broker_stores.items():
        make_folder(Path(folder), f"folder of broker_stores.{datacenter},")
        store = await stack.enter_async_context(SqliteStore(Path(folder)))
        own[datacenter] = OwnStore(store, folder)
    await claim(main, own)
    return {datacenter: found.store for datacenter, found in own.items()}


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
        notify("READY=1", f"STATUS=serving at {url}")
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
@configured
def check_store(config: Config, aside: str | None, forget: str | None) -> None:
    """List stored records that cannot be used; the control plane is stopped.

    The control plane sets them aside at its start. The exit code is 2 while there are any.
    """
    from control_plane.check_store import check

    run(check(config, aside, forget))


@main.command("new-authority")
@click.confirmation_option(
    "--yes",
    prompt=(
        "Every host has to join again, and every credential has to be created again. Continue?"
    ),
)
@configured
def new_authority(config: Config) -> None:
    """Create a new authority after the loss of its key; the control plane is stopped."""
    from control_plane.new_authority import prepare_new_authority

    run(prepare_new_authority(config))


_STORES = (backup, restore_store, migrate_store, forget_store)
_CREDENTIALS = (user, controller, shard_credential, front_end_credential)
for command in (*_STORES, *_CREDENTIALS):
    main.add_command(command)

if __name__ == "__main__":
    main()
