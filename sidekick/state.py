"""What must survive a crash: originals, the applied profile, the journal of a run.

`state.json`    the record: what is applied, and what everything was before that
`journal.jsonl` one line for each step of the run under way; gone when it has ended
`status.json`   the last report, for the agent
`lock`          held by the sidekick that changes the host
`seen`          what the last look read, until a sidekick takes the lock
`reserve`       space of the disk that is given up for the record and the journal when it is full

A file is replaced by rename and a line is appended whole; both are on the disk (fsync of
file and folder) before the next step begins. The record and the journal must not be lost. Reports
can be made again, so that a torn one counts as none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from sidekick.look import KEPT
from sidekick.report import ProfileText, Report, SettingChange, WantedSetting
from wire.errors import Busy, Forbidden, HostError

SCHEMA = 2
LOCK_POLL_S = 0.1
LOCK_WAIT_S = 0.3
"""The least wait: `status` holds the lock for an instant to see whether it is free."""

_T = TypeVar("_T")


RESERVE_BYTES = 1 << 20
"""Several times the record and the journal of a host with hundreds of settings."""


class Disk:
    """Files that stay as written when the power goes."""

    def write(self, path: Path, text: str) -> None:
        """Replace a file with another of this content, or leave it as it was.

        A link stays, and what it leads to is replaced, with its owner and mode.
        """
        with _translated(f"cannot write {path}"):
            path = path.resolve()
            temporary = path.with_name(path.name + ".new")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    _keep_owner(file.fileno(), path)
                    file.write(text.encode(errors="surrogateescape"))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()  # it may hold the last of the space
                raise
            _sync_folder(path.parent)

    def append(self, path: Path, line: str) -> None:
        """Add one line to a file, or leave it as it was."""
        with _translated(f"cannot write {path}"):
            fresh = not path.exists()
            with path.open("ab", buffering=0) as file:
                length = file.tell()
                data = f"{line}\n".encode()
                try:
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(length)
                    raise
            if fresh:
                _sync_folder(path.parent)

    def reserve(self, path: Path, size: int) -> None:
        """Make a file that reserves `size` bytes of the disk, unless it is there already."""
        with _translated(f"cannot reserve {size} bytes in {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if os.fstat(fd).st_blocks * 512 < size:
                    os.posix_fallocate(fd, 0, size)
                    os.fsync(fd)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""
        with _translated(f"cannot remove {path}"):
            path.unlink(missing_ok=True)
            if path.parent.exists():
                _sync_folder(path.parent)


def _keep_owner(fd: int, path: Path) -> None:
    """Give a file that replaces another one its mode and owner."""
    with contextlib.suppress(FileNotFoundError):
        old, new = path.stat(), os.fstat(fd)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, old.st_mode & 0o7777)


def _is_full(error: HostError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as e:
        raise Forbidden(f"{what}: {e.strerror}", hint="run as root") from e
    except OSError as e:
        raise HostError(f"{what}: {e.strerror}") from e


class OwnedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the kernel command line that a profile put there (see `bootline`)."""

    group: str
    arguments: tuple[str, ...]
    displaced: tuple[str, ...] = ()
    """The host's own arguments of the group, which had its place."""
    late: bool = False
    """May linger: what it did is undone at run time."""
    before: str = ""
    """For the guard: the host's own `kernel.panic` before the first boot with it."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it was asked for: rendered, so that a boot can bring it back as it was."""

    name: str = ""
    """Empty for no profile: every original."""
    generation: int = 0
    epoch: int = 0
    wanted: tuple[WantedSetting, ...] = ()
    texts: tuple[ProfileText, ...] = ()
    """The files it was rendered from: `verify` renders them again for the host of then."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A reboot that sidekick asked for; kept until its purpose is seen to be met."""

    boot_id: str
    """Boot id of the boot that was left."""
    purpose: str
    """Which arguments it was to bring, for which generation."""
    way: str
    at: float


class Rebooted(msgspec.Struct, frozen=True, kw_only=True):
    """A boot that ended by a reboot of ours."""

    boot_id: str
    uptime_s: float
    """How long it had lasted, by its own monotonic clock."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last switch that was asked for, where it failed."""

    name: str
    generation: int = 0
    epoch: int = 0
    reason: str
    rolled_back: bool = True


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that is reverted unless it is confirmed."""

    back: Target
    """The target that is restored."""
    boot_id: str
    until: float
    """By the monotonic clock of that boot; any other boot ends it too."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The durable memory of sidekick."""

    schema: int = SCHEMA
    boot_id: str = ""
    """The boot to which the applied values and the originals belong."""
    applied: Target | None = None
    originals: dict[str, str | None] = {}
    """What every setting was before the first profile that claimed it."""
    left: dict[str, str] = {}
    """Originals that the kernel did not take back: the next boot brings them."""
    boot: tuple[OwnedGroup, ...] = ()
    """What of the boot line is ours: staged, in force, or still to be taken off."""
    failure: Failure | None = None
    attempt: Attempt | None = None
    reboots: tuple[Rebooted | float, ...] = ()
    """Our reboots of late, oldest first: a guard against a loop. An earlier release noted the times
    of a clock that each boot may set otherwise."""
    trial: Trial | None = None


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """First line of a journal: what the run is up to."""

    command: str
    target: Target
    changes: tuple[SettingChange, ...]
    boot_id: str
    at: float


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    """More to do, found on the way: the boot must bring what the run could not."""

    changes: tuple[SettingChange, ...]


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag="wrote"):
    """One change is made and read back."""

    setting: str


