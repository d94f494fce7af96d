"""`twine-optimus`: runs best-effort work on lent machines, as a client of the front end."""

from __future__ import annotations

import asyncio
import os
import pwd
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import Annotated

import click
import msgspec
from aiohttp import web
from msgspec import Meta

from agent.api import Ack, Name
from control_plane.api.opportunistic import OPTIMUS_ROUTES, QueuedWork, WorkQueue
from control_plane.autoscaler.daemon import WATCH_HISTORY, client_of
from control_plane.cli.jobfile import read_document
from control_plane.commands import run, until_signal
from control_plane.optimus.service import EVERY_S, Optimus
from control_plane.process import boot_id, open_or_stand_by, run_until
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.runtime import Runtime
from control_plane.store.sqlite import SqliteStore
from wire import listen
from wire import log as logs
from wire.config_file import config_of
from wire.errors import Forbidden
from wire.fairness import Peer
from wire.peers import local_user
from wire.routes import Route
from wire.server import Call, make_app

Share = Annotated[int, Meta(ge=1, le=1_000_000)]


class OptimusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration file of the opportunistic scheduler, in TOML."""

    entitlement: Name
    """The entitlement whose loans it uses, with `machines = 0` and `elastic.borrow`."""
    endpoint: str = "unix:/run/twine/control-plane.sock"
    """The front end: `unix:/PATH` or `https://HOST:PORT`."""
    credential: str = ""
    """File of an owner of the entitlement; not needed on the socket."""
    state: str = "/var/lib/twine-optimus"
    """Folder of its store. A second process with the same folder is a standby."""
    socket: str = "/run/twine/optimus.sock"
    """Where users submit work; its group may use it."""
    shares: dict[str, Share] = {}
    """User → share of the lent machines; 100 for users that are not named."""
    ahead: Annotated[int, Meta(ge=1, le=100_000)] = 50
    """Tasks that ask the region for machines in addition to the running ones."""
    every_s: Annotated[float, Meta(ge=1, le=600)] = EVERY_S


def optimus_config(path: Path) -> OptimusConfig:
    """Return the configuration of a file, or raise `ConfigError` with all its errors."""
    return config_of(read_document(path), OptimusConfig, str(path))


def application(optimus: Optimus) -> web.Application:
    """Return the application of the unix socket: the caller's user owns the work."""

    async def list_work(_: Call) -> WorkQueue:
        return optimus.queue()

    async def submit_work(call: Call) -> QueuedWork:
        return await optimus.submit(call.path["work"], call.body, call.peer.name)

    async def cancel_work(call: Call) -> Ack:
        name, user = call.path["work"], call.peer.name
        queue = optimus.queue()
        known = [one for one in queue.work if one.name == name]
        if name in queue.damaged and user != "root":
            raise Forbidden(f"the record of work {name!r} is damaged: only root may cancel it")
        if known and user not in (known[0].user, "root"):
            raise Forbidden(f"work {name!r} belongs to {known[0].user}")
        await optimus.cancel(name)
        return Ack()

    handlers = {f.__name__: f for f in (list_work, submit_work, cancel_work)}
    version = metadata.version("twine-cluster")
    return make_app("Twine Optimus", OPTIMUS_ROUTES, handlers, _authorize, version=version)


def _authorize(request: web.Request, _: Route) -> Peer:
    """Return the caller by its user's name; the mode of the socket's file restricts callers."""
    user = local_user(request.transport)
    if user is None:
        raise Forbidden("best-effort work is accepted on the unix socket only")
    try:
        name = pwd.getpwuid(user[0]).pw_name
    except KeyError:
        name = str(user[0])
    return Peer(name=name, role="local", is_trusted=user[0] in (0, os.getuid()))


async def serve(config: OptimusConfig, stopping: asyncio.Event) -> None:
    """Run until `stopping` is set, or until the store or a loop fails."""
    runtime = Runtime()
    async with AsyncExitStack() as stack:
        store = SqliteStore(Path(config.state), WATCH_HISTORY)
        if not await open_or_stand_by(stack, store, stopping, runtime):
            return
        anchor = Anchor(store, runtime, boot_id())
        await anchor.load()
        client = await stack.enter_async_context(client_of(config.endpoint, config.credential))
        optimus = Optimus(
            runtime=runtime,
            api=client,
            store=store,
            entitlement=config.entitlement,
            shares=config.shares,
            ahead=config.ahead,
            every_s=config.every_s,
        )
        await optimus.load()
        sock = stack.enter_context(listen.local_socket(Path(config.socket), is_shared=True))
        await stack.enter_async_context(listen.serving(application(optimus), None, None, sock))
        click.echo(f"optimus serves at {config.socket}", err=True)
        loops = (optimus.run(), runtime.watch_clocks(), anchor.run(), store.wait_failed())
        await run_until(stopping, *loops)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster", prog_name="twine-optimus")
@click.option("--config", "file", type=click.Path(path_type=Path), required=True, help="TOML file.")
def main(file: Path) -> None:
    """Run queued best-effort work on the machines that are lent to one entitlement."""
    logs.configure("twine-optimus", "info")
    run(until_signal(lambda stopping: serve(optimus_config(file), stopping)))


if __name__ == "__main__":
    main()
