"""A host for the tests: files that behave like the kernel's, programs, disk and clock.

It copies the restrictions of the real kernel. It writes only to files that exist, refuses values
out of range, separates with tabs and keeps only one of two conflicting values. It gives only as
many huge pages as it has memory for. `boot` loses everything that was set at run time.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agent.machine import Completed
from agent.machine.hardware import read_hardware
from agent.machine.kernelfs import KernelFs
from sidekick.apply import ApplyRun
from sidekick.bootline import HUGEPAGES, group_in
from sidekick.disk import Disk
from sidekick.facts import read_facts
from sidekick.profile import Library, Profile
from sidekick.record import Target
from sidekick.report import Report
from sidekick.setting import Host
from sidekick.settings import SETTINGS
from sidekick.settings.hugepages_line import SIZES, PageArguments
from sidekick.settings.kernel import Kernel
from sidekick.settings.sysctl import SysctlValue
from sidekick.state import StateFolder
from sidekick.targets import target_of
from sidekick.unattended import resume
from wire.errors import KernelFileError, ProgramError

POOL = "hugepages/hugepages-2048kB/nr_hugepages"
LARGE_POOL = "hugepages/hugepages-1048576kB/nr_hugepages"
KERNEL = "6.12.0-cloud-amd64"
PROFILES = Path(__file__).resolve().parents[3] / "profiles"

ROOT_LINE = "root=/dev/vda1 ro quiet"

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
GRUBENV = "/boot/grub/grubenv"
CUSTOM = "/boot/grub/custom.cfg"
MENU = """set default="0"
if [ "${{next_entry}}" ] ; then
   set default="${{next_entry}}"
   set next_entry=
   save_env next_entry
   set boot_once=true
fi
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple' {{
	insmod ext2
	search --no-floppy --fs-uuid --set=root 1234
	linux	/boot/vmlinuz-{kernel} {line}
	initrd	/boot/initrd.img-{kernel}
}}
### BEGIN /etc/grub.d/41_custom ###
if [ -f  ${{config_directory}}/custom.cfg ]; then
  source ${{config_directory}}/custom.cfg
