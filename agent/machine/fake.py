"""A whole machine in memory: for tests, and for simulating a fleet on one host.

It passes the same contract tests as the real one (tests/contract). `FakeMachine` holds the state,
so a new agent on the same object finds the state of the old one, as after a crash. Programs are
Python functions (`fake_programs`); nothing is executed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from agent.machine import (
    Completed,
    Cpu,
    HostAccess,
    HostHardware,
    KernelObjects,
    Property,
    Usage,
    boottime_s,
)
from agent.machine.fake_btrfs import GIB, FakeBtrfs
from agent.machine.fake_network import FakeNetwork
from agent.machine.fake_programs import PROGRAMS, btrfs
from agent.machine.fake_systemd import Ended, FakeSystemd
from wire.cpus import Core, cpu_list_text
from wire.errors import ProgramError

HARDWARE = HostHardware(
    cpu=Cpu(model="Fake CPU", online=2, sockets=1, numa_nodes=1),
    memory_bytes=2 * GIB,
    kernel="6.12.0-fake",
    boot_id="00000000-0000-4000-8000-000000000001",
    hostname="fake",
    nics=("eth0",),
    cgroup_controllers=("cpuset", "cpu", "io", "memory", "hugetlb", "pids"),
)


Answer = Completed | Sequence[bytes]


class FakeProcesses:
    """Programs with scripted output, by the longest matching prefix of their arguments."""

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
        """Yield the lines until closed; raise `ProgramError` if the program failed."""
        yield from itertools.takewhile(lambda _: not self.closed, self.scripted)
        if self.failure and not self.closed:
            raise ProgramError(self.failure)

    def close(self) -> None:
        """End the program."""
        self.closed = True


@dataclass(slots=True)
class FakeCgroups:
    """Usage by cgroup, set by tests and the simulator."""

    usage: dict[str, Usage] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pressure by cgroup and resource."""
    cpus: Callable[[str], Iterable[int]] = field(default=lambda _: ())
    """Returns the CPUs that the unit of a cgroup may use; empty if it does not run."""
    slices: Callable[[], Iterable[str]] = field(default=tuple)
    """Returns the running slices of tasks."""
    kept: Callable[[str], Mapping[str, str]] = field(default=lambda _: {})
    """Returns the memory protection of a running slice, by file."""
    devices: dict[str, str] = field(default_factory=lambda: {"vda": "vda"})
    """Names of block devices below /dev → the kernel's names; the default is a small guest's."""
    pages_used: dict[str, int] = field(default_factory=dict)
    """Bytes of huge pages in use by cgroup: a lower limit is refused."""

    def read(self, group: str) -> Usage | None:
        """Return the usage that was set."""
        return self.usage.get(group)

    def disks(self) -> dict[str, str]:
        """Return the devices that were set."""
        return self.devices

    def pressure(self, group: str, resource: str, *, full: bool) -> float:
        """Return the pressure that was set."""
        del full
        return self.waits.get((group, resource), 0.0)

    def values(self, group: str, names: Sequence[str]) -> dict[str, str]:
        """Return the files that were set, and those that follow from units."""
        unit, cpus = group.rpartition("/")[2], "cpuset.cpus.effective"
        allowed = cpu_list_text(self.cpus(unit)) if cpus in names else ""
        there = ({cpus: allowed} if allowed else {}) | dict(self.kept(unit))
        there |= self.files.get(group, {})
        return {name: there[name] for name in names if name in there}

    def children(self, group: str) -> list[str]:
        """Return the cgroups below one whose files were set."""
        below = {path.rpartition("/")[2] for path in self.files if path.startswith(f"{group}/")}
        found = {name for name in below if f"{group}/{name}" in self.files}
        return sorted(found | set(self.slices() if group == "/workload.slice" else ()))

    def set_hugepage_limits(self, group: str, arguments: Sequence[str]) -> bool:
        """Write limits of huge pages, `file=value` each; return False if more is in use."""
        limits = dict(argument.split("=", 1) for argument in arguments)
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
    observed: KernelObjects = field(default_factory=KernelObjects)
    """What `observe` returns, without the cgroups of running units."""
    network: FakeNetwork = field(default_factory=FakeNetwork)
    lacking: set[str] = field(default_factory=set)
    """Paths of programs that are missing."""
    texts: dict[str, str] = field(default_factory=dict)
    """Configuration files of the host by path."""
    cores: tuple[Core, ...] = ()
    """Cores that tasks may use; empty: one core for each CPU."""

    def __post_init__(self) -> None:
        """Make its parts, with no unit running."""
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
            self.cgroups.set_hugepage_limits(argv[4] or found[0].control_group, argv[5:])

    def _shell(
        self, argv: list[str], properties: Mapping[str, Property]
    ) -> Ended | Callable[[], Ended] | None:
        """Run the script that limits huge pages; for other scripts use the program `sh`."""
        if argv[3:4] == ["hugetlb"]:
            group = argv[4] or f"/workload.slice/{properties['Slice']}"
            return Ended(code=0 if self.cgroups.set_hugepage_limits(group, argv[5:]) else 1)
        other = self.systemd.programs.get("sh")
        return other(argv, properties) if other else None

    def _kept_of(self, unit: str) -> Mapping[str, str]:
        if not unit.endswith(".slice") or not self.systemd.units(unit):
            return {}
        properties, page = self.systemd.properties(unit), self.hardware.page_bytes
        names = {"MemoryMin": "memory.min", "MemoryLow": "memory.low"}
        sizes = {file: cast("int", properties.get(name, 0)) for name, file in names.items()}
        return {file: str(size // page * page) for file, size in sizes.items()}

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
        """Return it in the form that the agent takes."""
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

    def _observe(self, _state: Path, _run: Path) -> KernelObjects:
        units = self.systemd.units("twine-*.service")
        running = tuple(u.control_group for u in units if "/workload" in u.control_group)
        unowned = self.network.unowned
        links = {name: "" for name in unowned if name.startswith("tw")}
        namespaces = [name for name in unowned if name not in links]
        return replace(
            self.observed,
            cgroups=running + self.observed.cgroups,
            namespaces=(*self.observed.namespaces, *namespaces),
            veths={**self.observed.veths, **links},
        )

    def reboot(self) -> None:
        """Lose all units and get a new boot id; files stay."""
        self.systemd.reboot()
        self.network.networks, self.network.allowed = {}, None
        number = int(self.hardware.boot_id[-12:], 16) + 1
        self.hardware = replace(
            self.hardware, boot_id=f"{self.hardware.boot_id[:-12]}{number:012x}"
        )
