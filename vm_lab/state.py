"""Where a lab keeps its files, and how it finds its own processes again.

Later commands need these files. A process is recorded with its start time, so that a process
number that the kernel reuses is not mistaken for it.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import msgspec

from vm_lab.cache import partial_file
from vm_lab.errors import LabError
from vm_lab.progress import PATIENCE_S

STATE_ROOT = Path("/var/lib/twine-lab")
RUN_ROOT = Path("/run/twine-lab")
DAMAGED = (msgspec.DecodeError, UnicodeError)
"""Errors of a file that a power cut or an earlier version of the lab left."""


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True):
    """One process, also after the kernel reuses its number."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks after boot at which it started."""


class LabRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of this lab, as `up` decided them."""

    name: str
    count: int
    cpus: int
    memory_mib: int
    variant: str
    """Which guest image: "base", "bench" or "grub" (boots from its disk)."""
    image: str
    """Name of the image, which ends in the hash of what it was built from."""
    accel: str
    """"kvm" or "tcg"."""
    bare: bool


class LabPaths:
    """The files of one lab: state that lasts, and sockets below /run."""

    def __init__(self, name: str, state_root: Path = STATE_ROOT, run_root: Path = RUN_ROOT) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,15}", name):
            raise LabError(
                f"{name!r} cannot name a lab",
                hint="use up to 16 lower-case letters, digits and dashes, a letter first",
            )
        self.name = name
        self.state_root = state_root
        self.run_root = run_root
        self.state = state_root / name
        self.run = run_root / name
        self.lock = run_root / f"{name}.lock"
        self.record = self.state / "lab.json"
        self.holder = self.state / "holder.json"
        self.namespace = self.state / "namespace.json"
        self.control_plane = self.state / "control-plane.json"
        self.control_plane_state = self.state / "control-plane"
        self.control_plane_config = self.state / "control-plane.toml"
        self.control_plane_started_config = self.state / "control-plane-started.toml"
        """What the control plane was last started with."""
        self.control_plane_log = self.state / "control-plane.log"
        self.web_console = self.state / "web-console.json"
        """The process of `twinectl ui` that runs on after the demo."""
        self.control_plane_socket = self.run / "cp.sock"
        self.autoscaler = self.run / "autoscaler.sock"
        self.conveyor = self.run / "conveyor.sock"
        """Where the demos start these services, and the console of the lab reads them."""
        self.pool = self.state / "pool"
        self.boot = self.state / "boot"
        self.consoles = self.state / "console"
        self.snapshots = self.state / "snapshots"
        self.vagrant_home = self.state / "vagrant-home"
        self.vagrant_dotfiles = self.state / "vagrant"
        self.vagrant_log = self.state / "vagrant.log"
        self.ssh = self.run / "ssh"
        self.interfaces_before = self.state / "interfaces-before.json"

    def snapshot(self, name: str) -> Path:
        """Return the folder of a snapshot's files; the name is a plain word."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise LabError(f"{name!r} cannot name a snapshot", hint="use letters, digits, - and _")
        return self.snapshots / name

    def make(self) -> None:
        """Create the folders, readable by root only."""
        for folder in (self.state, self.run, self.pool, self.boot, self.consoles, self.ssh):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save(self, file: Path, value: msgspec.Struct) -> None:
        """Write the value so that a reader sees the old file or the new one."""
        with partial_file(file) as partial:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(value)))

    def find_record(self) -> LabRecord | None:
        """Return the record of the lab, or None if there is no lab.

        Raises `LabError` if it is damaged.
        """
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=LabRecord)
        except FileNotFoundError:
            return None
        except DAMAGED as e:
            hint = f"remove the lab with `twine-lab down --name {self.name}`"
            raise LabError(f"cannot use {self.record}: {e}", hint=hint) from e

    def get_record(self) -> LabRecord:
        """Return the record of the lab. Raises `LabError` if there is no lab."""
        record = self.find_record()
        if record is None:
            raise LabError(f"there is no lab {self.name!r}", hint="start it with `twine-lab up`")
        return record


def process_ref(pid: int) -> ProcessRef:
    """Return the reference to a process that runs now."""
    ticks = _start_ticks(pid)
    if ticks is None:
        raise LabError(f"process {pid} has ended already")
    return ProcessRef(pid=pid, start_ticks=ticks)


def find_process(file: Path) -> int | None:
    """Return the number of the process recorded in the file if that one still runs."""
    try:
        ref = msgspec.json.decode(file.read_bytes(), type=ProcessRef)
    except (FileNotFoundError, *DAMAGED):
        return None
    return ref.pid if _start_ticks(ref.pid) == ref.start_ticks else None


def end_process(file: Path, patience_s: float = PATIENCE_S) -> None:
    """End the process recorded in the file, if there is one, and remove the file.

    After `patience_s` the process is killed.
    """
    deadline, asked = time.monotonic() + patience_s, False
    while (pid := find_process(file)) is not None:
        if time.monotonic() > deadline:
            signal_process(pid, signal.SIGKILL)
        elif not asked:
            signal_process(pid, signal.SIGTERM)
            asked = True
        time.sleep(0.05)
    file.unlink(missing_ok=True)


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold any bytes.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] == b"Z" else int(fields[19])


def require_root() -> None:
    """Raise `LabError` for an ordinary user: namespaces and libvirt need root."""
    if os.geteuid() != 0:
        raise LabError(
            "the lab needs root: it makes namespaces, bridges and mounts", hint="use sudo"
        )
