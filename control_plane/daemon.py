"""`twine-control-plane`: builds everything, serves, and ends in order.

Start: stores (sole ownership), authority, sockets, images, control plane, front end. The end
is the reverse; it closes connections and files and touches no task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from control_plane import config as configuration
from control_plane.commands import CONFIG, STATE, fail, run
from control_plane.config import Config
from control_plane.copy_commands import backup, restore_store
from control_plane.notify import notify, standing_by
from wire import log as logs
from wire.errors import ConfigError, InvalidInput, TwineError
from wire.options import seconds

if TYPE_CHECKING:
    from aiohttp import web

    from agent.api.presence import Presence
    from control_plane.api.machines import MachineRecord
    from control_plane.api.people import IssuedCredential
    from control_plane.identity.authority import CertificateAuthority, OwnIdentity
    from control_plane.identity.rotation import Rotation
    from control_plane.roles import ControlPlane
    from control_plane.store import Store

log = logging.getLogger(__name__)

USER_LIFE_MAX_S = 90 * 86_400.0
Started = Callable[[str], None]


async def serve(config: Config, stopping: asyncio.Event, started: Started) -> None:
    """Run the control plane until `stopping` is set; `started` is told the URL it serves at.

    Raises `Busy` if another process owns the state, `ConfigError` if something that was
    configured cannot be used.
    """
    from control_plane.front_end.listen import serving, tcp_socket, unix_socket
    from control_plane.identity.authority import OwnIdentity, open_authority
    from control_plane.identity.loss import refuse_if_lost
    from control_plane.store.opening import main_store

    async with AsyncExitStack() as stack:
        _make_folder(config.state_path, "state folder")
        opening = asyncio.ensure_future(stack.enter_async_context(main_store(config, standing_by)))
        if not await _before(stopping, opening):
            return
        store = opening.result()
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
            stack, config, store, broker_stores, (authority, identity), url
        )
        doors = serving(
            app, tcp, identity.server_context(), local, is_void=lambda *who: identity.is_void(*who)
        )
        await stack.enter_async_context(doors)
        log.info("serving", extra={"url": url, "socket": config.socket})
        started(url)
        ends = identity.end_connections_forever(control_plane.disconnect)
        loops = control_plane.wait_failed(), identity.renew_forever(), ends, rotation.run()
        await _until(stopping, *loops)
        log.info("ending; tasks go on")


async def _open_broker_stores(
    stack: AsyncExitStack, config: Config, main: Store
) -> dict[str, Store]:
    """Return the stores of data centers that have one of their own, once they are known to be."""
    from control_plane.broker.stores import OwnStore, claim
    from control_plane.store.sqlite import SqliteStore

    own: dict[str, OwnStore] = {}
    for datacenter, folder in config.broker_stores.items():
        _make_folder(Path(folder), f"folder of broker_stores.{datacenter},")
        store = await stack.enter_async_context(SqliteStore(Path(folder)))
        own[datacenter] = OwnStore(store, folder)
    await claim(main, own)
    return {datacenter: found.store for datacenter, found in own.items()}


async def _build(
    stack: AsyncExitStack,
    config: Config,
    store: Store,
    broker_stores: Mapping[str, Store],
    trust: tuple[CertificateAuthority, OwnIdentity],
    url: str,
) -> tuple[ControlPlane, web.Application, Rotation]:
    """Return the control plane, its loops running, the front end before it, and its authority's
    rotation.
    """
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
    from control_plane.runtime.runtime import Runtime
    from control_plane.shards.ownership import OwnershipMap
    from control_plane.store.term import OwnTerm
    from control_plane.task_control.caller import ControllerCaller
    from control_plane.task_control.core.addresses import rules_of
    from control_plane.web.serving import Console

    authority, identity = trust
    runtime, settings = Runtime(), config.scheduler
    patience = PollPatience(settings.poll_wait_s, settings.poll_patience_s)

    context, term, ownership = identity.agents_context(), OwnTerm(store), OwnershipMap(store)
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
        client.headers = lambda: {**term.headers(), **ownership.said(machine.machine)}
        return client

    most, of_owner = config.image_max_bytes, config.images_of_owner_max_bytes
    images = ImageStore(config.state_path / "images", time.time, most, of_owner)
    people = People(store, runtime, config.operators, config.portal.approvers)
    trail = Trail(store, runtime, config.audit_entries)

    async def load() -> ControlPlane:
        nonlocal ownership
        ownership = OwnershipMap(store)
        await people.load()
        await trail.load()
        return await stack.enter_async_context(
            ControlPlane(
                store,
                agent_client,
                runtime,
                config.scheduler,
                images.find,
                config.portal,
                broker_stores,
                ControllerCaller(context, rules),
                _boot_id(),
                ownership=ownership,
            )
        )

    with heap_that_stays():
        control_plane = await _despite_damage(load, [store, *broker_stores.values()])
    registrar = Registrar(store, authority, control_plane, url, runtime, config.reachable_at())

    async def have_renewed(machine: str) -> None:
        async with agent_client(control_plane.inventory.get(machine).record) as client:
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

    async def who_answers(machine: str) -> Presence:
        async with agent_client(control_plane.inventory.get(machine).record) as client:
            return await client.get_presence()

    duplicates = registrar.duplicates
    await duplicates.load()
    duplicates.ask, duplicates.tell = who_answers, trail.second_host
    duplicates.disconnect, control_plane.duplicates = control_plane.disconnect, duplicates.known
    front_end = FrontEnd(control_plane, registrar, images, people, trail, issued, ending)
    access = Access(os.getuid(), config.socket_group, config.cluster)
    app = front_end.app(access, version())
    if config.web != "off":
        console = Console(front_end, ROUTES, store.revision, writes=config.web == "full")
        console.add_to(app)
    return control_plane, app, rotation


async def _despite_damage(
    load: Callable[[], Awaitable[ControlPlane]], stores: Sequence[Store]
) -> ControlPlane:
    """Load everything; damaged records are set aside first, if there are any."""
    from control_plane.store.quarantine import set_all_aside
    from control_plane.store.records import DamagedRecord

    try:
        return await load()
    except DamagedRecord:
        for store in stores:
            await set_all_aside(store)
        return await load()


async def _until(stopping: asyncio.Event, *loops: Awaitable[None]) -> None:
    """Return when asked to stop, or raise what broke one of the loops."""
    waiting = asyncio.ensure_future(stopping.wait())
    running = [asyncio.ensure_future(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future in (waiting, *running):
            future.cancel()
        await asyncio.gather(waiting, *running, return_exceptions=True)


def url_of(host: str, port: int) -> str:
    """Return the address of the front end as others write it."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("twine-cluster")


