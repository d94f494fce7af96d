"""`twine-control-plane migrate-store`: the two ends of a migration, SQLite and etcd.

`store/migration.py` has the order of writes. A SQLite store made from etcd is written in a
folder of its own below the store's (`ARRIVING`). Once complete, it replaces the old store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from control_plane.broker.stores import NOTES
from control_plane.config import Config
from control_plane.store import Store, statements
from control_plane.store.copies import FILE, Numbers
from control_plane.store.migration import migrate
from control_plane.store.moved import MigrationNote, MigrationState
from control_plane.store.sqlite import ARRIVING, SqliteStore, note_of, take_lock
from wire import durable
from wire.errors import ConfigError

if TYPE_CHECKING:
    from control_plane.store.etcd import EtcdStore

ASIDE = "twine.db.before-migration"
"""The replaced store: it was moved to etcd earlier, and newer records came back from there."""


async def move(config: Config, *, to_etcd: bool) -> None:
    """Move the main store between SQLite in the state folder and `[etcd]`; print each step."""
    if not config.etcd.endpoints:
        raise ConfigError(
            "the configuration has no etcd cluster",
            hint="--config FILE with [etcd] endpoints, which the running control plane may lack",
        )
    try:
        moved = await _move(config, to_etcd)
    except sqlite3.Error as e:
        raise ConfigError(f"cannot use the store in {config.store_path}: {e}") from e
    now, other = ("[etcd]", "without it") if to_etcd else ("no [etcd]", "with it")
    click.echo(
        f"{'moved' if moved else 'moved before; nothing was done'}: start the control plane with"
        f" {now} in its configuration; {other} it refuses to start"
    )


async def _move(config: Config, to_etcd: bool) -> bool:
    async with AsyncExitStack() as stack:
        etcd = EtcdEnd(await stack.enter_async_context(_etcd_store(config)), config.etcd.prefix)
        if to_etcd:
            source = SqliteSource(config.store_path)
            await stack.enter_async_context(source.store)
            await _refuse_broker_stores(source.store)
            return await migrate(source, etcd, click.echo)
        target = SqliteTarget(config.store_path, stack)
        return await migrate(etcd, target, click.echo)


def _etcd_store(config: Config) -> EtcdStore:
    try:
        from control_plane.store.etcd import EtcdStore
    except ImportError as e:
        raise ConfigError(f"cannot use etcd: {e}", hint="pip install 'twine-cluster[etcd]'") from e
    return EtcdStore(msgspec.structs.replace(config.etcd, standby=False), migrating=True)


async def _refuse_broker_stores(store: Store) -> None:
    if own := (await store.list_prefix(NOTES, limit=1)).entries:
        raise ConfigError(
            f"machines of {own[0].key.removeprefix(NOTES)} are in a separate store, which etcd "
            "does not support",
            hint="a region with broker_stores cannot be moved to etcd (docs/scale.md)",
        )


class EtcdEnd:
    """A store in etcd; this process leads it."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self.store, self.name = store, f"etcd below {prefix}"

    @property
    def note(self) -> MigrationNote | None:
        """Return the note of a migration."""
        return self.store.note

    async def empty(self) -> bool:
        """Return whether it holds no record."""
        return not (await self.store.list_prefix("", limit=1)).entries

    async def set_note(self, note: MigrationNote) -> None:
        """Write a note."""
        await self.store.set_note(note)

    async def begin(self, note: MigrationNote, above: Numbers) -> None:
        """Write the note that records are being copied."""
        await self.store.set_note(note, above)

    async def finish(self, above: Numbers) -> None:
        """Remove the note."""
        await self.store.set_note(None, above)


