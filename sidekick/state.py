"""The folder of the state that survives a crash: the record, the journal of a run, the last report.

`state.json`    the record: the applied profile, and the original value of each setting
`journal.jsonl` one line for each step of the present run; removed at its end
`status.json`   the last report, for the agent
`lock`          held by the sidekick that changes the host
`seen`          what the last `verify` read; the next sidekick that takes the lock removes it
`reserve`       reserved space, freed for the record and the journal when the disk is full

A file is replaced by rename and a line is appended as a whole. Both are on the disk (fsync of file
and folder) before the next step begins. The record and the journal must not be lost. A damaged
report is ignored: sidekick can make it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from sidekick.disk import Disk, is_full, translated
from sidekick.journal import Began, Run, Step, line_of, replay
from sidekick.look import READS
from sidekick.record import SCHEMA, Record
from sidekick.report import Report
from wire.errors import Busy, Forbidden, HostError

LOCK_POLL_S = 0.1
LOCK_WAIT_S = 0.3
"""The shortest wait: `status` holds the lock for a moment to find out whether it is free."""

_T = TypeVar("_T")


RESERVE_BYTES = 1 << 20
"""Several times the size of the record and the journal of a host with hundreds of settings."""


class StateFolder(msgspec.Struct, frozen=True):
    """The folder of the state."""

    folder: Path
    disk: Disk = msgspec.field(default_factory=Disk)

    def load(self) -> Record:
        """Return the record; an empty one if the host never had a profile."""
        record = self._read("state.json", Record)
        if record is None:
            return Record()
        if record.schema > SCHEMA:
            raise HostError(
                (
                    f"{self.folder}/state.json has schema {record.schema}; this sidekick "
                    f"supports {SCHEMA}"
                ),
                hint="install the newer sidekick again; an older one could restore wrong values",
            )
        if record.schema < SCHEMA and "kernel.staged" in record.originals:
            raise HostError(
                f"{self.folder}/state.json is of an earlier sidekick, which staged a command line",
                hint="run `sidekick rollback` with that one first; this one stores lines elsewhere",
            )
        return replace(record, schema=SCHEMA)

    def save(self, record: Record) -> None:
        """Replace the record."""
        self._write_with_reserve(lambda: self._write("state.json", record))

    def reserve(self) -> None:
        """Reserve space for the record and the journal. Raises `HostError` if there is none."""
        self.disk.reserve(self.folder / "reserve", RESERVE_BYTES)

    def read_status(self) -> Report | None:
        """Return the last report, None where there is none or it cannot be read."""
        try:
            return self._read("status.json", Report)
        except Forbidden:
            raise
        except HostError:
            return None

    def write_status(self, report: Report) -> None:
        """Replace the last report; if the disk refuses, remove the old one."""
        for _ in range(2):
            with contextlib.suppress(HostError):
                self._write("status.json", report)
                return
            with contextlib.suppress(HostError):
                self.disk.remove(self.folder / "status.json")

    def save_reads(self, data: bytes) -> None:
        """Store what `look.py` reads again, until a sidekick takes the lock.

        There is no fsync: after a boot it is not used. Without it the timer runs a full `verify`.
        """
        path = self.folder / READS
        temporary = path.with_name(READS + ".new")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def begin(self, began: Began) -> None:
        """Start the journal of a run, in place of one that was interrupted."""
        self._write_with_reserve(lambda: self.disk.write(self._journal, line_of(began) + "\n"))

    def step(self, step: Step) -> None:
        """Append one step of the run to the journal."""
        self._write_with_reserve(lambda: self.disk.append(self._journal, line_of(step)))

    def end(self) -> None:
        """Remove the journal at the end of the run."""
        self.disk.remove(self._journal)

    def unfinished(self) -> Run | None:
        """Return the run that was interrupted, or that another process is carrying out."""
        with translated(f"cannot read {self._journal}"):
            if not self._journal.exists():
                return None
            lines = self._journal.read_bytes().split(b"\n")
        run = replay(lines)
        return None if run is None or run.has_ended(self.load()) else run

    @contextlib.contextmanager
    def lock(
        self, wait_s: float, monotonic: Callable[[], float], sleep: Callable[[float], None]
    ) -> Iterator[None]:
        """Hold the lock. Raises `Busy` if another sidekick still has it after `wait_s`."""
        with translated(f"cannot lock {self.folder}"):
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileExistsError as e:
                raise HostError(
                    f"cannot lock {self.folder}: it is no folder, or a link to a missing one",
                    hint="is its disk mounted? --state names another folder",
                ) from e
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            until = monotonic() + max(wait_s, LOCK_WAIT_S)
            while not _try_lock(fd):
                if monotonic() >= until:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise Busy(
                        f"another sidekick is running (process {holder})",
                        hint="--wait-s waits for it; `sidekick status` shows its progress",
                    )
                sleep(LOCK_POLL_S)
            with contextlib.suppress(OSError):  # a full disk: only messages use the holder's id
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            with translated(f"cannot remove {self.folder / READS}"):
                (self.folder / READS).unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)

    def is_locked(self) -> bool:
        """Return whether a sidekick is running."""
        with translated(f"cannot read the lock in {self.folder}"):
            if not (self.folder / "lock").exists():
                return False
            fd = os.open(self.folder / "lock", os.O_RDONLY)
        try:
            return not _try_lock(fd)
        finally:
            os.close(fd)

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        path = self.folder / name
        with translated(f"cannot read {path}"):
            if not path.exists():
                return None
            text = path.read_bytes()
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeError) as e:
            raise HostError(
                f"cannot read {path}: {e}",
                hint="move it to another folder; sidekick then starts again and takes the present "
                "values as the originals",
            ) from e

    def _write_with_reserve(self, write: Callable[[], None]) -> None:
        """Write data that must not be lost: on a full disk free the reserve first."""
        try:
            write()
        except HostError as e:
            if not is_full(e) or not (self.folder / "reserve").exists():
                raise
            self.disk.remove(self.folder / "reserve")
            write()

    def _write(self, name: str, value: Record | Report) -> None:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2)
        self.disk.write(self.folder / name, text.decode() + "\n")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
