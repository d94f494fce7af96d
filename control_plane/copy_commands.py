"""Commands on whole stores: `backup`, `restore-store`, `migrate-store`, `forget-store`."""

from __future__ import annotations

from pathlib import Path

import click

from control_plane.commands import configured, run
from control_plane.config import Config


@click.command("backup")
@click.option(
    "--to",
    "into",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder in which the copy gets its own folder.",
)
@configured
def backup(config: Config, into: Path) -> None:
    """Copy the store while the control plane runs, read the copy back, and print where it is.

    With stores of data centers the control plane must be stopped: the copies have to agree.
    """
    from control_plane.restore_store import copy_all
    from control_plane.store.opening import sqlite_only

    sqlite_only(config, "backup")
    click.echo(copy_all(config, into))


@click.command("restore-store")
@click.option(
    "--from",
    "copy",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of `backup`, or the file of a store.",
)
@click.option(
    "--keep-credentials",
    is_flag=True,
    help="Keep users' credentials valid, although revocations since the copy are unknown.",
)
@click.confirmation_option("--yes", prompt="All changes since the copy are lost. Continue?")
@configured
def restore_store(config: Config, copy: Path, keep_credentials: bool) -> None:
    """Replace the store by a copy; the control plane is stopped.

    After its start it sends no commands until `twinectl restored release`.
    """
    from control_plane.restore_store import restore
    from control_plane.store.opening import sqlite_only

    sqlite_only(config, "restore-store")
    run(restore(config, copy, keep_credentials=keep_credentials))


@click.command("migrate-store")
@click.option(
    "--to",
    "engine",
    required=True,
    type=click.Choice(["etcd", "sqlite"]),
    help="Target engine: [etcd] of the configuration, or --state.",
)
@configured
def migrate_store(config: Config, engine: str) -> None:
    """Move the main store to another engine; the control plane is stopped, tasks run.

    If it is killed, run the same command again. Both stores can never be opened at once.
    """
    from control_plane.migrate_store import move

    run(move(config, to_etcd=engine == "etcd"))


@click.command("forget-store")
@click.argument("datacenter")
@click.confirmation_option(
    "--yes",
    prompt="The control plane loses its machines, and their tasks start elsewhere. Continue?",
)
@configured
def forget_store(config: Config, datacenter: str) -> None:
    """Remove the record of a data center's store that is lost; the control plane is stopped."""
    run(_forget_store(config, datacenter))


async def _forget_store(config: Config, datacenter: str) -> None:
    from control_plane.broker.stores import forget
    from control_plane.store.opening import stopped_store

    async with stopped_store(config) as store:
        note = await forget(store, datacenter)
    click.echo(
        f"forgotten: the store of {datacenter}, last at {note.folder}; its files are unchanged"
    )
