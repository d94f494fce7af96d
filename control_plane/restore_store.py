"""`twine-control-plane backup` and `restore-store`: copies the stores, and restores a copy.

docs/operating.md has the drill, docs/adr/0111 the reasons.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path

import click
import msgspec

from control_plane.api.people import Revocation
from control_plane.api.restored import Restored
from control_plane.config import Config
from control_plane.identity.issued import FOLDER, read_issued
from control_plane.identity.registrar import TOKENS
from control_plane.store import Delete, Operation, Put, copies
from control_plane.store.bounds import ROWS_MAX
from control_plane.store.records import RESTORED, REVOKED, encode
from control_plane.store.sqlite import SqliteStore, take_lock
from wire import durable
from wire.errors import Busy, ConfigError

MAIN = "main"
"""Name of the main store's file in a copy; each data center's store has its own file."""


def copy_all(config: Config, into: Path) -> Path:
    """Copy all stores into a new folder; the folder gets its name after all copies were checked."""
    folders, now = _folders(config), time.time()
    made = into / _stamp(now)
    part = into / f".{made.name}.{os.getpid()}"
    try:
        into.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
        if made.exists():
            raise Busy(f"{made} already exists", hint="try again in a second")
    except OSError as e:
        raise ConfigError(f"cannot use {e.filename}: {e.strerror}") from e
    try:
        with ExitStack() as stack:
            if len(folders) > 1:
                for folder in folders.values():
                    stack.callback(os.close, take_lock(folder / "lock"))
            for name, folder in folders.items():
                copies.make_copy(folder / copies.FILE, part / f"{name}.db", now)
        part.rename(made)
        durable.sync_folder(into)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return made


async def restore(config: Config, copy: Path, *, keep_credentials: bool) -> None:
    """Restore the stores; all are complete before the first one is put in place."""
    folders, now = _folders(config), time.time()
    sources = _sources(copy, folders)
    with ExitStack() as stack:
        for folder in folders.values():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.callback(os.close, take_lock(folder / "lock"))
        made = {name: folder / "restoring" / copies.FILE for name, folder in folders.items()}
        found = {name: copies.read_facts(source) for name, source in sources.items()}
        lost = {name: _facts_of_replaced(folder / copies.FILE) for name, folder in folders.items()}
        for name, source in sources.items():
            copies.prepare_store(source, made[name], copies.numbers_above(found[name], lost[name]))
        issued = [] if keep_credentials else read_issued(config.state_path / FOLDER, now)
        users = sorted({one.name for one in issued if one.role == "user"})
        void = [Revocation(role="user", name=u, at=now, by="restore-store") for u in users]
        revoked = {f"{REVOKED}{one.role}/{one.name}": encode(one) for one in void}
        revoked = _revocations_of_replaced(folders[MAIN] / copies.FILE) | revoked
        note = Restored(at=now, copied_at=found[MAIN].copied_at, epoch=0)
        await _complete_main_store(made[MAIN].parent, note, revoked)
        aside = _unused_name(f"before-restore-{_stamp(now)}", folders)
        for name in reversed(folders):  # the main store last: its note says that all are there
            copies.put_in_place(made[name], folders[name], folders[name] / aside)
            shutil.rmtree(made[name].parent, ignore_errors=True)
    _report(found[MAIN], folders[MAIN] / aside, users)


async def _complete_main_store(folder: Path, note: Restored, revoked: dict[str, bytes]) -> None:
    """Write the note of the restore and revocations into the prepared store; delete join tokens."""
    async with SqliteStore(folder) as store:
        epoch = store.epoch()
        tokens = [entry.key for entry in (await store.list_prefix(TOKENS)).entries]
        operations: list[Operation] = [Delete(key) for key in tokens]
        operations += [Put(key, value) for key, value in revoked.items()]
        for first in range(0, len(operations), ROWS_MAX):
            await store.txn({}, operations[first : first + ROWS_MAX])
        await store.txn({}, [Put(RESTORED, encode(msgspec.structs.replace(note, epoch=epoch)))])


def _stamp(at: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))


def _unused_name(name: str, folders: dict[str, Path]) -> str:
    """Return the name, with a number if needed, that is used in none of the folders."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(n for n in names if not any((f / n).exists() for f in folders.values()))


def _folders(config: Config) -> dict[str, Path]:
    own = {f"dc-{name}": Path(folder) for name, folder in config.broker_stores.items()}
    return {MAIN: config.store_path, **own}


def _sources(copy: Path, folders: dict[str, Path]) -> dict[str, Path]:
    """Return the file of each store in a copy; `ConfigError` if the stores do not match."""
    if not copy.is_dir():
        found = {MAIN: copy}
    else:
        found = {path.stem: path for path in sorted(copy.glob("*.db"))}
        if found.keys() == {Path(copies.FILE).stem}:  # the folder of a store
            found = {MAIN: copy / copies.FILE}
    if found.keys() != folders.keys():
        raise ConfigError(
            f"{copy} has the stores {', '.join(sorted(found)) or 'none'}; the configuration has "
            f"{', '.join(sorted(folders))}",
            hint="all are restored together: pass the folder that `backup` made",
        )
    return found


def _facts_of_replaced(path: Path) -> copies.Facts | None:
    """Return the numbers of the replaced store; None if it cannot be read."""
    try:
        return copies.read_facts(path)
    except ConfigError:
        return None


def _revocations_of_replaced(path: Path) -> dict[str, bytes]:
    """Return the revocations in the replaced store, if it can still be read."""
    if _facts_of_replaced(path) is None:
        return {}
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(
            "SELECT key, value FROM state WHERE key >= ? AND key < ?",
            (REVOKED, REVOKED + "\U0010ffff"),
        )
        return {str(key): bytes(value) for key, value in rows}


def _report(found: copies.Facts, aside: Path, names: list[str]) -> None:
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.copied_at))
    of = f"the copy of {made}" if found.copied_at else "a copy of an unknown time"
    click.echo(f"restored: {of}, {found.keys} records; the replaced files are in {aside}")
    if names:
        click.echo(
            "revoked, because revocations since the copy are unknown: the credentials of "
            f"{', '.join(names)}; create new ones: twine-control-plane user add"
        )
    click.echo(
        "all join tokens are revoked. Hosts whose identity was revoked since the copy have to "
        "be revoked again: twinectl machine revoke-identity NAME\nnow start the control "
        "plane; it sends no commands until you release it:\ntwinectl restored show\n"
        "twinectl restored release"
    )
