"""Everything we ask of a host, as protocols. All calls block; `services` offload them.

The real ones live in `systemd`, `btrfs`, `process`, `kernelfs`, `hardware`; `fake` is a
whole machine in memory that passes the same contract tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from agent.netplan import Ask, NetAnswer
    from wire.cpus import Core

Property = object
"""Value of a unit property in Python's types: str, int, bool, float, list, tuple, bytes."""


class UnitState(msgspec.Struct, frozen=True):
    """State of one unit, as systemd reports it."""

    unit: str
    active: str
    """active, activating, deactivating, inactive, failed (ActiveState)."""
    sub: str
    """running, exited, dead, failed, … (SubState)."""
    result: str = "success"
    """success, exit-code, signal, core-dump, oom-kill, timeout, … (Result); `start-timeout` where
    it was not up in time, which systemd calls `timeout`, too."""
    invocation_id: str = ""
    main_pid: int = 0
    """Of a running service only `units` fills it in."""
    exit_code: int | None = None
    """Exit code of the main process, once it has ended by itself."""
    exit_signal: str | None = None
    """Name such as SIGKILL of the signal that ended the main process."""
    exited_at: float | None = None
    """Seconds since 1970."""
    started_at: float | None = None
    description: str = ""
    control_group: str = ""
    """Path below the cgroup root; empty when the unit has no processes. Of a running service only
    `units` fills it in."""


UnitListener = Callable[[str], None]
"""Called with a service's name, from any thread, when its state may have changed."""


