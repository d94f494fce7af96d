"""Hosts of `tests/data/hosts` as trees of files, with a simulated kernel and programs."""

from __future__ import annotations

import errno
import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_host import PROFILES, FakeDisk, FakeKernel, Points

from agent.machine import Completed
from agent.machine.ethtool import RECORDED
from agent.machine.hardware import read_hardware
from agent.machine.mounts import Mount
from sidekick.cpulists import cpu_list_text as cpu_text
from sidekick.cpulists import parse_cpu_list
from sidekick.facts import read_facts
from sidekick.profile import Library
from sidekick.record import Target
from sidekick.setting import Host
from sidekick.settings import SETTINGS
from sidekick.settings.service_manager import RecordedServices
from sidekick.state import StateFolder
from sidekick.targets import target_of
from wire.errors import KernelFileError, ProgramError

DATA = Path(__file__).resolve().parents[2] / "data" / "hosts"
NAMES = sorted(path.stem for path in DATA.glob("*.toml"))
CPUS = "/sys/devices/system/cpu"
ACTIONS = {"drop_caches", "compact_memory"}
ATIMES = {"noatime", "relatime", "strictatime"}
DEFAULT_QDISC = "/proc/sys/net/core/default_qdisc"
"""The kernel keeps the module of the named qdisc in use."""
QUEUE_DEPTHS = {"none": "1023", "mq-deadline": "64", "kyber": "256", "bfq": "64"}


class TreeKernel(FakeKernel, frozen=True):
    """The kernel's reaction to writes to the files that settings change."""

    def write(self, path: str, value: str) -> None:
        now = self.find(path) or ""
        name = path.rpartition("/")[2]
        if "[" in now and "]" in now:
            choices = now.replace("[", "").replace("]", "").split()
            if value not in choices:
                self._refuse(path, value, errno.EINVAL)
            super().write(path, " ".join(f"[{c}]" if c == value else c for c in choices))
            if name == "scheduler":
                super().write(path.replace("scheduler", "nr_requests"), QUEUE_DEPTHS[value])
            return
        offers = {
            "scaling_governor": "scaling_available_governors",
            "energy_performance_preference": "energy_performance_available_preferences",
        }.get(name)
        if offers and value not in self.read(path.replace(name, offers)).split():
            self._refuse(path, value, errno.EINVAL)
        folder = path.removesuffix(name)
        is_preference = name == "energy_performance_preference"
        if is_preference and "performance" == self.read(f"{folder}scaling_governor") != value:
            self._refuse(path, value, errno.EBUSY)
        preference = f"{folder}energy_performance_preference"
        if f"{name}={value}" == "scaling_governor=performance" and self.exists(preference):
            super().write(preference, value)  # it keeps this value, as with amd_pstate
        if name == "no_turbo" and " ida" not in self.read("/proc/cpuinfo"):
            self._refuse(path, value, errno.EPERM)
        if path == f"{CPUS}/smt/control":
            self._switch_threads(value)
        if path.startswith(RECORDED):
            value = self._as_a_driver(value)
        if name == "cgroup.subtree_control":
            left = [c for c in now.split() if f"-{c}" not in value.split()]
            left += [w[1:] for w in value.split() if w[0] == "+" and w[1:] not in left]
            value = " ".join(left)
        super().write(path, value)

    def _as_a_driver(self, value: str) -> str:
        """Apply the dependencies of a network driver.

        Scatter-gather needs checksums, and segmentation needs scatter-gather. Neither is switched
        on again automatically.
        """
        new = dict(line.split(" ", 1) for line in value.strip().splitlines())
        leaders = {
            "scatter_gather": "tx_checksum",
            "tso": "scatter_gather",
            "gso": "scatter_gather",
        }
        for follower, leader in leaders.items():
            if new[leader] == "0":
                new[follower] = "0"
        return "\n".join(f"{k} {v}" for k, v in new.items())

    def _refuse(self, path: str, value: str, why: int) -> None:
        raise KernelFileError(f"cannot set {path} to {value!r}: {os.strerror(why)}")

    def _switch_threads(self, value: str) -> None:
        if value not in ("on", "off"):
            self._refuse(f"{CPUS}/smt/control", value, errno.EINVAL)
        cpus = [int(n[3:]) for n in self.names(CPUS) if re.fullmatch(r"cpu\d+", n)]
        first = {
            c
            for c in cpus
            if parse_cpu_list(self.read(f"{CPUS}/cpu{c}/topology/thread_siblings_list"))[0] == c
        }
        self.path(f"{CPUS}/online").write_text(cpu_text(cpus if value == "on" else first) + "\n")


