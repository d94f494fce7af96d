"""Commands on whole stores: `backup`, `restore-store`, `migrate-store`, `forget-store`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from control_plane import config as configuration
from control_plane.commands import CONFIG, STATE, fail, run
from control_plane.config import Config
from wire.errors import TwineError


@click.command("backup")
@click.option(
    "--to",
    "into",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder in which a folder for this copy is made.",
)
@CONFIG
@STATE
def backup(into: Path, **given: Any) -> None:
    """Copy the store while the control plane runs, read the copy back, and print where it is.

    With stores of data centers the control plane must be stopped: the copies have to agree.
    """
    from control_plane.restore_store import copy_all
    from control_plane.store.opening import sqlite_only

    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        sqlite_only(config, "backup")
        made = copy_all(config, into)
    except TwineError as e:
        fail(e)
        return
    click.echo(made)


@click.command("restore-store")
@click.option(
    "--from",
    "copy",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder that `backup` made, or a store's file.",
)
@click.option(
    "--keep-credentials",
    is_flag=True,
    help="Let users' credentials count, though it is unknown which were revoked since the copy.",
)
@click.confirmation_option("--yes", prompt="What was written since the copy is forgotten. Go on?")
@CONFIG
@STATE
def restore_store(copy: Path, keep_credentials: bool, **given: Any) -> None:
    """Replace the store by a copy; the control plane is stopped.

    After its start it sends no commands until `twinectl restored release`.
    """
    from control_plane.restore_store import restore
    from control_plane.store.opening import sqlite_only

    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        sqlite_only(config, "restore-store")
    except TwineError as e:
        fail(e)
        return
    run(restore(config, copy, keep_credentials=keep_credentials))


@click.command("migrate-store")
@click.option(
    "--to",
    "engine",
    required=True,
    type=click.Choice(["etcd", "sqlite"]),
    help="Engine that gets the records; [etcd] of the configuration is the one, --state the other.",
)
@CONFIG
@STATE
def migrate_store(engine: str, **given: Any) -> None:
    """Move the main store to another engine; the control plane is stopped, tasks run.

    If it is killed, run the same command again. Both stores can never be opened at once.
    """
    from control_plane.migrate_store import move

    try:
        config = configuration.load(given["file"], {"state": given["state"]})
    except TwineError as e:
        fail(e)
        return
    run(move(config, to_etcd=engine == "etcd"))


@click.command("forget-store")
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