async def _before(stopping: asyncio.Event, opening: asyncio.Future[Any]) -> bool:
    """Return whether `opening` ended before `stopping` was set; it is cancelled otherwise."""
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((stopped, opening), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if opening.done():
        return True
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    return False


def _boot_id() -> str:
    """Return the kernel's name of this boot (random(4)); empty where it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _make_folder(path: Path, what: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot use the {what} {path}: {e.strerror}") from e


async def _serve_until_signal(config: Config) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def started(url: str) -> None:
        notify(f"READY=1\nSTATUS=serving at {url}")
        click.echo(f"serving at {url} and {config.socket}", err=True)

    try:
        await serve(config, stopping, started)
    finally:
        notify("STOPPING=1")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster")
def main() -> None:
    """Decide what runs where, for a region."""


@main.command("serve")
@CONFIG
@STATE
@click.option("--listen", metavar="HOST:PORT", help="For hosts and users, with TLS.")
@click.option("--advertise", metavar="HOST", multiple=True, help="Where they reach it; repeat.")
@click.option("--socket", "socket_", metavar="PATH", help="Unix socket for this host's operators.")
@click.option("--cluster", metavar="NAME", help="Trust domain of all certificates.")
@click.option(
    "--down-after", "--down-after-s", metavar="DURATION", help="Silence of a machine that is down."
)
def serve_command(
    file: Path | None, socket_: str | None, down_after: str | None, **given: Any
) -> None:
    """Run the control plane; SIGTERM ends it and leaves all tasks alone."""
    try:
        config = configuration.load(file, {**given, "socket": socket_})
        if down_after is not None:
            config = configuration.with_down_after(config, down_after)
        config.listen_on()
        logs.configure("twine-control-plane", config.log_level)
    except TwineError as e:
        fail(e)
        return
    run(_serve_until_signal(config))


@main.command("forget-store")
@click.argument("datacenter")
@click.confirmation_option(
    "--yes",
    prompt="Its machines will not be known any more, and their tasks start elsewhere. Go on?",
)
@CONFIG
@STATE
def forget_store(datacenter: str, **given: Any) -> None:
    """Forget the store of a data center that is gone for good; the control plane is stopped."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
    except TwineError as e:
        fail(e)
        return
    run(_forget_store(config, datacenter))


async def _forget_store(config: Config, datacenter: str) -> None:
    from control_plane.broker.stores import forget
    from control_plane.store.opening import stopped_store

    async with stopped_store(config) as store:
        note = await forget(store, datacenter)
    click.echo(f"forgotten: the store of {datacenter}, last at {note.folder}, which stays as it is")


@main.command("check-store")
@click.option("--quarantine", "aside", metavar="NAME", help="Set this record aside.")
@click.option("--forget", metavar="NAME", help="Drop a record for good that was set aside.")
@CONFIG
@STATE
def check_store(aside: str | None, forget: str | None, **given: Any) -> None:
    """List stored records that cannot be used; the control plane is stopped.

    At its start it sets such records aside by itself. The exit code is 2 while there are any.
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
    "--yes", prompt="Every host has to join again, every credential has to be written anew. Go on?"
)
@CONFIG
@STATE
def new_authority(**given: Any) -> None:
    """Begin with a new authority: its key is lost for good; the control plane is stopped."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
    except TwineError as e:
        fail(e)
        return
    from control_plane.new_authority import begin

    run(begin(config))


@main.group()
def user() -> None:
    """Credentials of people and programs that call the front end."""


@user.command("add")
@click.argument("name")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="8h", show_default=True, help="30m, 8h, 30d, …")
@click.option("--url", help="Where the user reaches the front end.")
@CONFIG
@STATE
def user_add(name: str, out: Path, ttl: float, url: str | None, **given: Any) -> None:
    """Write a credential for `twinectl --credential FILE`: key, certificate, authority, URL."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        host, port = config.reachable_at()[0], config.listen_on()[1]
        url = url or url_of(host, port)
        _write_credential(config, ("user", name, ()), out, ttl, url)
        click.echo(f"{out}: {name} may call {url} for {ttl / 3600:g} h")
    except TwineError as e:
        fail(e)
    except OSError as e:
        fail(ConfigError(f"cannot use {e.filename or out}: {e.strerror}"))


@main.group()
def controller() -> None:
    """Credentials of TaskControllers, which the control plane calls."""


@controller.command("add")
@click.argument("name")
@click.option("--host", "hosts", multiple=True, required=True, help="Where it serves; repeat.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="30d", show_default=True, help="8h, 30d, …")
@CONFIG
@STATE
def controller_add(name: str, hosts: tuple[str, ...], out: Path, ttl: float, **given: Any) -> None:
    """Write a credential with which a controller can serve as NAME at these hosts.

    Written again to the same file, it is taken by a controller that runs.
    """
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        _write_credential(config, ("controller", name, hosts), out, ttl, "")
        where = ", ".join(hosts)
        click.echo(f"{out}: controller {name} may serve at {where} for {ttl / 86_400:g} d")
    except TwineError as e:
        fail(e)
    except OSError as e:
        fail(ConfigError(f"cannot use {e.filename or out}: {e.strerror}"))


def _write_credential(
    config: Config, subject: tuple[str, str, tuple[str, ...]], out: Path, life_s: float, url: str
) -> None:
    """Issue a credential for (role, name, hosts) and write it."""
    from control_plane.api.people import IssuedCredential
    from control_plane.identity.authority import (
        CertificateSubject,
        check_host,
        check_user_name,
        open_authority,
    )
    from control_plane.identity.issued import FOLDER, note
    from wire import pins, tls

    role, name, hosts = subject
    check_user_name(name)
    for host in hosts:
        check_host(host)
    if not 60 <= life_s <= USER_LIFE_MAX_S:
        raise InvalidInput(f"the credential of a {role} lives between 1m and 90d")
    if not config.authority_path.exists():
        raise ConfigError(
            f"there is no authority in {config.state}",
            hint="start the control plane once, and pass the same --state or --config here",
        )
    authority = open_authority(config.authority_path, config.cluster)
    held = authority.credential(CertificateSubject(role, name, hosts), url, life_s)
    tls.save(held, out)
    issued = IssuedCredential(
        name=name,
        role=role,
        issued_at=held.issued_at,
        not_after=held.not_after,
        issuer=authority.ca_hash,
        trusts=pins.ca_hashes(authority.ca_pem),
    )
    note(config.state_path / FOLDER, issued)


main.add_command(backup)
main.add_command(restore_store)

if __name__ == "__main__":
    main()