@dataclass
class TreeProcesses:
    """systemctl and modprobe, as far as settings use them."""

    fs: TreeKernel
    ran: list[list[str]] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        self.ran.append(list(argv))
        program, *words = argv[0].rpartition("/")[2], *argv[1:]
        match [program, *words]:
            case ["systemctl", "set-property", "--runtime", unit, assignment]:
                _, _, value = assignment.partition("=")
                self._put(f"/sys/fs/cgroup/{unit}/cpuset.cpus", value)
            case ["systemctl", "daemon-reload"]:
                self._reload()
            case ["modprobe", "-r", name]:
                if f"sch_{self.fs.find(DEFAULT_QDISC)}" == name:
                    raise ProgramError(f"modprobe: FATAL: Module {name} is in use.")
                self.fs.path(f"/sys/module/{name}/initstate").unlink()
                self.fs.path(f"/sys/module/{name}").rmdir()
            case ["modprobe", name]:
                self._put(f"/sys/module/{name}/initstate", "live")
            case ["update-grub"]:
                pass
            case _:
                raise ProgramError(f"{' '.join(argv)} failed with 1: unknown to the test")
        return Completed(0, "", "")

    def lines(self, argv: Sequence[str]) -> Iterator[bytes]:
        raise AssertionError("sidekick reads no program's lines")

    def _reload(self) -> None:
        drop_in = "/run/systemd/system/workload.slice.d/50-twine-controllers.conf"
        if self.fs.exists("/sys/fs/cgroup/workload.slice") and not self.fs.exists(drop_in):
            control = "/sys/fs/cgroup/workload.slice/cgroup.subtree_control"
            self._put(control, "cpuset cpu io memory pids")

    def _put(self, path: str, cpu_list_text: str) -> None:
        put(self.fs, path, cpu_list_text)


class TreeServices(RecordedServices):
    """Services of a tree that can be started and stopped."""

    def __init__(self, fs: TreeKernel) -> None:
        super().__init__(fs)
        self._tree = fs

    def start(self, unit: str) -> None:
        self._populate(unit, 1)

    def stop(self, unit: str) -> None:
        self._populate(unit, 0)

    def _populate(self, unit: str, processes: int) -> None:
        found = self.load(unit)
        assert found is not None
        path = f"/sys/fs/cgroup{found.control_group}/cgroup.events"
        put(self._tree, path, f"populated {processes}\nfrozen 0")


class TreeMounts:
    """Mounts of a tree, with the kernel's reaction to requests."""

    def __init__(self, fs: TreeKernel) -> None:
        self._fs = fs

    def set_atime(self, mount: Mount, mode: str) -> None:
        kept = [o for o in mount.options if o not in ATIMES]
        self._show(mount, 5, kept + [mode] * (mode != "strictatime"))

    def set_option(self, mount: Mount, key: str, value: str | None) -> None:
        name = key.removeprefix("no")
        kept = [o for o in mount.of_file_system if o.partition("=")[0] != name]
        if value != "0" and key == name:
            # the kernel shows its own options before those of the file system
            place = 1 if value is None else len(kept)
            kept.insert(place, key if value is None else f"{key}={value}")
        self._show(mount, -1, kept)

    def _show(self, mount: Mount, column: int, options: list[str]) -> None:
        rows = [line.split(" ") for line in self._fs.read("/proc/self/mountinfo").splitlines()]
        for row in (row for row in rows if row[0] == str(mount.id)):
            row[column] = ",".join(options)
        put(self._fs, "/proc/self/mountinfo", "\n".join(" ".join(row) for row in rows))


