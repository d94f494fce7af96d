"""A whole machine in memory: for tests, and for simulating a fleet on one host.

It passes the same contract tests as the real one (tests/contract). State lives in the
`FakeMachine`, so a new agent on the same object finds what the old one left, as after a
crash. Programs are Python functions (`fake_programs`); nothing is executed.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from agent.machine import (
    Completed,
    Cpu,
    HostAccess,
    HostHardware,
    Observed,
    Property,
    QuotaMode,
    Room,
    Subvolume,
    Usage,
    boottime_s,
)
from agent.machine.fake_network import FakeNetwork
from agent.machine.fake_programs import PROGRAMS, btrfs, ends_with
from agent.machine.fake_systemd import Ended, FakeSystemd, Program
from wire.cpus import Core, listed
from wire.errors import BtrfsError, Conflict, NotBtrfs, ProgramError

__all__ = [
    "HARDWARE",
    "Ended",
    "FakeBtrfs",
    "FakeMachine",
    "FakeProcesses",
    "FakeSystemd",
    "Program",
    "ends_with",
]

GIB = 1 << 30
HARDWARE = HostHardware(
    cpu=Cpu(model="Fake CPU", online=2, sockets=1, numa_nodes=1),
    memory_bytes=2 * GIB,
    kernel="6.12.0-fake",
    boot_id="00000000-0000-4000-8000-000000000001",
    hostname="fake",
    nics=("eth0",),
    cgroup_controllers=("cpuset", "cpu", "io", "memory", "hugetlb", "pids"),
)


@dataclass(slots=True)
class _FakeUnit:
    uuid: str
    parent_uuid: str = ""
    received_uuid: str = ""
    read_only: bool = False
    max_bytes: int | None = None


def _copy(source: str, target: str) -> None:
    if stat.S_ISFIFO(os.lstat(source).st_mode):
        os.mkfifo(target, 0o600)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


class FakeBtrfs:
    """Subvolumes as plain folders below `root`; a registry by inode follows them on rename.

    Nothing keeps a program from writing into a read-only one: only the calls here refuse.
    """

    def __init__(self, root: Path) -> None:
        """`root` is the folder that stands for the file system."""
        self.root = root
        self.size_bytes = 8 * GIB
        self.available_bytes = 6 * GIB
        self.counts = QuotaMode.OFF
        self.can_count = QuotaMode.SIMPLE
        """What turning quotas on gives; `OFF`: the kernel refuses."""
        self._records: dict[int, _FakeUnit] = {}
        self._numbers = itertools.count(1)

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume."""
        self._make(path, f"cannot create subvolume {path}")
        self._register(path, _FakeUnit(self._uuid()))

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Copy `source` to `target`; what is nested in it stays behind as empty folders."""
        attempt = f"cannot snapshot {source} as {target}"
        origin = self._get(source, attempt)
        self._make(target, attempt)

        def nested(folder: str, names: list[str]) -> Iterable[str]:
            return names if Path(folder) != source and self._find(Path(folder)) else ()

        shutil.copytree(
            source, target, symlinks=True, dirs_exist_ok=True, ignore=nested, copy_function=_copy
        )
        self._register(target, _FakeUnit(self._uuid(), origin.uuid, read_only=read_only))

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

    def top(self, path: Path) -> Path:
        """Return the subvolume that a path lies in; the file system's own folder is one."""
        for folder in (path, *path.parents):
            if folder == self.root or self._find(folder):
                return folder
        raise NotBtrfs(f"cannot find the subvolume of {path}: it is not on a btrfs file system")

    def own_bytes(self, path: Path) -> int | None:
        """Return the size of a subvolume's own files."""
        self._get(path, f"cannot measure {path}")
        return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())

    def quota(self, path: Path) -> QuotaMode:
        """Return the attribute `counts`."""
        del path
        return self.counts

    def enable_quota(self, path: Path) -> QuotaMode:
        """Turn counting on, if it can be."""
        if self.counts is QuotaMode.OFF:
            if self.can_count is QuotaMode.OFF:
                raise BtrfsError(f"cannot turn quotas on at {path}: {os.strerror(errno.ENOTTY)}")
            self.counts = self.can_count
        return self.counts

    def limit(self, path: Path, max_bytes: int | None) -> None:
        """Remember the limit; nothing holds a program to it."""
        attempt = f"cannot limit subvolume {path} to {max_bytes} bytes"
        record = self._get(path, attempt)
        if self.counts is QuotaMode.OFF:
            raise BtrfsError(f"{attempt}: {os.strerror(errno.ENOTCONN)}")
        record.max_bytes = max_bytes

    def room(self, path: Path) -> Room | None:
        """Return the size of its files, and the limit."""
        record = self._get(path, f"cannot read the quota of {path}")
        if self.counts is QuotaMode.OFF:
            return None
        return Room(self.own_bytes(path) or 0, record.max_bytes)

    def sync(self, path: Path) -> None:
        """Do nothing, as there is nothing behind these folders."""
        if not path.exists():
            raise BtrfsError(f"cannot sync the file system of {path}: {os.strerror(errno.ENOENT)}")

    def mark_received(self, path: Path, uuid: str) -> None:
        """Mark a subvolume as finished by `btrfs receive`."""
        record = self._get(path, f"cannot mark {path}")
        record.received_uuid, record.read_only = uuid, True

    def _uuid(self) -> str:
        return f"{next(self._numbers):032x}"

    def _find(self, path: Path) -> _FakeUnit | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._records.get(os.lstat(path).st_ino)
        return None

    def _get(self, path: Path, attempt: str) -> _FakeUnit:
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

    def _register(self, path: Path, record: _FakeUnit) -> None:
        self._records[os.lstat(path).st_ino] = record


