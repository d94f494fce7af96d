"""The guest as sidekick's engine sees it: compared as a whole, killed at any step.

Runs as root in a booted guest. A run is forked, so that SIGKILL ends it at its current step, as the
kernel or an operator would. What it left behind is on the real kernel and the real disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace as _replace

from agent.machine import Completed
from agent.machine.kernelfs import KernelFs
from agent.machine.process import HostProcesses
from sidekick.apply import ApplyRun
from sidekick.context import real_host
from sidekick.disk import Disk
from sidekick.facts import read_facts
from sidekick.profile import PROFILES, Library
from sidekick.record import Target
from sidekick.report import Report
from sidekick.setting import Host
from sidekick.settings import SETTINGS, services
from sidekick.state import StateFolder
from sidekick.targets import target_of
from sidekick.unattended import resume

STATE = Path("/var/lib/twine/sidekick")
OURS = Path("/run/profiles-of-the-test")
KILLED = -signal.SIGKILL
MLOCK_ONFAULT = 1
PUNCH_HOLE = 3
"""Keeps the file's size (include/uapi/linux/falloc.h)."""

MOVES = re.compile(
    r"fs\.(dentry-state|file-nr|inode-nr|inode-state)$|kernel\.(ns_last_pid|pty\.nr|tainted)$"
    r"|kernel\.random\.|fs\.quota|net\.netfilter\.nf_conntrack_count$"
    r"|vm\.(drop_caches|compact_memory|stat_refresh)$"
)
"""Sysctls that are counters, or that only trigger an action. The kernel of an emulated guest is
tainted if the guest waited for its host long enough to report a soft lockup.
"""
COUNTS = re.compile(r"^/sys/block/loop|/stats/|/khugepaged/(pages_collapsed|full_scans)$")
FILES = (
    "/sys/kernel/mm/transparent_hugepage/**/*",
    "/sys/kernel/mm/hugepages/*/nr_hugepages",
    "/sys/block/*/queue/*",
    "/proc/irq/*/smp_affinity_list",
    "/proc/irq/default_smp_affinity",
    "/sys/fs/cgroup/cgroup.subtree_control",
    "/sys/fs/cgroup/*.slice/cgroup.subtree_control",
    "/sys/fs/cgroup/*.slice/cpuset.cpus",
    "/sys/class/net/*/queues/*/rps_cpus",
    "/etc/twine/boot-line",
    "/boot/grub/custom.cfg",
    "/boot/grub/grubenv",
    "/run/twine/*",
    "/etc/systemd/system/*",
    "/run/systemd/system/**/*",
)
LISTED = ("/boot/*", "/boot/grub/*", "/boot/loader/**/*")
COMMANDS = {
    "ethtool": "for o in -k -c -g -l; do ethtool $o eth0 2>/dev/null; done",
    "module": "cut -d' ' -f1 /proc/modules",
    "unit": "systemctl list-units --plain --no-legend --type=service --state=running"
    " | cut -d' ' -f1",
}
OTHERS = {
    "module": re.compile(r"(x|ip|ip6|nf|eb)_?tables|nf(t|netlink)?(_.*)?|veth|bridge|stp|llc|tun"),
    "unit": services.REFUSED,
}
"""Listed items that sidekick does not change. The agent's firewall and task networks load their
kernel modules; no profile setting does. A profile cannot name the services of Twine itself, of
systemd and of user sessions. All of these start on demand and end when they are idle.
"""


def output_of(command: str) -> str:
    """Return the output of a command line; also of one that fails."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False).stdout


def everything() -> dict[str, str]:
    """Return everything that a profile could change: sysctls, mounts, boot entries, devices."""
    found = {}
    for line in output_of("sysctl -a 2>/dev/null").splitlines():
        name, _, value = line.partition(" = ")
        if not MOVES.search(name):
            found[f"sysctl {name}"] = found.get(f"sysctl {name}", "") + value
    found["mounts"] = Path("/proc/self/mounts").read_text()
    for pattern in FILES:
        for path in sorted(Path("/").glob(pattern[1:])):
            if path.is_file() and not COUNTS.search(str(path)):
                with contextlib.suppress(OSError):
                    found[str(path)] = path.read_text(errors="replace").rstrip()
    for pattern in LISTED:
        for path in sorted(Path("/").glob(pattern[1:])):
            small = path.is_file() and path.stat().st_size < 1 << 20
            found[f"{path} is there"] = (
                hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
            )
    found["ethtool"] = output_of(COMMANDS["ethtool"])
    for kind, others in OTHERS.items():
        names = (n for n in output_of(COMMANDS[kind]).split() if not others.fullmatch(n))
        found |= {f"{kind} {name}": "there" for name in names}
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the differences as text."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name}: {before.get(name, '(not there)')!r} -> {after.get(name, '(gone)')!r}"
        for name in names
        if before.get(name) != after.get(name)
    ]


class Points:
    """Counts the points where a run changes the host, and kills the process at one of them.

    The count is in memory that is shared with forked processes.
    """

    def __init__(self) -> None:
        self._count = mmap.mmap(-1, 8)
        self.at = 0

    @property
    def passed(self) -> int:
        return int.from_bytes(self._count[:8], "little")

    def restart(self, at: int) -> None:
        self._count[:8] = bytes(8)
        self.at = at

    def pass_(self) -> None:
        self._count[:8] = (self.passed + 1).to_bytes(8, "little")
        if self.passed == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedFs(KernelFs, frozen=True):
    """The kernel's files; there is a point before and after each write."""

    points: Points = msgspec.field(default_factory=Points)

    def write(self, path: str, value: str) -> None:
        self.points.pass_()
        super().write(path, value)
        self.points.pass_()


