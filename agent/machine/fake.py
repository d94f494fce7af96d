"""A whole machine in memory: for tests, and for simulating a fleet on one host.

It passes the same contract tests as the real one (tests/contract). State lives in the
`FakeMachine`, so a new agent on the same object finds what the old one left, as after a
crash. Programs are Python functions; nothing is executed.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import shutil
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from agent.errors import BtrfsError, Conflict, ProgramError, SystemdError
from agent.machine import (
    Completed,
    Cpu,
    Hardware,
    Machine,
    Property,
    Subvolume,
    UnitListener,
    UnitState,
)
from agent.machine.unit_properties import encode

GIB = 1 << 30
HARDWARE = Hardware(
    cpu=Cpu(model="Fake CPU", online=2, sockets=1, numa_nodes=1),
    memory_bytes=2 * GIB,
    kernel="6.12.0-fake",
    boot_id="00000000-0000-4000-8000-000000000001",
    hostname="fake",
    nics=("eth0",),
    cgroup_controllers=("cpuset", "cpu", "io", "memory", "pids"),
)

_CLEAN_SIGNALS = frozenset({"SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"})
"""Ends that systemd counts as success (systemd.service(5), SuccessExitStatus=)."""
_HARMLESS = frozenset({signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH})
"""Signals that by default do not end a process (signal(7))."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: with an exit code, or by a signal."""

    code: int | None = 0
    signal: str | None = None
    result: str = ""
    """systemd's word where it does not follow from code and signal, such as `oom-kill`."""

    @property
    def verdict(self) -> str:
        """Return what systemd says of it."""
        if self.result:
            return self.result
        if self.signal:
            return "success" if self.signal in _CLEAN_SIGNALS else "signal"
        return "exit-code" if self.code else "success"


Program = Callable[[list[str], Mapping[str, Property]], Ended | None]
"""Gets its arguments and the unit's properties; None: it runs until it is stopped."""


@dataclass(slots=True)
class _Unit:
    state: UnitState
    properties: dict[str, Property]