Answer = Completed | Sequence[bytes]


class FakeProcesses:
    """Programs that answer as scripted, by the longest matching start of their arguments."""

    def __init__(self) -> None:
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
            failure = ""
            if answer.code:
                failure = f"{' '.join(argv)} failed with {answer.code}: {answer.stderr}"
            return FakeLines(answer.stdout.encode().splitlines(keepends=True), failure=failure)
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
    failure: str = ""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines until closed; then fail, if that is how the program ended."""
        yield from itertools.takewhile(lambda _: not self.closed, self.scripted)
        if self.failure and not self.closed:
            raise ProgramError(self.failure)

    def close(self) -> None:
        """End the program."""
        self.closed = True


@dataclass(slots=True)
class FakeCgroups:
    """Usage by cgroup, as tests and the simulator set it."""

    usage: dict[str, Usage] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pressure by cgroup and resource."""
    cpus: Callable[[str], Iterable[int]] = field(default=lambda _: ())
    """Returns where the unit of a cgroup may run, nothing where it does not run."""
    slices: Callable[[], Iterable[str]] = field(default=tuple)
    """Returns the slices of tasks that run."""
    kept: Callable[[str], Mapping[str, str]] = field(default=lambda _: {})
    """Returns what a slice that runs keeps of memory, by file."""
    devices: dict[str, str] = field(default_factory=lambda: {"vda": "vda"})
    """Names of block devices below /dev → the kernel's; that of a small guest."""
    pages_used: dict[str, int] = field(default_factory=dict)
    """Bytes of huge pages by cgroup: no limit can be set below."""

    def read(self, group: str) -> Usage | None:
        """Return what was set."""
        return self.usage.get(group)

    def disks(self) -> dict[str, str]:
        """Return what was set."""
        return self.devices

    def pressure(self, group: str, resource: str, *, whole: bool) -> float:
        """Return what was set."""
        del whole
        return self.waits.get((group, resource), 0.0)

    def values(self, group: str, names: Sequence[str]) -> dict[str, str]:
        """Return what was set."""
        unit, cpus = group.rpartition("/")[2], "cpuset.cpus.effective"
        allowed = listed(self.cpus(unit)) if cpus in names else ""
        there = ({cpus: allowed} if allowed else {}) | dict(self.kept(unit))
        there |= self.files.get(group, {})
        return {name: there[name] for name in names if name in there}

    def children(self, group: str) -> list[str]:
        """Return the cgroups below one whose files were set."""
        below = {path.rpartition("/")[2] for path in self.files if path.startswith(f"{group}/")}
        found = {name for name in below if f"{group}/{name}" in self.files}
        return sorted(found | set(self.slices() if group == "/workload.slice" else ()))

    def bound(self, group: str, words: Sequence[str]) -> bool:
        """Write limits of huge pages, `file=value` each; False where more is in use."""
        limits = dict(word.split("=", 1) for word in words)
        used = self.pages_used.get(group, 0)
        if any(value != "max" and int(value) < used for value in limits.values()):
            return False
        self.files.setdefault(group, {}).update(limits)
        return True