class Undoing(msgspec.Struct, frozen=True, kw_only=True, tag="undoing"):
    """The run failed; from here on it goes backwards."""

    reason: str


class Undone(msgspec.Struct, frozen=True, kw_only=True, tag="undone"):
    """One change is taken back."""

    setting: str


Step = Began | Planned | Wrote | Undoing | Undone


class Run(msgspec.Struct):
    """A run as its journal tells it."""

    began: Began
    planned: int = 0
    wrote: int = 0
    undone: int = 0
    undoing: str | None = None

    def describe(self, running: bool) -> str:
        """Return how far it came, in words."""
        name = self.began.target.name or "the originals"
        if self.undoing is not None:
            what = f"undoing {name} ({self.undoing})"
            done = f"{self.undone} of {self.wrote} taken back"
        else:
            what, done = f"applying {name}", f"{self.wrote} of {self.planned} written"
        return f"{what}: {done}" if running else f"interrupted while {what}: {done}"


class StateFolder(msgspec.Struct, frozen=True):
    """The folder that holds all of it."""

    folder: Path
    disk: Disk = msgspec.field(default_factory=Disk)

    def load(self) -> Record:
        """Return the record, an empty one on a host that never had a profile."""
        record = self._read("state.json", Record)
        if record is None:
            return Record()
        if record.schema > SCHEMA:
            raise HostError(
                f"{self.folder}/state.json has schema {record.schema}, known is {SCHEMA}",
                hint="install the newer sidekick again; an older one must not guess originals",
            )
        if record.schema < SCHEMA and "kernel.staged" in record.originals:
            raise HostError(
                f"{self.folder}/state.json is of an earlier sidekick, which staged a command line",
                hint="run `sidekick rollback` with that one first; this one keeps lines elsewhere",
            )
        return replace(record, schema=SCHEMA)

    def save(self, record: Record) -> None:
        """Replace the record."""
        self._insist(lambda: self._write("state.json", record))

    def reserve(self) -> None:
        """Set space aside for the record and the journal. Raises `HostError` without any."""
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
        """Replace the last report; leave none rather than an old one where the disk refuses it."""
        for _ in range(2):
            with contextlib.suppress(HostError):
                self._write("status.json", report)
                return
            with contextlib.suppress(HostError):
                self.disk.remove(self.folder / "status.json")

    def keep(self, data: bytes) -> None:
        """Keep what `look.py` reads again, until a sidekick takes the lock. Proves nothing after a
        boot, so that it need not be on the disk. Without it the next look is a full one.
        """
        path = self.folder / KEPT
        temporary = path.with_name(KEPT + ".new")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def begin(self, began: Began) -> None:
        """Start the journal of a run, in place of one that was interrupted."""
        self._insist(lambda: self.disk.write(self._journal, _line(began) + "\n"))

    def step(self, step: Step) -> None:
        """Append one step of the run to the journal."""
        self._insist(lambda: self.disk.append(self._journal, _line(step)))

    def end(self) -> None:
        """Close the journal: the run came to its end."""
        self.disk.remove(self._journal)

    def unfinished(self) -> Run | None:
        """Return the run whose journal was not closed."""
        with _translated(f"cannot read {self._journal}"):
            if not self._journal.exists():
                return None
            lines = self._journal.read_bytes().split(b"\n")
        return _replay(_steps(lines))

    @contextlib.contextmanager
    def lock(
        self, wait_s: float, monotonic: Callable[[], float], sleep: Callable[[float], None]
    ) -> Iterator[None]:
        """Hold the lock. Raises `Busy` if another sidekick still has it after `wait_s`."""
        with _translated(f"cannot lock {self.folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            until = monotonic() + max(wait_s, LOCK_WAIT_S)
            while not _try_lock(fd):
                if monotonic() >= until:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise Busy(
                        f"another sidekick is at work (process {holder})",
                        hint="--wait-s waits for it; `sidekick status` shows how far it is",
                    )
                sleep(LOCK_POLL_S)
            with contextlib.suppress(OSError):  # a full disk: the name of the holder is for people
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            with _translated(f"cannot remove {self.folder / KEPT}"):
                (self.folder / KEPT).unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)

    def is_locked(self) -> bool:
        """Return whether a sidekick is at work."""
        with _translated(f"cannot look at the lock in {self.folder}"):
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
        with _translated(f"cannot read {path}"):
            if not path.exists():
                return None
            text = path.read_bytes()
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as e:
            raise HostError(
                f"cannot read {path}: {e}",
                hint="moved away, sidekick starts afresh, and takes what is now for the originals",
            ) from e

    def _insist(self, write: Callable[[], None]) -> None:
        """Write what must not be lost: on a full disk give up the reserve for it."""
        try:
            write()
        except HostError as e:
            if not _is_full(e) or not (self.folder / "reserve").exists():
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


def _line(step: Step) -> str:
    return msgspec.json.encode(step).decode()


def _steps(lines: Sequence[bytes]) -> list[Step]:
    """Return the steps up to the first torn line, which is what a power cut leaves."""
    steps: list[Step] = []
    for line in lines:
        try:
            steps.append(msgspec.json.decode(line, type=Step))
        except msgspec.MsgspecError:
            break
    return steps


def _replay(steps: Sequence[Step]) -> Run | None:
    if not steps or not isinstance(steps[0], Began):
        return None
    run = Run(began=steps[0], planned=len(steps[0].changes))
    for step in steps[1:]:
        match step:
            case Planned():
                run.planned += len(step.changes)
            case Wrote():
                run.wrote += 1
            case Undoing():
                run.undoing = step.reason
            case Undone():
                run.undone += 1
            case Began():
                break
    return run
