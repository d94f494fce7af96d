"""Power, snapshots and network links of the VMs, through virsh."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vm_lab.errors import LabError
from vm_lab.progress import PATIENCE_S
from vm_lab.sandbox import BRIDGE, LabSandbox

_PANIC = b"end Kernel panic"
_CHECK_S = 2.0
_MAX_RESTARTS = 3
"""Restarts of one VM during one boot; a kernel that always panics is left to the time limit."""


class Domains:
    """The libvirt domains of one lab; a VM's domain has the machine's name."""

    def __init__(self, sandbox: LabSandbox) -> None:
        self.sandbox = sandbox

    def virsh(self, *args: str, timeout_s: float = PATIENCE_S) -> str:
        """Return the output of virsh."""
        return self.sandbox.run(["virsh", *args], mounts=True, timeout_s=timeout_s)

    def power(self) -> dict[str, str]:
        """Return libvirt's state of each defined VM, such as "running" or "shut off"."""
        return parse_list(self.virsh("list", "--all"))

    def power_off(self, name: str) -> None:
        """Cut the power: no program in the guest can react."""
        self.virsh("destroy", name)

    def power_on(self, name: str) -> None:
        """Start the VM again from the disk it had."""
        self.virsh("start", name)

    def reset(self, name: str) -> None:
        """Start the VM again at once, as its reset button would."""
        self.virsh("reset", name)

    def suspend(self, name: str) -> None:
        """Stop the VM's processor."""
        self.virsh("suspend", name)

    def resume(self, name: str) -> None:
        """Resume the VM's processor."""
        self.virsh("resume", name)

    def snapshot(self, name: str, snapshot: str) -> None:
        """Save memory and disk inside the VM's qcow2 file."""
        self.virsh("snapshot-create-as", name, snapshot, "--atomic")

    def has_snapshot(self, name: str, snapshot: str) -> bool:
        """Return whether the VM has a snapshot of that name."""
        return snapshot in self.virsh("snapshot-list", name, "--name").split()

    def delete_snapshot(self, name: str, snapshot: str) -> None:
        """Drop a snapshot."""
        self.virsh("snapshot-delete", name, snapshot)

    def restore(self, name: str, snapshot: str) -> None:
        """Bring memory and disk back to the snapshot, and let the VM run."""
        self.virsh("snapshot-revert", name, snapshot, "--running", "--force")

    def tap(self, name: str) -> str:
        """Return the host's side of the VM's network link; a VM that is off has none."""
        taps = parse_iflist(self.virsh("domiflist", name))
        if not taps:
            raise LabError(f"{name} has no network link: is it off?")
        return taps[0]

    def connected(self, name: str) -> bool:
        """Return whether the VM's link is plugged into the lab's bridge."""
        link = self.sandbox.run(["ip", "-o", "link", "show", "dev", self.tap(name)])
        return f"master {BRIDGE}" in link

    def disconnect(self, name: str) -> None:
        """Unplug the VM from the bridge; the guest sees silence, not a lost carrier."""
        self.sandbox.run(["ip", "link", "set", "dev", self.tap(name), "nomaster"])

    def connect(self, name: str) -> None:
        """Plug the VM into the bridge again."""
        self.sandbox.run(["ip", "link", "set", "dev", self.tap(name), "master", BRIDGE])


@contextlib.contextmanager
def restarting_panicked(
    domains: Domains, consoles: Path, names: Sequence[str], say: Callable[[str], None]
) -> Iterator[None]:
    """Reset VMs whose kernel panics meanwhile, as their console logs show.

    An emulated kernel with several processors panics at few of its boots ("Oops: int3"): QEMU's
    TCG runs an instruction on one processor that another one is just replacing.
    """
    read = {name: _size(consoles / f"{name}.log") for name in names}
    ended = threading.Event()

    def watch() -> None:
        left = dict.fromkeys(names, _MAX_RESTARTS)
        while not ended.wait(_CHECK_S):
            for name in names:
                log = consoles / f"{name}.log"
                with contextlib.suppress(LabError, OSError):  # it was switched off meanwhile
                    if left[name] and has_panicked(log, read[name]):
                        left[name] -= 1
                        read[name] = _size(log)
                        say(f"{name}: its kernel panicked ({log}); it is started again")
                        domains.reset(name)

    thread = threading.Thread(target=watch, name="panics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def has_panicked(log: Path, offset: int) -> bool:
    """Return whether a console log reports a kernel panic after this offset.

    libvirt truncates the log when it starts a VM; then all of it counts.
    """
    size = _size(log)
    if size == offset:
        return False
    with log.open("rb") as file:
        file.seek(offset if size > offset else 0)
        return _PANIC in file.read()


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def parse_list(text: str) -> dict[str, str]:
    """Return name → state from `virsh list --all`."""
    rows = (line.split(maxsplit=2) for line in text.splitlines()[2:])
    return {row[1]: row[2].strip() for row in rows if len(row) == 3}


def parse_iflist(text: str) -> list[str]:
    """Return the interfaces from `virsh domiflist`; "-" stands for none."""
    rows = (line.split() for line in text.splitlines()[2:])
    return [row[0] for row in rows if row and row[0] != "-"]
