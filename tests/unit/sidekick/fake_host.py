"""A host for the tests: files that behave like the kernel's, programs, disk and clock.

Where the real kernel is unkind, so is this one: it writes only to files that exist, refuses
what is out of range, separates with tabs, keeps only one of two twins, and gives as many
huge pages as it has memory for. `boot` loses everything that was set at run time.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.errors import KernelFileError, ProgramError
from agent.machine import Completed
from agent.machine.hardware import read_hardware
from agent.machine.kernelfs import KernelFs
from sidekick.facts import read_facts
from sidekick.profile import Kernel, Library, Profile, SysctlValue
from sidekick.setting import Host
from sidekick.standing import target_of
from sidekick.state import Disk, StateFolder, Target

POOL = "hugepages/hugepages-2048kB/nr_hugepages"
KERNEL = "6.12.0-cloud-amd64"
PROFILES = Path(__file__).resolve().parents[3] / "profiles"

SYSCTLS = {
    "vm.swappiness": "60",
    "vm.dirty_ratio": "20",
    "vm.dirty_bytes": "0",
    "vm.dirty_background_ratio": "10",
    "vm.dirty_background_bytes": "0",
    "vm.dirty_expire_centisecs": "3000",
    "vm.min_free_kbytes": "45056",
    "vm.max_map_count": "65530",
    "vm.drop_caches": "0",
    "vm.compact_memory": "0",
    "kernel.panic": "0",
    "kernel.panic_on_oops": "0",
    "fs.inotify.max_user_instances": "128",
    "net.core.somaxconn": "4096",
    "net.core.netdev_max_backlog": "1000",
    "net.core.rmem_max": "212992",
    "net.core.wmem_max": "212992",
    "net.ipv4.ip_local_port_range": "32768\t60999",
    "net.ipv4.tcp_max_syn_backlog": "128",
    "net.ipv4.tcp_slow_start_after_idle": "1",
    "net.ipv4.tcp_fin_timeout": "60",
    "net.ipv4.tcp_rmem": "4096\t131072\t6291456",
    "net.ipv4.tcp_wmem": "4096\t16384\t4194304",
}
TWINS = {"dirty_ratio": "dirty_bytes", "dirty_background_ratio": "dirty_background_bytes"}
TWINS |= {b: a for a, b in TWINS.items()}


class Crash(BaseException):
    """The process is gone, as by SIGKILL: nothing catches this."""


@dataclass
class Points:
    """Counts the places where a crash can strike, and strikes at one of them."""

    at: int | None = None
    passed: int = 0

    def pass_(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Crash(f"at point {self.passed}")


@dataclass(frozen=True)
class FakeKernel(KernelFs):
    """The kernel's files, with the kernel's manners."""

    free_pages: dict[str, int] = field(default_factory=dict)
    """Huge pages that a node can give; any number where it says nothing."""
    rounds: dict[str, Callable[[str], str]] = field(default_factory=dict)
    """What the kernel makes of a value, by path."""
    refuses: set[str] = field(default_factory=set)
    """Paths that cannot be written."""
    compacted: list[int] = field(default_factory=list)
    """How many pages each compaction brings, in order."""
    points: Points = field(default_factory=Points)
    writes: list[str] = field(default_factory=list)
    """Every path that was written, in order."""

    def write(self, path: str, value: str) -> None:
        self.points.pass_()
        self.writes.append(path)
        if path in self.refuses:
            raise KernelFileError(f"cannot set {path} to {value!r}: Permission denied")
        name = path.rpartition("/")[2]
        if path.startswith("/proc/sys/"):
            value = self._checked(path, name, value)
            if name in TWINS:
                super().write(path.replace(name, TWINS[name]), "0\n")
        if path.endswith("nr_hugepages"):
            node = path.split("/")[5] if "/node/" in path else "all"
            most = max(self.free_pages.get(node, 1 << 30), int(self.read(path)))
            value = str(min(int(value), most))
        if name == "compact_memory" and self.compacted:
            more = self.compacted.pop(0)
            for node in self.free_pages:
                self.free_pages[node] += more
        super().write(path, self.rounds.get(path, str)(value) + "\n")
        self.points.pass_()

    def _checked(self, path: str, name: str, value: str) -> str:
        value = "\t".join(value.split())
        out_of_range = name == "swappiness" and not 0 <= int(value) <= 200
        if out_of_range or (name.startswith("dirty") and name.endswith("bytes") and value == "0"):
            reason = os.strerror(errno.EINVAL)
            raise KernelFileError(f"cannot set {path} to {value!r}: {reason}")
        return value


@dataclass
class FakeDisk(Disk):
    """The real disk, with a place to crash before and after each operation."""

    points: Points

    def write(self, path: Path, text: str) -> None:
        self.points.pass_()
        super().write(path, text)
        self.points.pass_()

    def append(self, path: Path, line: str) -> None:
        self.points.pass_()
        super().append(path, line)
        self.points.pass_()

    def remove(self, path: Path) -> None:
        self.points.pass_()
        super().remove(path)
        self.points.pass_()


@dataclass
class FakeProcesses:
    """Programs that leave a trace; `update-grub` does what it does."""

    fs: FakeKernel
    ran: list[list[str]] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        self.ran.append(list(argv))
        if argv[0] in self.fails:
            raise ProgramError(f"{argv[0]} failed with 1: {self.fails[argv[0]]}")
        if argv[0].endswith("update-grub"):
            drop_in = self.fs.find("/etc/default/grub.d/90-twine.cfg") or ""
            ours = re.findall(r'^GRUB_CMDLINE_LINUX="\$GRUB_CMDLINE_LINUX (.*)"$', drop_in, re.M)
            line = f"linux /vmlinuz root=/dev/vda1 {' '.join(ours)}"
            self.fs.path("/boot/grub/grub.cfg").write_text(line)
        return Completed(0, "", "")

    def lines(self, argv: Sequence[str]) -> Iterator[bytes]:
        raise AssertionError("sidekick reads no program's lines")

    def commands(self) -> list[str]:
        """Return the programs that ran, with their verb where they have one."""
        return [" ".join(a for a in argv[:2] if not a.startswith("/")) for argv in self.ran]


@dataclass
class FakeHost:
    """A whole host below one folder."""

    root: Path
    memory_mib: int = 1024
    nodes: int = 1
    cmdline: str = "root=/dev/vda1 ro quiet"
    time_s: float = 1000.0

    def __post_init__(self) -> None:
        self.points = Points()
        self.fs = FakeKernel(self.root, points=self.points)
        self.processes = FakeProcesses(self.fs)
        self.state = StateFolder(self.root / "var/lib/twine/sidekick", FakeDisk(self.points))
        self.slept: list[float] = []
        self.boots = 0
        self.put("/proc/sys/kernel/hostname", "m1")
        self.put("/proc/sys/kernel/osrelease", KERNEL)
        self.put("/proc/cpuinfo", "model name\t: Test CPU\n")
        self.put("/sys/devices/system/cpu/online", "0")
        self.put("/sys/devices/system/cpu/cpu0/topology/physical_package_id", "0")
        for program in ("/usr/sbin/kexec",):
            self.put(program, "")
        self.put(f"/boot/vmlinuz-{KERNEL}", "")
        self.put(f"/boot/initrd.img-{KERNEL}", "")
        (self.root / "etc").mkdir(exist_ok=True)
        self.boot(self.cmdline)

    def boot(self, cmdline: str | None = None) -> None:
        """Start the kernel: what was set at run time is lost."""
        self.boots += 1
        self.cmdline = self.cmdline if cmdline is None else cmdline
        self.put("/proc/cmdline", self.cmdline)
        self.put("/proc/sys/kernel/random/boot_id", f"boot-{self.boots}")
        total_kib = self.memory_mib * 1024
        self.put("/proc/meminfo", f"MemTotal: {total_kib} kB\nHugepagesize:    2048 kB\n")
        for name, value in SYSCTLS.items():
            self.put(f"/proc/sys/{name.replace('.', '/')}", value)
        found = re.search(r"\bhugepages=(\d+)", self.cmdline)
        pages = int(found[1]) if found else 0
        self.put(f"/sys/kernel/mm/{POOL}", str(pages))
        for node in range(self.nodes):
            self.put(f"/sys/devices/system/node/node{node}/{POOL}", str(pages // self.nodes))

    def with_grub(self) -> FakeHost:
        """Install a boot loader."""
        self.put("/etc/default/grub.d/50-cloudimg.cfg", "")
        self.put("/usr/sbin/update-grub", "")
        self.put("/boot/grub/grub.cfg", "linux /vmlinuz root=/dev/vda1")
        return self

    def put(self, path: str, text: str) -> None:
        """Make a file, the kernel's or another, as it is before sidekick comes."""
        target = self.fs.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def drop(self, path: str) -> None:
        """Remove a file."""
        self.fs.path(path).unlink()

    def host(self, root: Path | None = None) -> Host:
        """Return the host as sidekick sees it, hardware read anew."""
        return Host(
            fs=self.fs,
            processes=self.processes,
            disk=self.state.disk,
            hardware=read_hardware(self.fs),
            now=lambda: 1_700_000_000.0,
            monotonic=self._tick,
            sleep=self._sleep,
        )

    def _tick(self) -> float:
        self.time_s += 0.001
        return self.time_s

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds

    def sysctl(self, name: str) -> str:
        """Return a value as the kernel shows it."""
        return self.fs.read(f"/proc/sys/{name.replace('.', '/')}")

    def pages(self, node: int = 0) -> int:
        """Return the huge pages of a node."""
        return int(self.fs.read(f"/sys/devices/system/node/node{node}/{POOL}"))

    def live(self) -> dict[str, str]:
        """Return everything that can be set at run time."""
        paths = [f"/proc/sys/{name.replace('.', '/')}" for name in SYSCTLS]
        paths += [f"/sys/devices/system/node/node{node}/{POOL}" for node in range(self.nodes)]
        actions = ("drop_caches", "compact_memory")
        return {p: self.fs.path(p).read_text() for p in paths if not p.endswith(actions)}

    def everything(self) -> dict[str, str | None]:
        """Return what a profile can change, the staged command line included."""
        files = ("/etc/kernel/cmdline", "/etc/default/grub.d/90-twine.cfg")
        return {**self.live(), **{path: self.fs.find(path) for path in files}}


def a_profile(name: str = "web", **parts: object) -> Profile:
    """Return a profile with these sysctls (underscores separate), hugepages and cmdline."""
    sysctl = {
        key: value if isinstance(value, SysctlValue) else SysctlValue(value=value)  # type: ignore[arg-type]
        for key, value in parts.pop("sysctl", {}).items()  # type: ignore[attr-defined]
    }
    parts.setdefault("hugepages", None)
    cmdline = parts.pop("cmdline", ())
    sections = {"sysctl": sysctl, "kernel": Kernel(cmdline=[*cmdline]), **parts}  # type: ignore[misc]
    return Profile(name=name, sections=sections)


def a_target(fake: FakeHost, name: str = "web", generation: int = 1, **parts: object) -> Target:
    """Return what a profile asks of a host."""
    return target_of(a_profile(name, **parts), fake.host(), generation)


def shipped(fake: FakeHost, name: str) -> Target:
    """Return what one of the profiles of the repository asks of a host."""
    host = fake.host()
    return target_of(Library([PROFILES]).load(name, read_facts(host.fs)), host)