@dataclass
class FakeMachine:
    """A machine whose file system is `root`."""

    root: Path
    hardware: HostHardware = HARDWARE
    clock: Callable[[], float] = time.time
    boottime_s: Callable[[], float] = boottime_s
    systemd: FakeSystemd = field(init=False)
    btrfs: FakeBtrfs = field(init=False)
    processes: FakeProcesses = field(init=False)
    cgroups: FakeCgroups = field(default_factory=FakeCgroups)
    observed: Observed = field(default_factory=Observed)
    """What `observe` returns, without the cgroups of running units."""
    network: FakeNetwork = field(default_factory=FakeNetwork)
    lacking: set[str] = field(default_factory=set)
    """Paths of programs that it does not have."""
    texts: dict[str, str] = field(default_factory=dict)
    """Files of its configuration."""
    cores: tuple[Core, ...] = ()
    """Those that tasks may use; none: one with each CPU."""

    def __post_init__(self) -> None:
        """Start with nothing running."""
        self.btrfs = FakeBtrfs(self.root)
        receive = btrfs(self.btrfs.create, self.btrfs.mark_received)
        self.systemd = FakeSystemd({**PROGRAMS, "btrfs": receive}, self.clock)
        self.processes = FakeProcesses()
        self.cgroups.cpus = self._cpus_of
        self.cgroups.kept = self._kept_of
        self.cgroups.slices = lambda: [u.unit for u in self.systemd.units("workload-*.slice")]
        self.systemd.before = self._before
        self.systemd.programs["/bin/sh"] = self._shell

    def _before(self, unit: str, argv: Sequence[str]) -> None:
        found = self.systemd.units(unit)
        if found and list(argv[3:4]) == ["hugetlb"]:
            self.cgroups.bound(argv[4] or found[0].control_group, argv[5:])

    def _shell(
        self, argv: list[str], properties: Mapping[str, Property]
    ) -> Ended | Callable[[], Ended] | None:
        """Play the script that limits huge pages; a test may bring another shell."""
        if argv[3:4] == ["hugetlb"]:
            group = argv[4] or f"/workload.slice/{properties['Slice']}"
            return Ended(code=0 if self.cgroups.bound(group, argv[5:]) else 1)
        other = self.systemd.programs.get("sh")
        return other(argv, properties) if other else None

    def _kept_of(self, unit: str) -> Mapping[str, str]:
        if not unit.endswith(".slice") or not self.systemd.units(unit):
            return {}
        properties = self.systemd.properties(unit)
        names = {"MemoryMin": "memory.min", "MemoryLow": "memory.low"}
        return {file: str(properties.get(name, 0)) for name, file in names.items()}

    def _cpus_of(self, unit: str) -> Iterable[int]:
        found = self.systemd.units(unit)
        if not found or not found[0].control_group:
            return ()
        return cast(
            "Iterable[int]",
            self.systemd.properties(unit).get("AllowedCPUs") or range(self.hardware.cpu.online),
        )

    @property
    def machine(self) -> HostAccess:
        """Return it as the agent takes it."""
        return HostAccess(
            systemd=self.systemd,
            btrfs=self.btrfs,
            processes=self.processes,
            hardware=lambda: self.hardware,
            cgroups=self.cgroups,
            network=self.network,
            boottime_s=self.boottime_s,
            hugepages=lambda: {1 << 30: 0, 2 << 20: self.hardware.hugepages_bytes >> 21},
            cores=lambda: self.cores or tuple(Core((n,)) for n in range(self.hardware.cpu.online)),
            has_program=lambda path: path not in self.lacking,
            host_text=lambda path: self.texts.get(path, ""),
            observe=self._observe,
        )

    def _observe(self, _state: Path, _run: Path) -> Observed:
        units = self.systemd.units("twine-*.service")
        running = tuple(u.control_group for u in units if "/workload" in u.control_group)
        strays = self.network.strays
        return replace(
            self.observed,
            cgroups=running + self.observed.cgroups,
            namespaces=(*self.observed.namespaces, *(s for s in strays if not s.startswith("tw"))),
            veths={**self.observed.veths, **{s: "" for s in strays if s.startswith("tw")}},
        )

    def reboot(self) -> None:
        """Lose all units and get a new boot id; files stay."""
        self.systemd.reboot()
        self.network.networks, self.network.allowed = {}, None
        number = int(self.hardware.boot_id[-12:], 16) + 1
        self.hardware = replace(
            self.hardware, boot_id=f"{self.hardware.boot_id[:-12]}{number:012x}"
        )