class Systemd(Protocol):
    """The service manager of the host."""

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Queue the start of a transient unit; `find` and the listeners tell what came of it.

        `ExecStart` is a list of argument lists. Raises `Conflict` where the unit exists,
        `SystemdError` where a property is refused.
        """

    def stop(self, unit: str) -> None:
        """Queue the stop of a unit; one that is not there is no error."""

    def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit; one that is not there is no error."""

    def reset_failed(self, unit: str) -> None:
        """Let systemd forget a failed unit; one that is not there is no error.

        For a running unit this resets the count of its restarts.
        """

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a running unit until the next boot.

        A slice may be one that does not run yet: it begins with them. An empty list of CPUs is
        taken and changes nothing that runs.
        """

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None where systemd has none of that name.

        Where it runs, main process and cgroup are left out: this is asked with each change.
        """

    def units(self, pattern: str) -> list[UnitState]:
        """Return all loaded units whose name matches a glob, with all that a state has."""

    def glance(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of all loaded units whose name matches a glob.

        One call, however many there are; `units` asks for each one's properties, too.
        """

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns what ends it."""

    def version(self) -> int:
        """Return systemd's major version."""


class ServiceUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One service as systemd has it after it has read the unit's files."""

    name: str
    """Its own name, also where an alias was asked for."""
    active: str
    sub: str
    kind: str = "simple"
    """Type=, such as simple, notify, oneshot."""
    result: str = "success"
    has_job: bool = False
    """Whether a start or a stop is under way or waits."""
    invocation_id: str = ""
    """Another one after each start, also after a restart by systemd itself."""
    control_group: str = ""
    """Path below the cgroup root where its processes are, or would be."""
    triggered: bool = False
    """Whether a socket, a timer or a path starts it."""


class ServiceControl(Protocol):
    """The services of the host, started and stopped by their names."""

    def load(self, unit: str) -> ServiceUnit | None:
        """Return a service, its files read if need be; None where there are none of that name."""

    def start(self, unit: str) -> None:
        """Queue the start of a service. Raises `SystemdError` where systemd refuses it."""

    def stop(self, unit: str) -> None:
        """Queue the stop of a service; one that is not there is no error."""

    def reset_failed(self, unit: str) -> None:
        """Let systemd forget that a service failed."""


class Subvolume(msgspec.Struct, frozen=True):
    """One subvolume, as btrfs reports it."""

    uuid: str
    parent_uuid: str
    """UUID of the subvolume it is a snapshot of, else empty."""
    received_uuid: str
    """UUID of the sender's subvolume, once a receive has finished, else empty."""
    read_only: bool


class QuotaMode(StrEnum):
    """How a file system counts what its subvolumes take."""

    SIMPLE = "simple"
    """The subvolume that wrote it has it; cheap (squota, Linux 6.7 and later)."""
    REGULAR = "regular"
    """Distinguishes shared from exclusive data; costs time with each snapshot."""
    OFF = "off"


class Room(msgspec.Struct, frozen=True):
    """What a subvolume holds, and what it may hold. Bytes."""

    used_bytes: int
    max_bytes: int | None = None


class Btrfs(Protocol):
    """The file system that holds images and task roots."""

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume; its parent folder must exist."""

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Make `target` a copy-on-write child of `source`. Raises `Conflict` if it exists."""

    def delete(self, path: Path) -> None:
        """Remove a subvolume and those nested in it; one that is not there is no error."""

    def set_read_only(self, path: Path, read_only: bool) -> None:
        """Close or open a subvolume for writing."""

    def find(self, path: Path) -> Subvolume | None:
        """Return what is at `path`, None where there is no subvolume."""

    def children(self, path: Path) -> list[str]:
        """Return the names of the subvolumes directly below a folder, sorted."""

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Return size and free space of the file system."""

    def top(self, path: Path) -> Path:
        """Return the subvolume that a path lies in."""

    def own_bytes(self, path: Path) -> int | None:
        """Return what a subvolume alone takes, None where the file system does not count it."""

    def quota(self, path: Path) -> QuotaMode:
        """Return how the file system counts."""

    def enable_quota(self, path: Path) -> QuotaMode:
        """Turn counting on, simple where the kernel can; raises `BtrfsError` where it cannot.

        What is on stays as it is.
        """

    def limit(self, path: Path, max_bytes: int | None) -> None:
        """Limit the bytes in a subvolume; None: no limit. Quotas must be on."""

    def room(self, path: Path) -> Room | None:
        """Return what a subvolume holds and may hold, None where quotas are off."""

    def sync(self, path: Path) -> None:
        """Return once everything written to this file system, and no other, is on disk."""


class Completed(msgspec.Struct, frozen=True):
    """What a program left behind."""

    code: int
    stdout: str
    stderr: str


class Lines(Protocol):
    """The output of a running program, line by line."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines, each with its newline, until the program ends.

        Raises `ProgramError` after the last one if the program failed by itself.
        """

    def close(self) -> None:
        """End the program; safe from any thread, the iteration then stops."""


class Processes(Protocol):
    """Programs of the host."""

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        """Run a program without a shell. Raises `ProgramError` on failure (if `check`),
        when it is missing, or after `timeout_s`.
        """

    def lines(self, argv: Sequence[str]) -> Lines:
        """Start a program and return its lines as they come."""


class Cpu(msgspec.Struct, frozen=True):
    """The processor of the host."""

    model: str
    online: int
    sockets: int
    numa_nodes: int


class HostHardware(msgspec.Struct, frozen=True):
    """What the host is made of. Sizes in bytes."""

    cpu: Cpu
    memory_bytes: int
    kernel: str
    boot_id: str
    hostname: str
    nics: tuple[str, ...]
    cgroup_controllers: tuple[str, ...]
    hugepages_bytes: int = 0
    """Part of `memory_bytes` that is reserved as huge pages of all sizes now."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a cgroup use. Seconds and bytes; counters since it was made."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    """For how long its CPU limit kept it from running."""
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    processes: int = 0
    """Processes and threads."""
    cpu_pressure: float = 0.0
    """Share of the last 10 s in which some of it waited for CPU; likewise for the others."""
    memory_pressure: float = 0.0
    io_pressure: float = 0.0


class Cgroups(Protocol):
    """The cgroups of the host."""

    def read(self, group: str) -> Usage | None:
        """Return what a cgroup (its path below the root) uses, None where there is none."""

    def pressure(self, group: str, resource: str, *, whole: bool) -> float:
        """Return the share of the last 10 s in which some of a cgroup waited for `cpu`, `memory`
        or `io`; `whole`: in which all of it did. 0 where the kernel does not say.
        """

    def values(self, group: str, names: Sequence[str]) -> dict[str, str]:
        """Return what files of a cgroup say, of those that are there."""

    def children(self, group: str) -> list[str]:
        """Return the names of the cgroups directly below one, sorted; none where it is not."""

    def disks(self) -> dict[str, str]:
        """Return the block devices whose use can be limited: each name below /dev, links such as
        `disk/by-id/…` among them, and the kernel's for the same device.
        """


class Observed(msgspec.Struct, frozen=True):
    """Kernel objects of ours other than units and subvolumes (`census`)."""

    cgroups: tuple[str, ...] = ()
    """Cgroups of units of tasks, below the root of the hierarchy."""
    namespaces: tuple[str, ...] = ()
    veths: Mapping[str, str] = {}
    """Host end → its alias, which is the task."""
    mounts: tuple[str, ...] = ()
    """Mount points below the folders that were asked about, those themselves excepted."""


def _nothing(_state: Path, _run: Path) -> Observed:
    return Observed()


class NetworkAccess(Protocol):
    """The host's network, which another program changes for us."""

    def ask(self, ask: Ask) -> NetAnswer:
        """Send a request; return the networks after it. Raises `HostError`."""

    def has_gate(self, name: str) -> bool:
        """Return whether a program of the kernel for ports is there, and whole."""

    def gates(self) -> set[str]:
        """Return the names of the kernel's programs for ports that are there, and whole."""

    def address(self) -> str:
        """Return the IPv4 address by which other hosts reach this one; empty where none do."""


def boottime_s() -> float:
    """Return seconds since boot, suspend included; no step of the clock moves them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HostAccess(msgspec.Struct, frozen=True, kw_only=True):
    """One host: the real one (`real.real_machine`) or one in memory (`fake.FakeMachine`)."""

    systemd: Systemd
    btrfs: Btrfs
    processes: Processes
    hardware: Callable[[], HostHardware]
    cgroups: Cgroups
    network: NetworkAccess
    boottime_s: Callable[[], float] = boottime_s
    hugepages: Callable[[], Mapping[int, int]]
    """The huge pages that exist now, by page size in bytes, with 0 for other sizes that the kernel
    supports. The same pages that `HostHardware.hugepages_bytes` counts."""
    cores: Callable[[], tuple[Core, ...]]
    """The cores that are online now, with what of them tasks may use."""
    has_program: Callable[[str], bool]
    """Whether a program of the host is there, given its path."""
    host_text: Callable[[str], str]
    """Returns a file of the host's configuration, empty where there is none."""
    observe: Callable[[Path, Path], Observed] = _nothing
    """Returns the kernel objects of ours, given the state folder and the run folder."""