fi
"""
VARIABLES = "/sys/firmware/efi/efivars"
VENDOR = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
COUNTERPARTS = {"dirty_ratio": "dirty_bytes", "dirty_background_ratio": "dirty_background_bytes"}
COUNTERPARTS |= {b: a for a, b in COUNTERPARTS.items()}


class Crash(BaseException):
    """The process has ended, as by SIGKILL: no code catches this."""


@dataclass
class Points:
    """Counts the points where a crash can occur, and crashes at one of them."""

    at: int | None = None
    passed: int = 0

    def pass_(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Crash(f"at point {self.passed}")


class FakeKernel(KernelFs, frozen=True):
    """The kernel's files, with the kernel's behaviour."""

    free_pages: dict[str, int] = msgspec.field(default_factory=dict)
    """Huge pages that a node can give; a node without an entry gives any number."""
    free_large: dict[str, int] = msgspec.field(default_factory=dict)
    """The same for pages of 1 GiB."""
    rounds: dict[str, Callable[[str], str]] = msgspec.field(default_factory=dict)
    """The value that the kernel stores for a written value, by path."""
    refuses: set[str] = msgspec.field(default_factory=set)
    """Paths that cannot be written."""
    compacted: list[int] = msgspec.field(default_factory=list)
    """The number of pages that each compaction frees, in order."""
    points: Points = msgspec.field(default_factory=Points)
    writes: list[str] = msgspec.field(default_factory=list)
    """Every path that was written, in order."""

    def write(self, path: str, value: str) -> None:
        self.points.pass_()
        self.writes.append(path)
        if path in self.refuses:
            raise KernelFileError(f"cannot set {path} to {value!r}: Permission denied")
        name = path.rpartition("/")[2]
        if path.startswith("/proc/sys/"):
            value = self._checked(path, name, value)
            if name in COUNTERPARTS:
                super().write(path.replace(name, COUNTERPARTS[name]), "0\n")
        if path.endswith("nr_hugepages"):
            node = path.split("/")[5] if "/node/" in path else "all"
            free = self.free_large if "1048576kB" in path else self.free_pages
            most = max(free.get(node, 1 << 30), int(self.read(path)))
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
    """The real disk, with a crash point before and after each operation."""

    points: Points

    def write(self, path: Path, text: str) -> None:
        self.points.pass_()
        super().write(path, text)
        self.points.pass_()

    def append(self, path: Path, line: str) -> None:
        self.points.pass_()
        super().append(path, line)
        self.points.pass_()

    def reserve(self, path: Path, size: int) -> None:
        self.points.pass_()
        super().reserve(path, size)
        self.points.pass_()

    def remove(self, path: Path) -> None:
        self.points.pass_()
        super().remove(path)
        self.points.pass_()


@dataclass
class FakeProcesses:
    """Programs that are recorded, with a crash point before and after each."""

    fs: FakeKernel
    points: Points
    ran: list[list[str]] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        self.points.pass_()
        self.ran.append(list(argv))
        name = argv[0].rpartition("/")[2]
        if name in self.fails:
            raise ProgramError(f"{name} failed with 1: {self.fails[name]}")
        if name == "grub-reboot":
            self.grubenv(argv[1])
        if name == "grub-editenv" and argv[2:] == ["unset", "next_entry"]:
            self.grubenv("")
        if name == "bootctl":
            variable = {"set-oneshot": "LoaderEntryOneShot", "set-default": "LoaderEntryDefault"}
            self.variable(variable[argv[1]], argv[2])
        self.points.pass_()
        return Completed(0, "", "")

    def grubenv(self, entry: str) -> None:
        """Record the entry that GRUB boots next, once."""
        text = f"# GRUB Environment Block\nnext_entry={entry}\n###########"
        self.fs.path(GRUBENV).write_text(text if entry else "# GRUB Environment Block\n######")

    def variable(self, name: str, value: str) -> None:
        """Set an EFI variable, or remove it."""
        path = self.fs.path(f"{VARIABLES}/{name}-{VENDOR}")
        if value:
            path.write_bytes(b"\7\0\0\0" + f"{value}\0".encode("utf-16-le"))
        else:
            path.unlink(missing_ok=True)

    def lines(self, argv: Sequence[str]) -> Iterator[bytes]:
        raise AssertionError("sidekick reads no program's lines")

    def commands(self) -> list[str]:
        """Return the programs that ran, with their subcommand if they have one."""
        return [" ".join(a for a in argv[:2] if not a.startswith("/")) for argv in self.ran]


@dataclass
class FakeHost:
    """A whole host below one folder."""

    root: Path
    memory_mib: int = 1024
    nodes: int = 1
    cmdline: str = ROOT_LINE
    time_s: float = 1000.0

    def __post_init__(self) -> None:
        self.points = Points()
        self.fs = FakeKernel(self.root, points=self.points)
        self.processes = FakeProcesses(self.fs, self.points)
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
        pairs = PageArguments.of(group_in(self.cmdline, HUGEPAGES))
        nodes = [f"node{number}" for number in range(self.nodes)]
        for size, pool in ((SIZES["2m"], POOL), (SIZES["1g"], LARGE_POOL)):
            pages = {node: pairs.reserved(size, node, self.nodes) for node in nodes}
            self.put(f"/sys/kernel/mm/{pool}", str(sum(pages.values())))
            for node, count in pages.items():
                self.put(f"/sys/devices/system/node/{node}/{pool}", str(count))

    def power_cycle(self) -> None:
        """Start as the boot loader decides: a one-shot entry first, then its default."""
        self.boot(self.next_line())

    def next_line(self) -> str:
        """Return the line that the boot loader boots next, and consume its one-shot entry."""
        if self.fs.exists("/boot/grub/grub.cfg"):
            custom = self.fs.find(CUSTOM) or ""
            once = "next_entry=twine" in (self.fs.find(GRUBENV) or "")
            self.processes.grubenv("")
            ours = 'set default="twine"' in custom or once
            text = custom if ours and "menuentry" in custom else self.fs.read("/boot/grub/grub.cfg")
            found = re.search(r"^\s*linux\s+\S+ (.*)$", text, re.MULTILINE)
            assert found
            return found[1]
        if self.fs.exists("/boot/efi/loader"):
            names = [self.efi("LoaderEntryOneShot"), self.efi("LoaderEntryDefault"), "debian.conf"]
            self.processes.variable("LoaderEntryOneShot", "")
            texts = [self.fs.find(f"/boot/efi/loader/entries/{name}") for name in names if name]
            text = next(text for text in texts if text)
            return " ".join(re.findall(r"^options (.*)$", text, re.MULTILINE))
        return ROOT_LINE

    def efi(self, variable: str) -> str:
        """Return an EFI variable of the boot loader."""
        path = self.fs.path(f"{VARIABLES}/{variable}-{VENDOR}")
        return path.read_bytes()[4:].decode("utf-16-le").rstrip("\0") if path.exists() else ""

    def with_grub(self, file_system: str = "ext4") -> FakeHost:
        """Install GRUB as Debian does."""
        self.put("/usr/sbin/grub-reboot", "")
        self.put("/boot/grub/grub.cfg", MENU.format(kernel=KERNEL, line=ROOT_LINE))
        self.processes.grubenv("")
        self.put("/proc/self/mountinfo", f"28 1 254:1 / / rw shared:1 - {file_system} /dev/vda1 rw")
        return self

    def with_systemd_boot(self) -> FakeHost:
        """Install systemd-boot as Debian does, and mark this boot as started by it."""
        self.put("/usr/bin/bootctl", "")
        self.put(f"{VARIABLES}/x", "")
        self.processes.variable("LoaderInfo", "systemd-boot 252.22")
        text = f"title Debian\nversion {KERNEL}\noptions {ROOT_LINE}\nlinux /d/linux\ninitrd /d/i"
        self.put("/boot/efi/loader/entries/debian.conf", text)
        return self

    def put(self, path: str, text: str) -> None:
        """Make a file, of the kernel or another one, in its state before sidekick runs."""
        target = self.fs.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def drop(self, path: str) -> None:
        """Remove a file."""
        self.fs.path(path).unlink()

    def host(self, root: Path | None = None) -> Host:
        """Return the host as sidekick sees it; the hardware is read again."""
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

    def pages(self, node: int = 0, pool: str = POOL) -> int:
        """Return the huge pages of a node."""
        return int(self.fs.read(f"/sys/devices/system/node/node{node}/{pool}"))

    def live(self) -> dict[str, str]:
        """Return everything that can be set at run time."""
        paths = [f"/proc/sys/{name.replace('.', '/')}" for name in SYSCTLS]
        pools = [f"node{node}/{pool}" for node in range(self.nodes) for pool in (POOL, LARGE_POOL)]
        paths += [f"/sys/devices/system/node/{pool}" for pool in pools]
        actions = ("drop_caches", "compact_memory")
        return {p: self.fs.path(p).read_text() for p in paths if not p.endswith(actions)}

    def everything(self) -> dict[str, str | None]:
        """Return everything that a profile can change, including the boot loader's files."""
        files = ["/etc/twine/boot-line", CUSTOM, GRUBENV]
        files += [f"/boot/efi/loader/entries/{n}" for n in ("debian.conf", "twine.conf")]
        variables = {v: self.efi(v) for v in ("LoaderEntryDefault", "LoaderEntryOneShot")}
        return {**self.live(), **{path: self.fs.find(path) for path in files}, **variables}

    def apply(self, target: Target, **how: object) -> Report:
        """Carry out one run."""
        return ApplyRun(self.host(), self.state, target, **how).carry_out()  # type: ignore[arg-type]

    def resume(self) -> Report:
        """Run the step that sidekick runs at every boot."""
        return resume(self.host(), self.state)


def a_profile(name: str = "web", **parts: object) -> Profile:
    """Return a profile with these sysctls, hugepages and cmdline."""
    sysctl = {
        key: value if isinstance(value, SysctlValue) else SysctlValue(value=value)  # type: ignore[arg-type]
        for key, value in parts.pop("sysctl", {}).items()  # type: ignore[attr-defined]
    }
    cmdline = parts.pop("cmdline", ())
    parts.setdefault("kernel", Kernel(cmdline=[*cmdline]))  # type: ignore[misc]
    sections = {"sysctl": sysctl, **parts}
    return Profile(name=name, sections=sections)


def a_target(fake: FakeHost, name: str = "web", generation: int = 1, **parts: object) -> Target:
    """Return the target that a profile sets for a host."""
    return target_of(a_profile(name, **parts), fake.host(), generation)


def shipped(fake: FakeHost, name: str) -> Target:
    """Return the target that a profile of the repository sets for a host."""
    host = fake.host()
    return target_of(Library([PROFILES], SETTINGS).load(name, read_facts(host.fs)), host)