class CountedDisk(Disk):
    """The disk; there is a point before and after each change of it."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def write(self, path: Path, text: str) -> None:
        self._points.pass_()
        super().write(path, text)
        self._points.pass_()

    def append(self, path: Path, line: str) -> None:
        self._points.pass_()
        super().append(path, line)
        self._points.pass_()

    def remove(self, path: Path) -> None:
        self._points.pass_()
        super().remove(path)
        self._points.pass_()


class CountedProcesses(HostProcesses):
    """Programs; there is a point before and after each call."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        self._points.pass_()
        done = super().run(argv, timeout_s=timeout_s, check=check)
        self._points.pass_()
        return done


class GuestHost:
    """This guest, through sidekick's engine."""

    def __init__(self) -> None:
        self.points = Points()
        self.disk = CountedDisk(self.points)
        self.state = StateFolder(STATE, self.disk)

    def host(self) -> Host:
        real = real_host(Path("/"))
        return Host(
            fs=CountedFs(points=self.points),
            processes=CountedProcesses(self.points),
            disk=self.disk,
            hardware=real.hardware,
            now=real.now,
            monotonic=real.monotonic,
            sleep=real.sleep,
        )

    def target(self, name: str) -> Target:
        """Return the settings of a profile for this guest: one of the test's, or a shipped one."""
        host = self.host()
        library = Library([OURS, *PROFILES], SETTINGS)
        return target_of(library.load(name, read_facts(host.fs)), host)

    def run(self, target: Target, command: str = "apply") -> Report:
        host = self.host()
        with self.state.lock(60.0, host.monotonic, host.sleep):
            return ApplyRun(host, self.state, target, command=command).carry_out()

    def apply(self, name: str) -> Report:
        return self.run(self.target(name))

    def release(self) -> Report:
        return self.run(Target(), "rollback")

    def resume(self) -> Report:
        return resume(self.host(), self.state)

    def as_after_a_boot(self) -> None:
        """Turn the state into that of an earlier boot; settings of a boot must have been restored
        before.
        """
        self.state.save(_replace(self.state.load(), boot_id="an-earlier-boot"))

    def forked(self, act: Callable[[], object], kill_at: int = 0) -> int:
        """Run in a forked process that is killed at this point; return how the process ended."""
        self.points.restart(kill_at)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                act()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.points.at = 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def points_of(self, act: Callable[[], object]) -> int:
        """Return the number of kill points of a run that is not killed."""
        assert self.forked(act) == 0
        return self.points.passed


def profile(name: str, text: str) -> str:
    """Write a profile for the test, and return its name."""
    OURS.mkdir(exist_ok=True)
    (OURS / f"{name}.toml").write_text(f"description = 'of a test'\n{text}")
    return name


@contextlib.contextmanager
def memory_in_pieces(share: float) -> Iterator[None]:
    """Hold this share of memory so that no two free pages are adjacent.

    The pages are locked and unmovable, so compaction finds nothing either.
    """
    movable = Path("/proc/sys/vm/compact_unevictable_allowed")
    before = movable.read_text()
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    size = int(total * share) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.memfd_create("pieces")
    try:
        os.truncate(file, size)
        held = mmap.mmap(file, size)
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(held)))
        movable.write_text("0")
        if libc.mlock2(start, ctypes.c_size_t(size), MLOCK_ONFAULT):
            raise OSError(ctypes.get_errno(), "mlock2")
        for at in range(0, size, mmap.PAGESIZE):
            held[at] = 1
        for at in range(0, size, 2 * mmap.PAGESIZE):
            if libc.fallocate(file, PUNCH_HOLE, ctypes.c_long(at), ctypes.c_long(mmap.PAGESIZE)):
                raise OSError(ctypes.get_errno(), "fallocate")
        yield
    finally:
        movable.write_text(before)
        os.truncate(file, 0)  # returns the pages, whether mapped or locked
        os.close(file)
