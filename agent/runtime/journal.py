"""Durable task records: what was asked for survives any crash.

One file a task, `<task_id>.json`: a CRC-32 of the record and the record. A file is replaced by
writing a new file, fsync, rename, fsync of the folder. A torn record never affects the others
(F-06).

Each record has a copy in memory, below /run, which lives as long as the units: until the next boot.
A record that is missing or cannot be read is rebuilt from it (`rebuilding.py`). Where that is
not possible the record stays where it is and its task is left running until an owner sends a
request for it; then the record is kept aside.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agent.runtime.core.records import TaskRecord, Tombstone
from agent.runtime.reserve import Reserve
from wire.errors import ConfigError, HostError

log = logging.getLogger(__name__)

SCHEMA = 1
NAME, _COPY = ".name", ".name-of-journal"
"""File with the name of a journal, in its folder, and of its copy beside those of the records."""
TOMBSTONE_S = 86_400.0
"""How long a late message for a removed task is recognised (trust F-81: 24 hours)."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the journal held."""

    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Task id → why its record could not be read."""
    copies: dict[str, TaskRecord] = field(default_factory=dict)
    """What the copies say of tasks whose record cannot be read, or is not there."""


class Journal:
    """The folder of task records. Blocking: call it through a lane."""

    def __init__(
        self, folder: Path, reserve: Reserve | None = None, copies: Path | None = None
    ) -> None:
        """Use `folder`, made if need be; `reserve` gives room where the disk is full.

        `copies` is a folder in memory; None: there are no copies.
        """
        self._folder, self._copies = folder, copies
        self._reserve = reserve
        folder.mkdir(parents=True, exist_ok=True)
        if copies is not None:
            copies.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: TaskRecord | Tombstone, *, durable: bool = True) -> None:
        """Replace the record of a task; when this returns, a power cut cannot undo it.

        Without `durable` a power cut may leave the record before: enough for what can be seen
        again on the host. Raises `HostError` where the disk is full, say.
        """
        kind = "task" if isinstance(record, TaskRecord) else "tombstone"
        body = msgspec.json.encode(record)
        header = json.dumps({"schema": SCHEMA, "kind": kind, "crc": zlib.crc32(body)})
        data = header.encode() + b"\n" + body + b"\n"
        try:
            self._insist(record.task_id, data, durable)
            self._copy(record.task_id, data)
        except OSError as e:
            raise HostError(
                f"cannot save the record of task {record.task_id}: {e.strerror}",
                hint=f"is the file system of {self._folder} full or read-only?",
            ) from e

    def _insist(self, task_id: str, data: bytes, durable: bool) -> None:
        """Replace a record; on a full disk with the room that is kept for this."""
        try:
            self._replace(task_id, data, durable)
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or self._reserve is None or not self._reserve.release():
                raise
            self._replace(task_id, data, durable)

    def _replace(self, task_id: str, data: bytes, durable: bool) -> None:
        path = self._folder / f"{task_id}.json"
        temporary = self._folder / f".{task_id}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)  # always: else a power cut could leave the new name with no content
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if durable:
            self._sync_folder()

    def _copy(self, task_id: str, data: bytes) -> None:
        """Keep a copy of a record; where that fails there is none rather than an old one."""
        if self._copies is None:
            return
        path = self._copies / f"{task_id}.json"
        temporary = self._copies / f".{task_id}.new"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as e:
            extra = {"task": task_id, "why": str(e)}
            log.warning("a record has no copy in memory", extra=extra)
            for stale in (path, temporary):
                if stale.is_file():
                    _remove(stale)

    def _find_copy(self, task_id: str) -> bytes | None:
        if self._copies is None:
            return None
        try:
            return (self._copies / f"{task_id}.json").read_bytes()
        except OSError:
            return None

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def set_aside(self, task_id: str) -> None:
        """Keep a copy of a record that cannot be read, for a person to find out why."""
        path = self._folder / f"{task_id}.json"
        aside = path.with_suffix(f".unreadable-{time.time_ns()}")
        try:
            os.link(path, aside)
        except FileNotFoundError:
            return
        except OSError as e:
            extra = {"task": task_id, "why": str(e)}
            log.warning("cannot set aside an unreadable record", extra=extra)

    def replay(self) -> Replay:
        """Return all records. Raises `ConfigError` for those of a newer release (F-07).

        What can be read gets a copy where it has none: an agent of before made none. Raises
        `HostError` where the disk does not say which there are and no copy does: an agent that
        knew of no task would take away what belongs to them.
        """
        found = Replay()
        self._recognise()
        paths = self._paths()
        for unfinished in (p for p in paths if p.name.startswith(".") and p.suffix == ".new"):
            _remove(unfinished)
        for path in (p for p in paths if p.suffix == ".json" and p.name[0] != "."):
            task_id = path.stem
            try:
                record = _decode(data := path.read_bytes())
                if record.task_id != task_id:
                    raise ValueError(f"it is the record of task {record.task_id}")
            except (ValueError, RecursionError, OSError) as e:
                found.unreadable[task_id] = str(e)
                continue
            if self._find_copy(task_id) != data:
                self._copy(task_id, data)
            if isinstance(record, TaskRecord):
                found.tasks[task_id] = record
            elif time.time() - record.at < TOMBSTONE_S:
                found.tombstones[task_id] = record
            else:
                _remove(path)
        self._read_copies(found)
        return found

    def _recognise(self) -> None:
        """Raise `HostError` where this is not the journal that this boot began with.

        A file system that is not mounted leaves an empty folder. An agent that started with an
        empty journal would take all tasks for unknown ones, and start others with empty volumes.
        """
        if self._copies is None:
            return
        try:
            name, known = _text(self._folder / NAME), _text(self._copies / _COPY)
            if known and name != known:
                raise HostError(
                    f"{self._folder} is not the journal of this host's tasks",
                    hint="is its file system mounted? To start without their records: "
                    f"rm -r {self._copies}",
                )
            if not name:
                name = secrets.token_hex(8)
                (self._folder / NAME).write_text(name)
                self._sync_folder()
            (self._copies / _COPY).write_text(name)
        except OSError as e:  # a read-only or failing disk: later writes report it
            log.warning("the journal has no name", extra={"why": e.strerror})

    def _paths(self) -> list[Path]:
        try:
            return [self._folder / name for name in sorted(os.listdir(self._folder))]
        except OSError as e:
            if self._copies is None or not any(self._copies.glob("*.json")):
                raise HostError(
                    f"cannot list the records: {e.strerror}",
                    hint=f"is the disk of {self._folder} healthy? tasks continue to run",
                ) from e
            extra = {"path": str(self._folder), "why": e.strerror}
            log.error("the records cannot be read; their copies are used", extra=extra)
            return []

    def _read_copies(self, found: Replay) -> None:
        """Read the copies of tasks whose record was not read; drop those of nothing."""
        if self._copies is None:
            return
        for path in sorted(self._copies.glob("*.json")):
            task_id = path.stem
            if task_id in found.tasks or task_id in found.tombstones:
                continue
            try:
                record = _decode(path.read_bytes())
            except (ValueError, RecursionError, OSError) as e:
                extra = {"task": task_id, "why": str(e)}
                log.warning("the copy of a record cannot be read", extra=extra)
                continue
            if isinstance(record, TaskRecord) and record.task_id == task_id:
                found.copies[task_id] = record
            else:
                _remove(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _remove(path: Path) -> None:
    """Remove what is of no use any more; on a read-only disk it does no harm either."""
    try:
        path.unlink()
    except OSError as e:
        log.warning("a leftover cannot be removed", extra={"path": str(path), "why": e.strerror})


def _decode(data: bytes) -> TaskRecord | Tombstone:
    head, _, body = data.partition(b"\n")
    header = json.loads(head)
    if not isinstance(header, dict) or not isinstance(header.get("schema"), int):
        raise ValueError("no header")
    if header["schema"] > SCHEMA:
        raise ConfigError(
            f"a task record has schema {header['schema']}, this agent knows up to {SCHEMA}",
            hint="a newer agent wrote it: install that one again; tasks continue to run",
        )
    body = body.removesuffix(b"\n")
    if zlib.crc32(body) != header.get("crc"):
        raise ValueError("its checksum is wrong")
    if header.get("kind") == "task":
        return msgspec.json.decode(body, type=TaskRecord)
    return msgspec.json.decode(body, type=Tombstone)