class FakeSystemd:
    """Units in memory. Every change is told to the listeners before the call returns."""

    def __init__(
        self, programs: Mapping[str, Program] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Take what programs do, by path or base name; others run until they are stopped."""
        self.programs: dict[str, Program] = {**PROGRAMS, **(programs or {})}
        self.ignores_term: set[str] = set()
        """Units whose processes do not heed SIGTERM: stopping them ends in `timeout`."""
        self.started: list[str] = []
        """Every unit that was ever started, in order."""
        self._clock = clock
        self._units: dict[str, _Unit] = {}
        self._listeners: dict[int, UnitListener] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # The protocol.

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Start a unit; a program that ends at once has ended when this returns."""
        encode(properties)
        self._judge(unit, properties)
        with self._lock:
            if unit in self._units:
                raise Conflict(
                    f"cannot start {unit}: Unit {unit} was already loaded or has a fragment file."
                )
            self._load_slices(str(properties.get("Slice", "system.slice")))
            self._units[unit] = _Unit(self._fresh(unit, properties), dict(properties))
            self.started.append(unit)
        self._tell(unit)
        if not unit.endswith(".slice"):
            self._execute(unit)

    def stop(self, unit: str) -> None:
        """End a unit's processes and forget it."""
        with self._lock:
            inside = [name for name, u in self._units.items() if u.properties.get("Slice") == unit]
        for name in inside:
            self.stop(name)
        state = self.find(unit)
        if state is None or state.active == "failed":
            return
        if state.sub not in ("running", "start"):
            self._forget(unit)
        elif unit in self.ignores_term:
            self._end(unit, Ended(code=None, signal="SIGKILL", result="timeout"))
        else:
            self._end(unit, Ended(code=None, signal="SIGTERM"), stopped=True)

    def kill(self, unit: str, signal: int) -> None:
        """Signal a unit: it ends, unless the signal is harmless or not heeded."""
        state = self.find(unit)
        if state is None or not state.main_pid or signal in _HARMLESS:
            return
        name = _signal_name(signal)
        if name != "SIGTERM" or unit not in self.ignores_term:
            self._end(unit, Ended(code=None, signal=name))

    def reset_failed(self, unit: str) -> None:
        """Forget a failed unit."""
        state = self.find(unit)
        if state is not None and state.active == "failed":
            self._forget(unit)

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a unit."""
        encode(properties)
        self._judge(unit, properties, change=True)
        with self._lock:
            if unit not in self._units:
                raise SystemdError(f"cannot change {unit}: Unit {unit} not loaded.")
            self._units[unit].properties.update(properties)

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit."""
        with self._lock:
            found = self._units.get(unit)
            return found.state if found else None

    def units(self, pattern: str) -> list[UnitState]:
        """Return the units whose name matches a glob."""
        with self._lock:
            return [
                u.state for name, u in self._units.items() if fnmatch.fnmatchcase(name, pattern)
            ]

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns what ends it."""
        number = next(self._numbers)
        self._listeners[number] = listener
        return lambda: self._listeners.pop(number, None) and None

    def version(self) -> int:
        """Return the version this behaves like."""
        return 257

    # What tests and the simulator do to it.

    def properties(self, unit: str) -> dict[str, Property]:
        """Return what a unit was started with, later changes included."""
        with self._lock:
            return dict(self._units[unit].properties)

    def exit(self, unit: str, code: int = 0) -> None:
        """Let a running program end by itself."""
        self._end(unit, Ended(code=code))

    def oom(self, unit: str) -> None:
        """Let the kernel kill a running program for want of memory."""
        self._end(unit, Ended(code=None, signal="SIGKILL", result="oom-kill"))

    def lose_bus(self) -> None:
        """Behave as after a restart of the bus: anything may have changed."""
        self._tell("")

    def reboot(self) -> None:
        """Forget every unit without a word, as a host that goes down does."""
        with self._lock:
            self._units.clear()

    def _judge(
        self, unit: str, properties: Mapping[str, Property], *, change: bool = False
    ) -> None:
        verb = "change" if change else "start"
        for name, value in properties.items():
            reason = _refusal(name, value)
            if reason:
                raise SystemdError(f"cannot {verb} {unit} with {name}={value!r}: {reason}")
        if unit.endswith(".service") and not change and not properties.get("ExecStart"):
            raise SystemdError(f"cannot start {unit}: Unit {unit} has a bad unit file setting.")

    def _load_slices(self, name: str) -> None:
        """Activate the slice of a unit and those above it, as systemd does on its own."""
        for part in _slices(name):
            if part not in self._units:
                self._units[part] = _Unit(self._fresh(part, {}), {})

    def _fresh(self, unit: str, properties: Mapping[str, Property]) -> UnitState:
        number = next(self._numbers)
        slices = _slices(str(properties.get("Slice", "system.slice")))
        state = UnitState(
            unit=unit,
            active="active",
            sub="active",
            invocation_id=f"{number:032x}",
            description=str(properties.get("Description", unit)),
            control_group="/" + "/".join(_slices(unit)),
        )
        if unit.endswith(".slice"):
            return state
        oneshot = properties.get("Type") == "oneshot"
        return replace(
            state,
            active="activating" if oneshot else "active",
            sub="start" if oneshot else "running",
            main_pid=1000 + number,
            started_at=self._clock(),
            control_group="/" + "/".join([*slices, unit]),
        )

    def _execute(self, unit: str) -> None:
        properties = self.properties(unit)
        commands = properties["ExecStart"]
        assert isinstance(commands, list)
        for argv in commands:
            name = str(argv[0])
            program = self.programs.get(name) or self.programs.get(PurePosixPath(name).name)
            ended = program(argv, properties) if program else None
            if ended is None:
                return
            if ended.verdict != "success" or argv is commands[-1]:
                self._end(unit, ended)
                return

    def _end(self, unit: str, ended: Ended, *, stopped: bool = False) -> None:
        with self._lock:
            found = self._units.get(unit)
            if found is None or not found.state.main_pid:
                return
            failed = ended.verdict != "success"
            stays = bool(found.properties.get("RemainAfterExit")) and not stopped
            if failed:
                stays = found.properties.get("CollectMode", "inactive") == "inactive"
            active, sub = ("failed", "failed") if failed else ("active", "exited")
            found.state = replace(
                found.state,
                active=active,
                sub=sub,
                result=ended.verdict,
                main_pid=0,
                control_group="",
                exit_code=ended.code,
                exit_signal=ended.signal,
                exited_at=self._clock(),
            )
            if not stays:
                del self._units[unit]
        self._tell(unit)

    def _forget(self, unit: str) -> None:
        with self._lock:
            self._units.pop(unit, None)
        self._tell(unit)

    def _tell(self, unit: str) -> None:
        for listener in list(self._listeners.values()):
            listener(unit)


def _slices(name: str) -> list[str]:
    """Return a slice and those it is in, outermost first (systemd.slice(5))."""
    if not name.endswith(".slice"):
        return [name]
    parts = name.removesuffix(".slice").split("-")
    return ["-".join(parts[: i + 1]) + ".slice" for i in range(len(parts))]


def _refusal(name: str, value: Property) -> str:
    """Return why systemd refuses a value, empty where it takes it."""
    if name in ("CPUWeight", "IOWeight") and value not in (None, *range(10_001)):
        return f"Value specified in {name} is out of range"
    if name in ("TasksMax", "MemoryMax") and value == 0:
        return f"Value specified in {name} is out of range"
    if name == "RootDirectory" and not str(value).startswith("/"):
        return f"{name}= path is not absolute: {value}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _host_path(path: str, properties: Mapping[str, Property]) -> Path:
    """Return where a path inside a unit's sandbox lies outside of it."""
    for name in ("BindPaths", "BindReadOnlyPaths"):
        mounts = properties.get(name, [])
        assert isinstance(mounts, list)
        for mount in mounts:
            source, _, target = str(mount).removeprefix("-").partition(":")
            if PurePosixPath(path).is_relative_to(target or source):
                return Path(source) / PurePosixPath(path).relative_to(target or source)
    root = properties.get("RootDirectory")
    return Path(str(root)) / path.lstrip("/") if root else Path(path)


def _untar(argv: list[str], properties: Mapping[str, Property]) -> Ended:
    """Unpack an archive as `tar -x [-f FILE] [-C FOLDER]` does, standard input included."""
    archive, folder = str(properties.get("StandardInputFile", "")), "/"
    words = iter(argv[1:])
    for word in words:
        if word == "-C":
            folder = next(words)
        elif word.startswith("--directory="):
            folder = word.partition("=")[2]
        elif word.startswith("--file="):
            archive = str(_host_path(word.partition("=")[2], properties))
        elif word.startswith("-") and not word.startswith("--") and word.endswith("f"):
            name = next(words)
            archive = archive if name == "-" else str(_host_path(name, properties))
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(_host_path(folder, properties), filter="data")
    except (tarfile.TarError, OSError, EOFError):
        return Ended(code=2)
    return Ended()


def ends_with(code: int = 0, signal: str | None = None) -> Program:
    """Return a program that ends at once in this way."""
    return lambda _argv, _properties: Ended(code=None if signal else code, signal=signal)


PROGRAMS: Mapping[str, Program] = {
    "tar": _untar,
    "true": ends_with(0),
    "false": ends_with(1),
}
"""What programs do unless told otherwise."""


@dataclass(slots=True)
class _Record:
    uuid: str
    parent_uuid: str = ""
    received_uuid: str = ""
    read_only: bool = False


class FakeBtrfs:
    """Subvolumes as plain folders below `root`; a registry by inode follows them on rename.

    Nothing keeps a program from writing into a read-only one: only the calls here refuse.
    """

    def __init__(self, root: Path) -> None:
        """Take the folder that plays the file system."""
        self.root = root
        self.size_bytes = 8 * GIB
        self.available_bytes = 6 * GIB
        self._records: dict[int, _Record] = {}
        self._numbers = itertools.count(1)

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume."""
        self._make(path, f"cannot create subvolume {path}")
        self._register(path, _Record(self._uuid()))

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Copy `source` to `target`; what is nested in it stays behind as empty folders."""
        attempt = f"cannot snapshot {source} as {target}"
        origin = self._get(source, attempt)
        self._make(target, attempt)

        def nested(folder: str, names: list[str]) -> Iterable[str]:
            return names if Path(folder) != source and self._find(Path(folder)) else ()

        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=nested)
        self._register(target, _Record(self._uuid(), origin.uuid, read_only=read_only))

    def delete(self, path: Path) -> None:
        """Remove a subvolume and those nested in it."""
        if not os.path.lexists(path):
            return
        self._get(path, f"cannot delete subvolume {path}")
        for folder, _, _ in os.walk(path):
            self._records.pop(os.lstat(folder).st_ino, None)
        shutil.rmtree(path)

    def set_read_only(self, path: Path, read_only: bool) -> None:
        """Close or open a subvolume for writing."""
        word = "close" if read_only else "open"
        self._get(path, f"cannot {word} subvolume {path} for writing").read_only = read_only

    def find(self, path: Path) -> Subvolume | None:
        """Return what is at `path`."""
        found = self._find(path)
        if found is None:
            return None
        return Subvolume(found.uuid, found.parent_uuid, found.received_uuid, found.read_only)

    def children(self, path: Path) -> list[str]:
        """Return the names of the subvolumes directly below a folder, sorted."""
        try:
            return sorted(name for name in os.listdir(path) if self._find(path / name))
        except OSError as e:
            raise BtrfsError(f"cannot list the subvolumes below {path}: {e.strerror}") from e

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Return what the attributes say."""
        if not path.exists():
            raise BtrfsError(f"cannot read the free space at {path}: {os.strerror(errno.ENOENT)}")
        return self.size_bytes, self.available_bytes

    def mark_received(self, path: Path, uuid: str) -> None:
        """Make a subvolume look like one that `btrfs receive` has finished."""
        record = self._get(path, f"cannot mark {path}")
        record.received_uuid, record.read_only = uuid, True

    def _uuid(self) -> str:
        return f"{next(self._numbers):032x}"

    def _find(self, path: Path) -> _Record | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._records.get(os.lstat(path).st_ino)
        return None

    def _get(self, path: Path, attempt: str) -> _Record:
        found = self._find(path)
        if found is None:
            reason = "it is not a subvolume" if path.exists() else os.strerror(errno.ENOENT)
            raise BtrfsError(f"{attempt}: {reason}")
        return found

    def _make(self, path: Path, attempt: str) -> None:
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise BtrfsError(f"{attempt}: it is not on a btrfs file system")
        for above in path.parents:
            record = self._find(above)
            if record and record.read_only:
                raise BtrfsError(f"{attempt}: {os.strerror(errno.EROFS)}")
        try:
            path.mkdir()
        except FileExistsError as e:
            raise Conflict(f"{attempt}: {e.strerror}") from e
        except OSError as e:
            raise BtrfsError(f"{attempt}: {e.strerror}") from e

    def _register(self, path: Path, record: _Record) -> None:
        self._records[os.lstat(path).st_ino] = record


Answer = Completed | Sequence[bytes]


class FakeProcesses:
    """Programs that answer as scripted, by the longest matching start of their arguments."""

    def __init__(self) -> None:
        """Know no program yet."""
        self.answers: dict[tuple[str, ...], Answer | ProgramError] = {}
        self.calls: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        """Return the scripted answer."""
        del timeout_s
        answer = self._answer(argv)
        if not isinstance(answer, Completed):
            answer = Completed(0, b"".join(answer).decode(), "")
        if check and answer.code:
            raise ProgramError(f"{' '.join(argv)} failed with {answer.code}: {answer.stderr}")
        return answer

    def lines(self, argv: Sequence[str]) -> FakeLines:
        """Return the scripted lines."""
        answer = self._answer(argv)
        if isinstance(answer, Completed):
            answer = answer.stdout.encode().splitlines(keepends=True)
        return FakeLines(answer)

    def _answer(self, argv: Sequence[str]) -> Answer:
        self.calls.append(tuple(argv))
        for length in range(len(argv), 0, -1):
            answer = self.answers.get(tuple(argv[:length]))
            if isinstance(answer, ProgramError):
                raise answer
            if answer is not None:
                return answer
        raise ProgramError(
            f"cannot run {argv[0]}: no such program", hint=f"install what provides {argv[0]}"
        )


@dataclass(slots=True)
class FakeLines:
    """Scripted lines; the program ends after the last one, or when it is closed."""

    scripted: Sequence[bytes]
    closed: bool = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines until closed."""
        return itertools.takewhile(lambda _: not self.closed, self.scripted)

    def close(self) -> None:
        """End the program."""
        self.closed = True


@dataclass
class FakeMachine:
    """A machine whose file system is `root`."""

    root: Path
    hardware: Hardware = HARDWARE
    clock: Callable[[], float] = time.time
    systemd: FakeSystemd = field(init=False)
    btrfs: FakeBtrfs = field(init=False)
    processes: FakeProcesses = field(init=False)

    def __post_init__(self) -> None:
        """Start with nothing running."""
        self.systemd = FakeSystemd(clock=self.clock)
        self.btrfs = FakeBtrfs(self.root)
        self.processes = FakeProcesses()

    @property
    def machine(self) -> Machine:
        """Return it as the agent takes it."""
        return Machine(self.systemd, self.btrfs, self.processes, lambda: self.hardware)

    def reboot(self) -> None:
        """Lose all units and get a new boot id; files stay."""
        self.systemd.reboot()
        number = int(self.hardware.boot_id[-12:], 16) + 1
        self.hardware = replace(
            self.hardware, boot_id=f"{self.hardware.boot_id[:-12]}{number:012x}"
        )
