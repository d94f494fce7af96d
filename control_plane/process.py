"""What every process of the control plane does at its start and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from control_plane.notify import standing_by
from wire.errors import Busy, ConfigError

if TYPE_CHECKING:
    from control_plane.config import Config
    from control_plane.runtime.runtime import Runtime
    from control_plane.shards.processes import OwnRole
    from control_plane.store import Store

_T = TypeVar("_T")
STANDBY_S = 2.0
"""Between two attempts to open a store that another process holds."""


async def despite_damage(load: Callable[[], Awaitable[_T]], stores: Sequence[Store]) -> _T:
    """Load everything; if records are damaged, set them aside and load again."""
    from control_plane.store.quarantine import set_all_aside
    from control_plane.store.records import DamagedRecord

    try:
        return await load()
    except DamagedRecord:
        for store in stores:
            await set_all_aside(store)
        return await load()


async def until(stopping: asyncio.Event, *loops: Awaitable[None]) -> None:
    """Return when asked to stop, or raise the error of the first loop that failed."""
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
    """Return the address of the front end as a URL."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("twine-cluster")


async def before(stopping: asyncio.Event, opening: asyncio.Future[Any], runtime: Runtime) -> bool:
    """Return whether `opening` ended before `stopping` was set; it is cancelled otherwise.

    The clocks are watched meanwhile. Otherwise a standby would miss a step of the clock, and take
    the wrong time for its date once it leads (BUG-CP60).
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


async def opened(
    stack: AsyncExitStack,
    store: Store,
    stopping: asyncio.Event,
    runtime: Runtime,
    stand_by: Callable[[], None] = lambda: None,
) -> bool:
    """Return whether the store is open, until the stack ends; False: it is time to stop.

    While another process has the store, this one stands by; `stand_by` is called once then.
    """
    opening = asyncio.ensure_future(_opened(stack, store, stopping, stand_by))
    return await before(stopping, opening, runtime) and opening.result()


async def _opened(
    stack: AsyncExitStack, store: Store, stopping: asyncio.Event, stand_by: Callable[[], None]
) -> bool:
    is_reported = False
    while not stopping.is_set():
        try:
            await stack.enter_async_context(store)
        except Busy as e:
            if not is_reported:
                click.echo(f"standing by: {e}", err=True)
                stand_by()
            is_reported = True
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
    opened = main_store(config, standing_by, role.lock, role.election_records)
    opening = asyncio.ensure_future(stack.enter_async_context(opened))
    return opening.result() if await before(stopping, opening, runtime) else None


def boot_id() -> str:
    """Return the kernel's id of this boot (random(4)); empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def make_folder(path: Path, what: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(f"cannot use the {what} {path}: {e.strerror}") from e
