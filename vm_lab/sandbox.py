"""One network namespace and one mount namespace per lab, and a private libvirtd in them.

A holder process keeps the namespaces; other processes enter them. Every process in the network
namespace belongs to the lab, so it can be found and ended without its name.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from vm_lab.cache import cache_root
from vm_lab.errors import LabError
from vm_lab.progress import PATIENCE_S, wait_until
from vm_lab.state import DAMAGED, LabPaths, find_process, process_ref, signal_process
from vm_lab.topology import LabMachine, Topology

BRIDGE = "br-lab"
NETWORK = "twine-lab"
POOL = "default"
STOP_S = 8.0
"""How long processes of a lab may take to end before they are killed."""
# libvirt's fixed folders, and the lab's own ones that cover them in the mount namespace.
LIBVIRT_FOLDERS = {
    Path("/etc/libvirt"): "libvirt/etc",
    Path("/var/lib/libvirt"): "libvirt/lib",
    Path("/var/cache/libvirt"): "libvirt/cache",
    Path("/var/log/libvirt"): "libvirt/log",
    Path("/run/libvirt"): "libvirt/run",
}

# No daemon other than libvirtd: no polkit, no virtlogd, no cgroups, no security driver.
QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
"""
LIBVIRTD_CONF = """\
auth_unix_ro = "none"
auth_unix_rw = "none"
unix_sock_group = "root"
unix_sock_rw_perms = "0700"
host_uuid = "{host_uuid}"
"""


class NamespaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the lab's network namespace, to find its processes later."""

    inode: int


