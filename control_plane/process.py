"""The start and the end of each process of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wire.errors import Busy, ConfigError
from wire.notify import notify

if TYPE_CHECKING:
    from control_plane.config import Config
    from control_plane.runtime.runtime import Runtime
    from control_plane.shards.processes import OwnRole
    from control_plane.store import Store

_T = TypeVar("_T")
STANDBY_S = 2.0
"""Seconds between two attempts to open a store that another process holds."""


def standing_by(leader: str) -> None:
    """Report to systemd that this process is ready and waits, to prevent a timeout of its start."""
    notify("READY=1", f"STATUS=standing by, {leader} leads")
    click.echo(f"standing by: {leader} leads", err=True)


async def load_despite_damage(load: Callable[[], Awaitable[_T]], stores: Sequence[Store]) -> _T:
    """Load everything; if records are damaged, set them aside and load again."""
    from control_plane.store.quarantine import set_all_aside
    from control_plane.store.records import DamagedRecord

    try:
        return await load()
    except DamagedRecord:
        for store in stores:
            await set_all_aside(store)
        return await load()


async def run_until(stopping: asyncio.Event, *loops: Awaitable[None]) -> None:
    """Run loops until `stopping` is set; raise the error of the first one that failed."""
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
    """Return the URL of a server with TLS."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("twine-cluster")


async def ends_before(
    stopping: asyncio.Event, opening: asyncio.Future[Any], runtime: Runtime
) -> bool:
    """Return whether `opening` ended before `stopping` was set; cancel it if not.

    The clocks are watched meanwhile. Otherwise a standby would miss a step of the wall clock, and
    use the wrong date once it leads (BUG-CP60).
    """
    stopped = asyncio.ensure_future(stopping.wait())
    watching = asyncio.ensure_future(runtime.watch_clocks())
    await asyncio.wait((stopped, opening), return_when=asyncio.FIRST_COMPLETED)
    for future in (stopped, watching):
        future.cancel()
    if opening.done():
        return True
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    return False


async def open_or_stand_by(
    stack: AsyncExitStack,
    store: Store,
    stopping: asyncio.Event,
    runtime: Runtime,
    stand_by: Callable[[], None] = lambda: None,
) -> bool:
    """Open a store until the stack ends; return False if `stopping` was set before.

    While another process has the store, this one stands by; then `stand_by` is called once.
    """
    opening = asyncio.ensure_future(_retry_open(stack, store, stopping, stand_by))
    return await ends_before(stopping, opening, runtime) and opening.result()


async def _retry_open(
    stack: AsyncExitStack, store: Store, stopping: asyncio.Event, stand_by: Callable[[], None]
) -> bool:
    has_reported = False
    while not stopping.is_set():
        try:
            await stack.enter_async_context(store)
        except Busy as e:
            if not has_reported:
                click.echo(f"standing by: {e}", err=True)
                stand_by()
            has_reported = True
        else:
            return True
        try:
            async with asyncio.timeout(STANDBY_S):
                await stopping.wait()
        except TimeoutError:
            continue
    return False


async def open_store(
    stack: AsyncExitStack, config: Config, role: OwnRole, stopping: asyncio.Event, runtime: Runtime
) -> Store | None:
    """Return the open main store; None: `stopping` was set before this process led."""
    from control_plane.store.opening import main_store

    make_folder(config.state_path, "state folder")
    open_or_stand_by = main_store(config, standing_by, role.lock, role.election_records)
    opening = asyncio.ensure_future(stack.enter_async_context(open_or_stand_by))
    return opening.result() if await ends_before(stopping, opening, runtime) else None


def boot_id() -> str:
    """Return the kernel's id of this boot (random(4)); empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def make_folder(path: Path, what: str) -> None:
    """Create a folder with its parents, or raise `ConfigError`; `what` names it in the error."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot use the {what} {path}: {e.strerror}") from e
