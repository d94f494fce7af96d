"""Durable task records, which survive any crash.

Each task has one file, `<task_id>.json`, with a CRC-32 and the record. A file is replaced by
writing a new file, fsync, rename, fsync of the folder. A torn record never affects the others
(F-06).

Each record has a copy in memory below /run, which like the units exists until the next boot. A
record that is missing or unreadable is rebuilt from its copy (`rebuilt` in
`tasks/core/reconcile.py`). If that is not possible, the record stays in place and its task
continues to run until an owner sends a request for it. Then the unreadable record is set aside.
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
from wire.durable import sync_folder
from wire.errors import ConfigError, HostError

log = logging.getLogger(__name__)

SCHEMA = 1
NAME, _COPY = ".name", ".name-of-journal"
"""Files with the name of a journal: in its folder, and in the folder of the records' copies."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The content of the journal when the agent starts."""

    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Task id → why its record could not be read."""
    copies: dict[str, TaskRecord] = field(default_factory=dict)
    """Task id → the copy of a record that is missing or cannot be read."""


class Journal:
    """The folder of task records. Blocking: call it through a lane."""

    def __init__(
        self, folder: Path, reserve: Reserve | None = None, copies: Path | None = None
    ) -> None:
        """Use `folder`, which is created if missing. A full disk releases `reserve`.

        `copies` is the folder of the copies in memory; None: there are no copies.
        """
        self._folder, self._copies = folder, copies
        self._reserve = reserve
        folder.mkdir(parents=True, exist_ok=True)
        if copies is not None:
            copies.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: TaskRecord | Tombstone, *, durable: bool = True) -> None:
        """Replace the record of a task; once this returns, a power cut cannot undo the write.

        Without `durable` a power cut may restore the previous record, which is enough for facts
        that the agent can observe again on the host. Raises `HostError`, for example on a full
        disk.
        """
        kind = "task" if isinstance(record, TaskRecord) else "tombstone"
        body = msgspec.json.encode(record)
        header = json.dumps({"schema": SCHEMA, "kind": kind, "crc": zlib.crc32(body)})
        data = header.encode() + b"\n" + body + b"\n"
        try:
            self._replace_on_full_disk(record.task_id, data, durable)
            self._copy(record.task_id, data)
        except OSError as e:
            raise HostError(
                f"cannot save the record of task {record.task_id}: {e.strerror}",
                hint=f"is the file system of {self._folder} full or read-only?",
            ) from e

    def _replace_on_full_disk(self, task_id: str, data: bytes, durable: bool) -> None:
        """Replace a record; on a full disk release the reserve and try again."""
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
            os.fsync(fd)  # always: else a power cut could leave an empty file under the new name
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if durable:
            sync_folder(self._folder)

    def _copy(self, task_id: str, data: bytes) -> None:
        """Write the copy of a record. If that fails, remove the old copy: it is outdated."""
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

    def set_aside(self, task_id: str) -> None:
        """Keep a link to an unreadable record, for diagnosis by an operator."""
        path = self._folder / f"{task_id}.json"
        aside = path.with_suffix(f".unreadable-{time.time_ns()}")
        try:
            os.link(path, aside)
        except FileNotFoundError:
            return
        except OSError as e:
            extra = {"task": task_id, "why": str(e)}
            log.warning("cannot set aside an unreadable record", extra=extra)

    def forget(self, task_id: str) -> None:
        """Remove an expired tombstone and its copy."""
        for folder in filter(None, (self._folder, self._copies)):
            if (path := folder / f"{task_id}.json").exists():
                _remove(path)

    def replay(self) -> Replay:
        """Return all records. Raises `ConfigError` for a record of a newer release (F-07).

        A readable record without a copy gets one: earlier releases made no copies. Raises
        `HostError` if the folder cannot be listed and there are no copies: an agent without any
        record would remove the units and roots of all tasks.
        """
        result = Replay()
        self._check_name()
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
                result.unreadable[task_id] = str(e)
                continue
            if self._find_copy(task_id) != data:
                self._copy(task_id, data)
            if isinstance(record, TaskRecord):
                result.tasks[task_id] = record
            else:
                result.tombstones[task_id] = record
        self._read_copies(result)
        return result

    def _check_name(self) -> None:
        """Raise `HostError` if this is not the journal that was used earlier in this boot.

        If its file system is not mounted, the folder is empty. An agent with an empty journal would
        remove all running tasks as unknown, and start others with empty volumes.
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
                sync_folder(self._folder)
            if name != known:
                (self._copies / _COPY).write_text(name)
        except OSError as e:  # on a read-only or failing disk later writes raise an error
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

    def _read_copies(self, replay: Replay) -> None:
        """Read the copies of missing or unreadable records; remove copies without a task."""
        if self._copies is None:
            return
        for path in sorted(self._copies.glob("*.json")):
            task_id = path.stem
            if task_id in replay.tasks or task_id in replay.tombstones:
                continue
            try:
                record = _decode(path.read_bytes())
            except (ValueError, RecursionError, OSError) as e:
                extra = {"task": task_id, "why": str(e)}
                log.warning("the copy of a record cannot be read", extra=extra)
                continue
            if isinstance(record, TaskRecord) and record.task_id == task_id:
                replay.copies[task_id] = record
            else:
                _remove(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _remove(path: Path) -> None:
    """Remove a leftover file; a failure is only logged, because the file does no harm."""
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