class LabSandbox:
    """The namespaces of one lab."""

    def __init__(self, paths: LabPaths) -> None:
        self.paths = paths

    def holder(self) -> int | None:
        """Return the process that keeps the namespaces, or None when the lab is down."""
        return find_process(self.paths.holder)

    def command(self, argv: Sequence[str | Path], *, mounts: bool = False) -> list[str]:
        """Return the command that runs `argv` in the lab's network.

        With `mounts` it also sees the lab's libvirt in the usual places.
        """
        holder = self.holder()
        if holder is None:
            raise LabError(
                f"lab {self.paths.name!r} is not running", hint="start it with `twine-lab up`"
            )
        spaces = ["-n", "-m"] if mounts else ["-n"]
        return ["nsenter", "-t", str(holder), *spaces, "--", *(str(arg) for arg in argv)]

    def run(
        self, argv: Sequence[str | Path], *, mounts: bool = False, timeout_s: float = PATIENCE_S
    ) -> str:
        """Return the output of a command. Raises `LabError` with its error output on failure."""
        try:
            done = subprocess.run(
                self.command(argv, mounts=mounts),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as e:
            raise LabError(f"`{_command_text(argv)}` did not end within {timeout_s:g} s") from e
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip()
            raise LabError(
                f"`{_command_text(argv)}` failed with status {done.returncode}: {output}"
            )
        return done.stdout

    def spawn(self, argv: Sequence[str | Path], log: Path, *, mounts: bool = False) -> int:
        """Start a process that outlives this command; return its number."""
        return spawn_detached(self.command(argv, mounts=mounts), log)

    def start(self, topology: Topology, machines: Sequence[LabMachine]) -> None:
        """Start namespaces, libvirtd, network and storage pool, unless they run."""
        self.start_namespaces()
        if not self.libvirtd_answers():
            self._start_libvirtd()
        self._ensure_started("net", NETWORK, network_xml(topology, machines))
        self._ensure_started("pool", POOL, pool_xml(self.paths.pool))

    def start_namespaces(self) -> None:
        """Create the namespaces and a process that keeps them, unless they exist."""
        if self.holder() is None:
            self.stop()  # end the remaining processes of a killed holder
            self._start_holder()

    def processes(self) -> list[int]:
        """Return every process of the lab, the holder's included.

        These are the processes in the recorded network namespace, and in that of any process that
        sees the lab's mounts: so none is missed if the record is lost.
        """
        inodes = network_namespaces_seeing(self.paths.state)
        recorded = self.namespace_inode()
        if recorded is not None:
            inodes.add(recorded)
        inodes.discard(Path("/proc/self/ns/net").stat().st_ino)
        return [pid for inode in inodes for pid in processes_in_namespace(inode)]

    def namespace_inode(self) -> int | None:
        """Return the recorded inode number of the network namespace."""
        with contextlib.suppress(FileNotFoundError, *DAMAGED):
            data = self.paths.namespace.read_bytes()
            return msgspec.json.decode(data, type=NamespaceRecord).inode
        return None

    def stop(self) -> None:
        """End every process of the lab; with the last one, namespaces and mounts are gone."""
        deadline = time.monotonic() + STOP_S
        while pids := self.processes():
            last_call = time.monotonic() > deadline
            for pid in pids:
                signal_process(pid, signal.SIGKILL if last_call else signal.SIGTERM)
            if time.monotonic() > deadline + 10:
                raise LabError(f"processes {pids} of lab {self.paths.name!r} do not end")
            time.sleep(0.2)

    def _start_holder(self) -> None:
        ready = self.paths.run / "holder-ready"
        ready.unlink(missing_ok=True)
        script = [
            "set -e",
            "ip link set lo up",
            "mount -t sysfs sysfs /sys",  # shows this namespace's interfaces; libvirt looks there
        ]
        for place, name in LIBVIRT_FOLDERS.items():
            own = self.paths.state / name
            own.mkdir(parents=True, exist_ok=True)
            _make_mount_point(place, self.paths.state_root)
            script.append(f"mount --bind {own} {place}")
        for file in self._account_files():
            script.append(f"mount --bind {file} /etc/{file.name}")
        script += [f"touch {ready}", "exec sleep infinity"]
        log = self.paths.state / "holder.log"
        argv = ["unshare", "--net", "--mount", "--propagation", "private"]
        pid = spawn_detached([*argv, "sh", "-c", "\n".join(script)], log)
        _wait_for(f"the namespaces; see {log}", ready.exists, 60)
        self.paths.save(self.paths.holder, process_ref(pid))
        inode = Path(f"/proc/{pid}/ns/net").stat().st_ino
        self.paths.save(self.paths.namespace, NamespaceRecord(inode=inode))

    def _account_files(self) -> list[Path]:
        """Write passwd and group with the names that libvirtd insists on resolving.

        Debian's libvirt-daemon-system would create them on the host; here they are names
        of root's that only the lab sees.
        """
        files = []
        for name, row in (("passwd", "x:0:0::/:/bin/false"), ("group", "x:0:")):
            file = self.paths.state / "libvirt" / name
            known = Path("/etc", name).read_text()
            added = "".join(
                f"{account}:{row}\n"
                for account in ("libvirt-qemu", "libvirt-dnsmasq")
                if f"{account}:" not in known
            )
            file.write_text(known + added)
            files.append(file)
        return files

    def _start_libvirtd(self) -> None:
        etc = self.paths.state / LIBVIRT_FOLDERS[Path("/etc/libvirt")]
        (etc / "qemu.conf").write_text(QEMU_CONF)
        (etc / "libvirtd.conf").write_text(LIBVIRTD_CONF.format(host_uuid=_host_uuid()))
        # libvirt does not create this folder if its parent is not its own
        (self.paths.state / "libvirt/log/qemu").mkdir(parents=True, exist_ok=True)
        log = self.paths.state / "libvirtd.log"
        # Probing QEMU takes libvirtd 7 s; it checks itself whether a cached result is current.
        own, kept = self.paths.state / "libvirt/cache", cache_root() / "libvirt"
        if kept.is_dir():
            shutil.copytree(kept, own, dirs_exist_ok=True)
        # Otherwise it would use the host's pid file, which another lab may have locked.
        pid_file = self.paths.state / "libvirtd.pid"
        self.spawn(["libvirtd", "--pid-file", pid_file], log, mounts=True)
        _wait_for(f"libvirtd; see {log}", self.libvirtd_answers, PATIENCE_S)
        shutil.copytree(own, kept, dirs_exist_ok=True)

    def libvirtd_answers(self) -> bool:
        """Return whether the lab's libvirtd answers."""
        if not (self.paths.state / "libvirt/run/libvirt-sock").exists():
            return False
        try:
            self.run(["virsh", "version"], mounts=True, timeout_s=60)
        except LabError:
            return False
        return True

    def _ensure_started(self, kind: str, name: str, xml: str) -> None:
        """Define and start a network ("net") or a storage pool ("pool") unless it is there."""
        if name not in self.run(["virsh", f"{kind}-list", "--all", "--name"], mounts=True).split():
            file = self.paths.state / f"{kind}.xml"
            file.write_text(xml)
            self.run(["virsh", f"{kind}-define", file], mounts=True)
        if name not in self.run(["virsh", f"{kind}-list", "--name"], mounts=True).split():
            self.run(["virsh", f"{kind}-start", name], mounts=True)


def spawn_detached(argv: list[str], log: Path) -> int:
    """Start a process in a new session that outlives this process; return its number.

    It is not a Popen, because this process does not wait for it.
    """
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsid=True)


