"""Protocols for everything that the agent uses of a host. All calls block; lanes offload them.

`systemd`, `btrfs`, `process`, `kernelfs` and `hardware` implement them for a real host. `fake` is
a whole machine in memory that passes the same contract tests.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from agent.netplan import NetAnswer, NetRequest
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
    """success, exit-code, signal, core-dump, oom-kill, timeout, … (Result). `start-timeout` if the
    start took too long, which systemd also calls `timeout`."""
    invocation_id: str = ""
    main_pid: int = 0
    """For a running service only `units` fills it in."""
    exit_code: int | None = None
    """Exit code of the main process, once it has exited."""
    exit_signal: str | None = None
    """Name such as SIGKILL of the signal that ended the main process."""
    exited_at: float | None = None
    """Seconds since 1970."""
    started_at: float | None = None
    description: str = ""
    control_group: str = ""
    """Path below the cgroup root; empty when the unit has no processes. For a running service
    only `units` fills it in."""


UnitListener = Callable[[str], None]
"""Called with a service's name, from any thread, when its state may have changed."""


class Systemd(Protocol):
    """The service manager of the host."""

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Queue the start of a transient unit; `find` and the listeners report the outcome.

        `ExecStart` is a list of argument lists. Raises `Conflict` if the unit exists,
        `SystemdError` if a property is refused.
        """

    def stop(self, unit: str) -> None:
        """Queue the stop of a unit; does nothing for an unknown unit."""

    def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit; does nothing for an unknown unit."""

    def reset_failed(self, unit: str) -> None:
        """Make systemd forget a failed unit; does nothing for an unknown unit.

        For a running unit this resets the count of its restarts.
        """

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a running unit until the next boot.

        A slice that does not run starts with them later. An empty list of CPUs is accepted and
        changes nothing for running processes.
        """

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None if systemd has no unit of that name.

        For a running unit, main process and cgroup are left out: this is called for each change.
        """

    def units(self, pattern: str) -> list[UnitState]:
        """Return all loaded units whose name matches a glob, with all fields of their states."""

    def unit_states(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of all loaded units whose name matches a glob.

        One D-Bus call for all; `units` also reads the properties of each.
        """

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns a function that ends this."""

    def version(self) -> int:
        """Return systemd's major version."""


class ServiceUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One service, after systemd has read the unit's files."""

    name: str
    """Its own name, also if an alias was requested."""
    active: str
    sub: str
    kind: str = "simple"
    """Type=, such as simple, notify, oneshot."""
    result: str = "success"
    has_job: bool = False
    """Whether a start or a stop runs or waits."""
    invocation_id: str = ""
    """Changes with each start, also with a restart by systemd itself."""
    control_group: str = ""
    """Path below the cgroup root of its processes, also if it has none."""
    triggered: bool = False
    """Whether a socket, a timer or a path starts it."""


class ServiceControl(Protocol):
    """Controls services of the host by name."""

    def load(self, unit: str) -> ServiceUnit | None:
        """Return a service, after reading its files if needed; None if it has no files."""

    def start(self, unit: str) -> None:
        """Queue the start of a service. Raises `SystemdError` if systemd refuses it."""

    def stop(self, unit: str) -> None:
        """Queue the stop of a service; does nothing for an unknown service."""

    def reset_failed(self, unit: str) -> None:
        """Make systemd forget that a service failed."""


class Subvolume(msgspec.Struct, frozen=True):
    """One subvolume, as btrfs reports it."""

    uuid: str
    parent_uuid: str
    """UUID of the subvolume it is a snapshot of, else empty."""
    received_uuid: str
    """UUID of the sender's subvolume, once a receive has finished, else empty."""
    read_only: bool


class QuotaMode(StrEnum):
    """How a file system counts the space of its subvolumes."""

    SIMPLE = "simple"
    """Data counts for the subvolume that wrote it; cheap (squota, Linux 6.7 and later)."""
    REGULAR = "regular"
    """Distinguishes shared from exclusive data; costs time with each snapshot."""
    OFF = "off"


class Space(msgspec.Struct, frozen=True):
    """Used space and limit of a subvolume, in bytes."""

    used_bytes: int
    max_bytes: int | None = None


class Btrfs(Protocol):
    """The file system that holds images and task roots."""

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume; its parent folder must exist."""

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Make `target` a copy-on-write child of `source`. Raises `Conflict` if it exists."""

    def delete(self, path: Path) -> None:
        """Remove a subvolume and those nested in it; does nothing if there is none."""

    def set_read_only(self, path: Path, read_only: bool) -> None:
        """Close or open a subvolume for writing."""

    def find(self, path: Path) -> Subvolume | None:
        """Return the subvolume at `path`, None if there is none."""

    def children(self, path: Path) -> list[str]:
        """Return the names of the subvolumes directly below a folder, sorted."""

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Return size and free space of the file system."""

    def containing_subvolume(self, path: Path) -> Path:
        """Return the subvolume that a path lies in."""

    def exclusive_bytes(self, path: Path) -> int | None:
        """Return the exclusive bytes of a subvolume, None if the file system does not count."""

    def quota(self, path: Path) -> QuotaMode:
        """Return how the file system counts."""

    def enable_quota(self, path: Path) -> QuotaMode:
        """Turn counting on, in simple mode if the kernel has it. Raises `BtrfsError`.

        If counting is on, its mode does not change.
        """

    def limit(self, path: Path, max_bytes: int | None) -> None:
        """Limit the bytes in a subvolume; None: no limit. Quotas must be on."""

    def usage(self, path: Path) -> Space | None:
        """Return used space and limit of a subvolume, None if quotas are off."""

    def sync(self, path: Path) -> None:
        """Flush this file system to disk, and no other one."""


class Completed(msgspec.Struct, frozen=True):
    """Exit code and output of a program."""

    code: int
    stdout: str
    stderr: str


class Lines(Protocol):
    """The output of a running program, line by line."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines, each with its newline, until the program ends.

        Raises `ProgramError` after the last one if the program failed without `close`.
        """

    def close(self) -> None:
        """End the program and with it the iteration; safe from any thread."""


class Processes(Protocol):
    """Programs of the host."""

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        """Run a program without a shell. Raises `ProgramError` if it fails (with `check`), is
        missing, or runs longer than `timeout_s`.
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
    """Hardware, kernel and names of the host. Sizes in bytes."""

    cpu: Cpu
    memory_bytes: int
    kernel: str
    boot_id: str
    hostname: str
    nics: tuple[str, ...]
    cgroup_controllers: tuple[str, ...]
    hugepages_bytes: int = 0
    """Part of `memory_bytes` that is reserved as huge pages of all sizes now."""
    page_bytes: int = 4096
    """Size of the kernel's pages: 16 or 64 KiB in some kernels for Arm."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resource use of the processes of a cgroup. Seconds and bytes; counters since its creation."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    """Time in which its CPU limit stopped it."""
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    processes: int = 0
    """Processes and threads."""
    cpu_pressure: float = 0.0
    """Share of the last 10 s in which some process waited for CPU; likewise below."""
    memory_pressure: float = 0.0
    io_pressure: float = 0.0


class Cgroups(Protocol):
    """The cgroups of the host."""

    def read(self, group: str) -> Usage | None:
        """Return the use of a cgroup (path below the root), None if there is no such cgroup."""

    def pressure(self, group: str, resource: str, *, full: bool) -> float:
        """Return the share of the last 10 s in which some process of a cgroup waited for `cpu`,
        `memory` or `io`; with `full`, in which all waited. 0 if the kernel does not report it.
        """

    def values(self, group: str, names: Sequence[str]) -> dict[str, str]:
        """Return the contents of files of a cgroup by name; missing files are left out."""

    def children(self, group: str) -> list[str]:
        """Return the sorted names of the cgroups directly below one; empty if it is missing."""

    def disks(self) -> dict[str, str]:
        """Return the block devices whose use can be limited: each name below /dev, including
        links such as `disk/by-id/…`, with the kernel's name of the device.
        """


class KernelObjects(msgspec.Struct, frozen=True):
    """Kernel objects of Twine, except units and subvolumes (`census`)."""

    cgroups: tuple[str, ...] = ()
    """Cgroups of units of tasks, below the root of the hierarchy."""
    namespaces: tuple[str, ...] = ()
    veths: Mapping[str, str] = {}
    """Host end → its alias, which is the task."""
    mounts: tuple[str, ...] = ()
    """Mount points below the given folders, without the folders themselves."""


class NetworkAccess(Protocol):
    """The host's network, which a separate program with more rights changes."""

    def ask(self, ask: NetRequest) -> NetAnswer:
        """Send a request; return the networks after it. Raises `HostError`."""

    def has_gate(self, name: str) -> bool:
        """Return whether a port gate exists with all its BPF programs (`port_gates`)."""

    def gates(self) -> set[str]:
        """Return the names of the port gates that have all their BPF programs."""

    def address(self) -> str:
        """Return the IPv4 address by which other hosts reach this one; empty if it has none."""


def boottime_s() -> float:
    """Return seconds since boot, including suspend; steps of the wall clock do not change it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL or SIGRTMIN+6 (signal(7)).

    Signals 32 and 33 have no name, because the C library uses them itself: `SIG32` and `SIG33`.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        above = number - signal.SIGRTMIN
        return f"SIGRTMIN+{above}" if above > 0 else f"SIG{number}"


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
    """Returns the number of huge pages by page size in bytes, 0 for other sizes that the kernel
    supports. `HostHardware.hugepages_bytes` counts the same pages."""
    cores: Callable[[], tuple[Core, ...]]
    """Returns the cores that are online, with the CPUs that tasks may use."""
    has_program: Callable[[str], bool]
    """Returns whether the host has an executable program at a path."""
    host_text: Callable[[str], str]
    """Returns a file of the host's configuration, empty if there is none."""
    observe: Callable[[Path, Path], KernelObjects]
    """Returns the kernel objects of Twine, given the state folder and the run folder."""