class SqliteSource:
    """A store in SQLite that is in use, or was moved before."""

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise ConfigError(f"there is no store in {folder}", hint="pass --state")
        if (folder / ARRIVING).exists():
            raise ConfigError(
                f"a migration into {folder} is incomplete: it cannot be a source",
                hint="run the migrate-store command again that was started last",
            )
        self.name, self._folder = str(folder), folder
        self.store = SqliteStore(folder, migrating=True)

    @property
    def note(self) -> MigrationNote | None:
        """Return the note of a migration."""
        return _read_note(self._folder / FILE)

    async def set_note(self, note: MigrationNote) -> None:
        """Write a note."""
        _write_note(self._folder / FILE, note)


class SqliteTarget:
    """The folder of a store in SQLite; the new store is made next to the one moved earlier."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        """Take the folder's lock; `stack` closes what is open."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stack.callback(os.close, take_lock(folder / "lock"))
        self._opened = AsyncExitStack()
        stack.push_async_callback(self._opened.aclose)
        self.name, self._folder = str(folder), folder
        self._new_file, self._main_file = folder / ARRIVING / FILE, folder / FILE
        self._store: SqliteStore | None = None

    @property
    def store(self) -> Store:
        """Return the new store; open from `begin` to `finish`."""
        assert self._store is not None
        return self._store

    @property
    def note(self) -> MigrationNote | None:
        """Return the note of a migration."""
        if self._new_file.exists():
            run = _read_note(self._new_file)
            return run or MigrationNote(1, MigrationState.INCOMING, 0)
        return _read_note(self._main_file) if self._main_file.exists() else None

    async def empty(self) -> bool:
        """Return whether the store in its place holds no record."""
        if not self._main_file.exists():
            return True
        with closing(sqlite3.connect(self._main_file)) as db:
            statements.read_meta(db)
            return db.execute("SELECT 1 FROM state LIMIT 1").fetchone() is None

    async def begin(self, note: MigrationNote, above: Numbers) -> None:
        """Make the new store, or continue an interrupted one."""
        self._new_file.parent.mkdir(exist_ok=True, mode=0o700)
        durable.sync_folder(self._folder)
        _write_note(self._new_file, note, above)
        self._store = SqliteStore(self._new_file.parent, migrating=True)
        await self._opened.enter_async_context(self._store)

    async def set_note(self, note: MigrationNote) -> None:
        """Write a note into the new store."""
        _write_note(self._new_file, note)

    async def finish(self, above: Numbers) -> None:
        """Put the new store in place, then remove its note; a crash after any step is safe."""
        if self._store is not None:
            await self._store.compact(self._store.revision())
            await self._opened.aclose()
        if self._new_file.exists():
            _write_note(self._new_file, _read_note(self._new_file), above)
            for path in (self._new_file, self._main_file):
                if path.exists():
                    with closing(sqlite3.connect(path)) as db:
                        db.execute("PRAGMA journal_mode=DELETE")  # all of it is in one file
            if self._main_file.exists():
                self._main_file.replace(self._folder / ASIDE)
            self._new_file.replace(self._main_file)
            durable.sync_folder(self._folder)
        shutil.rmtree(self._new_file.parent, ignore_errors=True)
        _write_note(self._main_file, None)


def _read_note(path: Path) -> MigrationNote | None:
    with closing(sqlite3.connect(path)) as db:
        return note_of(statements.read_meta(db))


def _write_note(path: Path, note: MigrationNote | None, above: Numbers | None = None) -> None:
    """Write a note, or none, and numbers above those of another store; on disk in one step."""
    with closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=FULL")
        meta = statements.read_meta(db)
        db.execute("BEGIN IMMEDIATE")
        db.executemany("DELETE FROM meta WHERE name = ?", [(state,) for state in MigrationState])
        if note is not None:
            statements.write_meta(db, **{note.state: note.run, "migrated_at": note.at})
        if above is not None:
            epoch = max(meta.get("epoch", 0), above.epoch)
            revision = max(statements.revision(db), above.revision)
            statements.write_meta(db, schema=statements.SCHEMA, epoch=epoch, revision=revision)
        db.execute("COMMIT")
