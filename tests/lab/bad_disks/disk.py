"""A disk that hangs, fails or logs its writes, with the agent's state on it.

Runs as root in a booted guest. It consists of a file, a loop device, a device-mapper target and a
btrfs.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import TracebackType

FOLDER = Path("/var/lib/bad-disks")
STATE = Path("/var/lib/twine")
SECTOR = 512
SIZE = 3 << 30
"""Size of the disk in bytes: more than the agent keeps free."""
LOG = 2 << 30
WAIT_S = 900.0


def shell(command: str, timeout_s: float = 900.0) -> str:
    done = subprocess.run(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def loop_of(name: str, size: int) -> str:
    """Return a loop device over an empty file of this number of bytes."""
    path = FOLDER / name
    path.unlink(missing_ok=True)
    path.touch()
    shell(f"truncate -s {size} {path}")
    return shell(f"losetup --find --show {path}")


class BadDisk:
    """A btrfs at the agent's state folder; the test chooses how its device behaves."""

    def __init__(self, *, logged: bool = False) -> None:
        self.sectors = SIZE // SECTOR
        self.logged = logged
        self.loops: list[str] = []

    def __enter__(self) -> BadDisk:
        FOLDER.mkdir(exist_ok=True)
        shell("systemctl stop twine-agent.service")
        self.loops.append(loop_of("disk", SIZE))
        table = f"linear {self.loops[0]} 0"
        if self.logged:
            self.loops.append(loop_of("log", LOG))
            table = f"log-writes {self.loops[0]} {self.loops[1]}"
        shell(f"dmsetup create bad --table '0 {self.sectors} {table}'")
        shell("mkfs.btrfs -q /dev/mapper/bad")
        self.mount()
        return self

    def mount(self) -> None:
        shell(f"mount -o noatime,nodiscard /dev/mapper/bad {STATE}")

    def behaves(self, table: str) -> None:
        """Set the behaviour of the device: `linear`, `error`, `flakey`, …"""
        shell("dmsetup suspend --noflush --nolockfs bad")
        shell(f"dmsetup load bad --table '0 {self.sectors} {table}'")
        shell("dmsetup resume bad")

    def works(self) -> None:
        self.behaves(f"linear {self.loops[0]} 0")

    def block_all(self) -> None:
        """Block all reads and writes until `unblock` is called."""
        shell("dmsetup suspend --noflush --nolockfs bad")

    def unblock(self) -> None:
        shell("dmsetup resume bad")

    def mark(self, word: str) -> None:
        """Add a mark to the log of writes, after everything that is on the disk now."""
        shell(f"dmsetup message bad 0 mark {word}")

    def disconnect(self) -> None:
        """Stop the tasks and the agent, and detach the disk; its files remain."""
        shell("systemctl stop twine-agent.service")  # else it starts tasks again that were stopped
        shell("systemctl stop 'twine-task-*.service'")
        shell(f"umount {STATE}")
        until = time.monotonic() + WAIT_S
        while shell("dmsetup info -c --noheadings -o open bad") != "0":
            # the kernel frees the mount namespaces of ended processes later
            assert time.monotonic() < until, shell(f"grep -l ' {STATE} ' /proc/*/mountinfo; true")
            time.sleep(0.5)
        shell("dmsetup remove --retry bad")

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if Path("/dev/mapper/bad").exists():
            self.unblock()
            if not self.logged:
                self.works()
            self.disconnect()
        for loop in self.loops:
            shell(f"losetup --detach {loop}")
        shell("rm -rf /run/twine/records")  # tasks of another disk
        if kind is None:
            shell(f"rm -r {FOLDER}")
