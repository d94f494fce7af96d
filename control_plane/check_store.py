"""`twine-control-plane check-store`: finds unusable parts of the stores."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from control_plane.config import Config
from control_plane.store import Store, quarantine
from control_plane.store.opening import stopped_store
from control_plane.store.sqlite import SqliteStore
from wire.errors import NotFound


async def check(config: Config, aside: str | None, forgotten: str | None) -> None:
    """Print damaged and set-aside records, after setting one aside or dropping one.

    Ends the process with 2 if there are any.
    """
    unusable = 0
    stores: dict[str, Store] = {"": stopped_store(config)}
    stores |= {d: SqliteStore(Path(f)) for d, f in config.broker_stores.items()}
    for datacenter, closed in stores.items():
        async with closed as store:
            prefix = f"store of {datacenter}: " if datacenter else ""
            if aside is not None and await store.get(aside) is not None:
                damage = await quarantine.set_aside_by_name(store, aside)
                click.echo(f"{prefix}{damage.key}: set aside")
                aside = ""
            if forgotten is not None and forgotten in await quarantine.quarantined(store):
                await quarantine.forget(store, forgotten)
                click.echo(f"{prefix}{forgotten}: dropped")
                forgotten = ""
            for damage in await quarantine.damages(store):
                click.echo(f"{prefix}{damage.key}: damaged: {damage.reason}")
                unusable += 1
            for name in await quarantine.quarantined(store):
                click.echo(f"{prefix}{name}: set aside")
                unusable += 1
    for name in filter(None, (aside, forgotten)):
        raise NotFound(
            f"there is no record {name!r} to which this applies",
            hint="call the command without options",
        )
    if not unusable:
        click.echo("all stored records are usable")
    sys.exit(2 if unusable else 0)
