"""Copies of a store's file: made while it is in use, proved, and restored under higher numbers.

A copy says of itself that it is one (`copied_at`), so it is not opened by mistake. A store that
is restored goes on above every epoch and every revision that may have been given out since the copy
was made: agents and watchers take it for newer than all they know (docs/adr/0111). etcd calls that
`--bump-revision --mark-compacted`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from control_plane.store import statements
from wire import durable
from wire.errors import ConfigError

FILE = "twine.db"
EPOCHS_BETWEEN = 50_000
"""Starts since the copy that are allowed for: more than a day of one every two seconds. Tables
count in 2^53 with 32 bits below the epoch (`runtime/readable.py`): room for 40 of these."""
REVISIONS_BETWEEN = 1 << 36
"""Writes since the copy that are allowed for: nine days at 80,000 a second (docs/adr/0006)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store's file holds."""

    copied_at: float
    """Seconds since 1970; 0: it is no copy."""
    epoch: int
    revision: int
    keys: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where a store goes on that is restored."""

    epoch: int
    revision: int


def above(copy: Facts, lost: Facts | None) -> Numbers:
    """Return numbers above all that were given out since a copy; `lost`: if it can be read."""
    known = (copy,) if lost is None else (copy, lost)
    return Numbers(
        max(facts.epoch for facts in known) + EPOCHS_BETWEEN,
        max(facts.revision for facts in known) + REVISIONS_BETWEEN,
    )


def make_copy(source: Path, target: Path, at: float) -> Facts:
    """Copy a store's file to one that does not exist, in one snapshot; return what was read back.

    Writers of the store go on meanwhile. Raises `ConfigError`, and leaves no file, unless
    the copy is on disk and whole.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with _named(target), _removed_unless_done(part):
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(_opened(source)) as store, closing(sqlite3.connect(part)) as copy:
            store.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            statements.write_meta(copy, copied_at=int(at))
            copy.commit()
        found = look(part)
        fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(part, target)  # refuses one that is there
        part.unlink()
        durable.sync_folder(target.parent)
    return found


def look(path: Path) -> Facts:
    """Return what a store's file holds once all of it was read; `ConfigError` for a damaged one."""
    with _named(path), closing(_opened(path)) as db:
        trouble = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if trouble != "ok":
            raise ConfigError(f"{path} is damaged: {trouble}", hint="take another copy")
        meta = dict(db.execute("SELECT name, value FROM meta"))
        if not 2 <= meta.get("schema", 0) <= statements.SCHEMA:
            raise ConfigError(
                f"{path} has schema {meta.get('schema')}, this release knows {statements.SCHEMA}",
                hint="run the release that wrote it",
            )
        (keys,) = db.execute("SELECT count(*) FROM state").fetchone()
        revision = statements.revision(db)
        return Facts(float(meta.get("copied_at", 0)), meta.get("epoch", 0), revision, keys)


def prepare(copy: Path, target: Path, numbers: Numbers) -> None:
    """Make a store's file of a copy, to go on with these numbers; its history begins with them."""
    with _named(target):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(_opened(copy)) as source, closing(sqlite3.connect(target)) as store:
            source.backup(store)
            store.execute("DELETE FROM meta WHERE name = 'copied_at'")
            statements.write_meta(store, epoch=numbers.epoch, revision=numbers.revision)
            statements.trim(store, numbers.revision)
            store.commit()


def put_in_place(made: Path, folder: Path, aside: Path) -> None:
    """Let a prepared file be the store of a folder; what is there is kept in `aside`.

    A process that dies in between leaves the old file without its last writes, or none: hosts
    refuse both (docs/adr/0111), and the same command again goes on.
    """
    with _named(folder / FILE):
        with closing(_opened(made)) as db:
            db.execute("PRAGMA journal_mode=DELETE")  # all of it is in one file
        aside.mkdir(mode=0o700)
        for name in (FILE + "-wal", FILE + "-shm", FILE):
            if (folder / name).exists():
                (folder / name).replace(aside / name)
        made.replace(folder / FILE)
        durable.sync_folder(folder)


def _opened(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"there is no store's file at {path}")
    return sqlite3.connect(path, timeout=30.0)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say in words what went wrong with a file."""
    try:
        yield
    except sqlite3.Error as e:
        raise ConfigError(f"cannot use {path}: {e}", hint="is it a store's file, and whole?") from e
    except FileExistsError as e:
        raise ConfigError(f"{e.filename2 or e.filename} is there already") from e
    except OSError as e:
        raise ConfigError(f"cannot use {e.filename or path}: {e.strerror}") from e


@contextmanager
def _removed_unless_done(part: Path) -> Iterator[None]:
    try:
        yield
    finally:
        part.unlink(missing_ok=True)
