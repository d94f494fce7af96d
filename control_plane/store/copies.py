"""Copies of a store's file: made while it is in use, checked, and restored under higher numbers.

A copy is marked as one (`copied_at`), so it is not opened by mistake. A restored store continues
above every epoch and every revision that may have been assigned since the copy
was made: for agents and watchers it is newer than all they have seen (docs/adr/0111). etcd calls
that `--bump-revision --mark-compacted`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from control_plane.store import statements
from wire import durable
from wire.errors import ConfigError

FILE = "twine.db"
EPOCHS_BETWEEN = 50_000
"""Allowed number of starts since the copy: one every two seconds for more than a day. Tables
count in 2^53 with 32 bits below the epoch (`runtime/readable.py`), so 40 restores fit."""
REVISIONS_BETWEEN = 1 << 36
"""Allowed number of writes since the copy: nine days at 80,000 a second (docs/adr/0006)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts read from a store's file."""

    copied_at: float
    """Seconds since 1970; 0: it is no copy."""
    epoch: int
    revision: int
    keys: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers from which a restored store continues."""

    epoch: int
    revision: int


def numbers_above(copy: Facts, lost: Facts | None) -> Numbers:
    """Return numbers above all that may have been assigned since a copy was made.

    `lost` has those of the replaced store, if it could be read.
    """
    known = (copy,) if lost is None else (copy, lost)
    return Numbers(
        max(facts.epoch for facts in known) + EPOCHS_BETWEEN,
        max(facts.revision for facts in known) + REVISIONS_BETWEEN,
    )


def make_copy(source: Path, target: Path, at: float) -> Facts:
    """Copy a store's file to a new one, in one snapshot; return the facts read back.

    Writers of the store are not blocked. Raises `ConfigError`, and leaves no file, unless
    the copy is complete and on disk.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with _errors_about(target), ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(_opened(source)) as store, closing(sqlite3.connect(part)) as copy:
            store.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            statements.write_meta(copy, copied_at=int(at))
            copy.commit()
        copied = read_facts(part)
        fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(part, target)  # fails if the target exists
        part.unlink()
        durable.sync_folder(target.parent)
    return copied


def read_facts(path: Path) -> Facts:
    """Read a store's file whole and return its facts; `ConfigError` for a damaged one."""
    with _errors_about(path), closing(_opened(path)) as db:
        finding = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if finding != "ok":
            raise ConfigError(f"{path} is damaged: {finding}", hint="make another copy")
        meta = dict(db.execute("SELECT name, value FROM meta"))
        if not 2 <= meta.get("schema", 0) <= statements.SCHEMA:
            raise ConfigError(
                (
                    f"{path} has schema {meta.get('schema')}; this release supports "
                    f"{statements.SCHEMA}"
                ),
                hint="run the release that wrote it",
            )
        (keys,) = db.execute("SELECT count(*) FROM state").fetchone()
        revision = statements.revision(db)
        return Facts(float(meta.get("copied_at", 0)), meta.get("epoch", 0), revision, keys)


def prepare_store(copy: Path, target: Path, numbers: Numbers) -> None:
    """Make a store's file from a copy; its numbers and its history begin at `numbers`."""
    with _errors_about(target):
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
    """Put a prepared file in place as the store of a folder; the old files are kept in `aside`.

    A process that dies in between leaves the old file without its last writes, or no file: hosts
    refuse both (docs/adr/0111), and the same command again completes the work.
    """
    with _errors_about(folder / FILE):
        with closing(_opened(made)) as db:
            db.execute("PRAGMA journal_mode=DELETE")  # everything is in one file
        aside.mkdir(mode=0o700)
        for name in (FILE + "-wal", FILE + "-shm", FILE):
            if (folder / name).exists():
                (folder / name).replace(aside / name)
        made.replace(folder / FILE)
        durable.sync_folder(folder)


def _opened(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"there is no store file at {path}")
    return sqlite3.connect(path, timeout=30.0)


@contextmanager
def _errors_about(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into `ConfigError` with the file's name."""
    try:
        yield
    except sqlite3.Error as e:
        raise ConfigError(f"cannot use {path}: {e}", hint="is it a complete store file?") from e
    except FileExistsError as e:
        raise ConfigError(f"{e.filename2 or e.filename} already exists") from e
    except OSError as e:
        raise ConfigError(f"cannot use {e.filename or path}: {e.strerror}") from e