class RecordedHost:
    """One host of `tests/data/hosts` below a folder."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.root = name, root
        self.points = Points()
        self.fs = TreeKernel(root, points=self.points)
        self.processes = TreeProcesses(self.fs)
        self.state = StateFolder(root / "var/lib/twine/sidekick", FakeDisk(self.points))
        self.time_s = 1000.0
        (root / "etc").mkdir(parents=True, exist_ok=True)
        about = described(name)
        for path, cpu_list_text in about["files"].items():
            put(self.fs, path, cpu_list_text)
        for sysctl, cpu_list_text in about["sysctl"].items():
            put(self.fs, f"/proc/sys/{sysctl.replace('.', '/')}", cpu_list_text)
        registers = {int(k, 16): v for k, v in about["msr"].items() if k != "cpus"}
        for cpu in range(about["msr"].get("cpus", 0)):
            data = bytearray(max(registers) + 8)
            for number, value in registers.items():
                data[number : number + 8] = value.to_bytes(8, "little")
            path = self.fs.path(f"/dev/cpu/{cpu}/msr")
            path.parent.mkdir(parents=True)
            path.write_bytes(data)

    def host(self, root: Path | None = None) -> Host:
        return Host(
            fs=self.fs,
            processes=self.processes,
            disk=self.state.disk,
            hardware=read_hardware(self.fs),
            now=lambda: 1_700_000_000.0,
            monotonic=self._tick,
            sleep=self._sleep,
            services=TreeServices(self.fs),
            mounts=TreeMounts(self.fs),
        )

    def _tick(self) -> float:
        self.time_s += 0.001
        return self.time_s

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def target(self, profile: str, generation: int = 1) -> Target:
        """Return the target that a profile of the repository sets for this host."""
        host = self.host()
        found = Library([PROFILES], SETTINGS).load(profile, read_facts(self.fs))
        return target_of(found, host, generation)

    def everything(self) -> dict[str, bytes]:
        """Return every file except sidekick's own and the files that only trigger an action."""
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = f"{folder}/{name}".removeprefix(str(self.root))
                if not path.startswith("/var/lib/twine") and name not in ACTIONS:
                    found[path] = Path(folder, name).read_bytes().rstrip()
        return found


def put(fs: FakeKernel, path: str, cpu_list_text: str) -> None:
    target = f"{fs.root}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "w") as file:
        file.write(cpu_list_text.strip("\n") + "\n")


def described(name: str) -> dict[str, Any]:
    """Return the files, sysctls and registers of a host; it overrides those of its parent."""
    raw = tomllib.loads((DATA / f"{name}.toml").read_text())
    about: dict[str, Any] = {"files": {}, "sysctl": {}, "msr": {}}
    if "extends" in raw:
        about = described(raw["extends"])
        gone = tuple(raw.get("gone", ()))
        about["files"] = {p: t for p, t in about["files"].items() if not p.startswith(gone or "\0")}
    for path, cpu_list_text in raw.get("files", {}).items():
        about["files"] |= dict(_expanded(path, cpu_list_text))
    about["sysctl"] |= raw.get("sysctl", {})
    about["msr"] |= raw.get("msr", {})
    return about


def _expanded(path: str, cpu_list_text: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"\{(\d+)-(\d+)\}", path)
    fixed, firsts, lasts = parts[0::3], parts[1::3], parts[2::3]
    ranges = [range(int(a), int(b) + 1) for a, b in zip(firsts, lasts, strict=True)]
    for chosen in itertools.product(*ranges):
        pieces = itertools.zip_longest(fixed, map(str, chosen), fillvalue="")
        whole = "".join(itertools.chain.from_iterable(pieces))
        yield (
            whole,
            re.sub(
                r"\$(\d)([+-]\d+)?",
                lambda m: str(chosen[int(m[1])] + int(m[2] or 0)),  # noqa: B023
                cpu_list_text,
            ),
        )
