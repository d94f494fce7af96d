"""Resource use of cgroups, read from the kernel's files (cgroup-v2.rst)."""

from __future__ import annotations

from collections.abc import Sequence

from agent.machine import Usage
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

ROOT = "/sys/fs/cgroup"
_USEC = 1_000_000


class HostCgroups:
    """The unified hierarchy of the host. Blocking: call it through a lane."""

    def __init__(self, fs: KernelFs) -> None:
        self._fs = fs

    def read(self, group: str) -> Usage | None:
        """Return the use of a cgroup, None if it is gone; a disabled controller counts as 0."""
        folder = f"{ROOT}{group}"
        try:
            cpu = self._numbers(f"{folder}/cpu.stat")
            if cpu is None:
                return None
            memory = self._numbers(f"{folder}/memory.events") or {}
            read, written = self._io(f"{folder}/io.stat")
            return Usage(
                cpu_s=cpu.get("usage_usec", 0) / _USEC,
                throttled_s=cpu.get("throttled_usec", 0) / _USEC,
                memory_bytes=self._number(f"{folder}/memory.current"),
                memory_peak_bytes=self._number(f"{folder}/memory.peak"),
                oom_kills=memory.get("oom_kill", 0),
                read_bytes=read,
                written_bytes=written,
                processes=self._number(f"{folder}/pids.current"),
                cpu_pressure=self._pressure(f"{folder}/cpu.pressure"),
                memory_pressure=self._pressure(f"{folder}/memory.pressure"),
                io_pressure=self._pressure(f"{folder}/io.pressure"),
            )
        except KernelFileError as e:
            if isinstance(e.__cause__, OSError) and not self._fs.exists(folder):
                return None  # removed while it was read: ENODEV
            raise

    def pressure(self, group: str, resource: str, *, full: bool) -> float:
        """Return the share of the last 10 s in which some, or all, of a cgroup waited."""
        return self._pressure(f"{ROOT}{group}/{resource}.pressure", "full" if full else "some")

    def values(self, group: str, names: Sequence[str]) -> dict[str, str]:
        """Return the contents of files of a cgroup by name; missing files are left out."""
        read = {name: self._fs.find(f"{ROOT}{group}/{name}") for name in names}
        return {name: text.strip() for name, text in read.items() if text is not None}

    def children(self, group: str) -> list[str]:
        """Return the names of the cgroups directly below one, sorted."""
        folder = f"{ROOT}{group}"
        return [n for n in self._fs.names(folder) if self._fs.exists(f"{folder}/{n}/cgroup.events")]

    def disks(self) -> dict[str, str]:
        """Return the block devices whose use can be limited: names below /dev → the kernel's.

        The kernel's own names come first (`vda`), then udev's links (`disk/by-id/…`), each sorted.
        Links are read from udev's database, because the agent's own /dev has none
        (`PrivateDevices=`). If several devices claim a link, the highest priority wins, as in udev.
        """
        claims: dict[str, tuple[int, str]] = {}
        kernel = self._fs.names("/sys/class/block")
        for name in kernel:
            number = self._fs.find(f"/sys/class/block/{name}/dev")
            lines = (self._fs.find(f"/run/udev/data/b{number}") or "").splitlines()
            priority = next((int(line[2:]) for line in lines if line.startswith("L:")), 0)
            for link in (line[2:] for line in lines if line.startswith("S:")):
                claims[link] = max(claims.get(link, (priority, name)), (priority, name))
        links = {link: name for link, (_, name) in sorted(claims.items())}
        # The kernel writes ! for / in file names (cciss!c0d0).
        found = {name: name for name in kernel} | links
        return {at.replace("!", "/"): name.replace("!", "/") for at, name in found.items()}

    def _number(self, path: str) -> int:
        return int(self._fs.find(path) or 0)

    def _numbers(self, path: str) -> dict[str, int] | None:
        """Return a flat keyed file."""
        text = self._fs.find(path)
        if text is None:
            return None
        return {key: int(value) for key, value in (line.split() for line in text.splitlines())}

    def _io(self, path: str) -> tuple[int, int]:
        """Return bytes read and written, over all devices of a nested keyed file."""
        read = written = 0
        for line in (self._fs.find(path) or "").splitlines():
            fields = dict(f.split("=", 1) for f in line.split()[1:] if "=" in f)
            read += int(fields.get("rbytes", 0))
            written += int(fields.get("wbytes", 0))
        return read, written

    def _pressure(self, path: str, wanted: str = "some") -> float:
        """Return the share of the last 10 s in which some or all processes waited (psi.rst)."""
        for line in (self._fs.find(path) or "").splitlines():
            if line.startswith(wanted):
                return float(line.partition("avg10=")[2].split(" ", 1)[0]) / 100
        return 0.0