def network_xml(topology: Topology, machines: Sequence[LabMachine]) -> str:
    """Return libvirt's definition of the lab's network: isolated, one fixed address per VM."""
    hosts = "".join(f"<host mac='{m.mac}' name='{m.name}' ip='{m.address}'/>" for m in machines)
    # No spanning tree: a port then forwards at once, which heals a partition at once.
    return (
        f"<network><name>{NETWORK}</name><bridge name='{BRIDGE}' stp='off' delay='0'/>"
        f"<dns enable='no'/><ip address='{topology.host_address}' "
        f"netmask='{topology.network.netmask}'><dhcp>"
        f"<range start='{topology.network[200]}' end='{topology.network[250]}'/>"
        f"{hosts}</dhcp></ip></network>\n"
    )


def pool_xml(folder: Path) -> str:
    """Return libvirt's definition of the storage pool that holds the VMs' disks."""
    return (
        f"<pool type='dir'><name>{POOL}</name><target><path>{folder}</path>"
        "<permissions><mode>0700</mode><owner>0</owner><group>0</group></permissions>"
        "</target></pool>\n"
    )


def processes_in_namespace(inode: int) -> list[int]:
    """Return the processes whose network namespace has that inode number."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended, or is a zombie
            if Path(f"/proc/{pid}/ns/net").stat().st_ino == inode:
                pids.append(pid)
    return pids


def network_namespaces_seeing(folder: Path) -> set[int]:
    """Return the network namespaces of processes with something of the folder mounted."""
    inodes = set()
    for process in (Path(f"/proc/{pid}") for pid in psutil.pids()):
        with contextlib.suppress(OSError):
            if f" {folder}/" in (process / "mountinfo").read_text():
                inodes.add((process / "ns/net").stat().st_ino)
    return inodes


def remove_mount_points(state_root: Path) -> None:
    """Remove the mount points that a lab made on the host, once no lab is left."""
    record = state_root / "made-folders.json"
    if not record.exists() or any(p.is_dir() for p in state_root.iterdir()):
        return
    for place in map(Path, _made_folders(record)):
        with contextlib.suppress(FileNotFoundError):  # the removal of another lab may be faster
            if not any(place.iterdir()):
                place.rmdir()
    record.unlink(missing_ok=True)


def _make_mount_point(place: Path, state_root: Path) -> None:
    """Create the folder if the host lacks it, and record that the lab must remove it."""
    if place.exists():
        return
    record = state_root / "made-folders.json"
    record.write_bytes(msgspec.json.encode([*_made_folders(record), str(place)]))
    place.mkdir(parents=True, exist_ok=True)  # another lab may be faster


def _made_folders(record: Path) -> list[str]:
    """Return the folders that labs made on the host; a damaged record names none."""
    with contextlib.suppress(FileNotFoundError, *DAMAGED):
        return msgspec.json.decode(record.read_bytes(), type=list[str])
    return []


def _host_uuid() -> str:
    """Return a UUID for libvirtd, which otherwise reads one from DMI tables."""
    try:
        digits = Path("/etc/machine-id").read_text().strip()
    except FileNotFoundError:
        digits = ""
    digits = digits or Path("/proc/sys/kernel/random/uuid").read_text().strip().replace("-", "")
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"


def _wait_for(what: str, ready: Callable[[], bool], timeout_s: float) -> None:
    wait_until(ready, lambda: LabError(f"waited {timeout_s:g} s for {what}"), timeout_s)


def _command_text(argv: Sequence[str | Path]) -> str:
    return " ".join(str(arg) for arg in argv)
