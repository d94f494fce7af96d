"""Selects KVM if it really runs a guest, otherwise TCG.

A /dev/kvm that can be opened proves nothing: nested virtualisation may fail only when a kernel
boots. So the guest's own kernel is started for a few seconds.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

PROBE_TIMEOUT_S = 10
# Printed late: by then the kernel has set up memory, interrupts and timers. Without an
# initrd and a disk it then panics, and `panic=-1` with `-no-reboot` ends QEMU.
PROOF = "Kernel panic"


@dataclass(frozen=True, slots=True)
class Accel:
    """The accelerator of the VMs, and the reason for it."""

    name: str
    """"kvm" or "tcg"."""
    reason: str


def find_accel(kernel: Path, device: Path = Path("/dev/kvm")) -> Accel:
    """Return KVM if the guest's kernel boots with it within a few seconds, otherwise TCG."""
    if not device.exists():
        return Accel("tcg", f"there is no {device}")
    argv = [
        *("qemu-system-x86_64", "-machine", "pc,accel=kvm", "-cpu", "host", "-m", "256"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", "stdio", "-kernel", str(kernel)),
        *("-append", "console=ttyS0 panic=-1"),
    ]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        output = done.stdout
        words = done.stderr.decode(errors="replace").strip().splitlines()
        problem = f": {words[-1] if words else 'the guest stops'}"
    except subprocess.TimeoutExpired as e:
        output, problem = e.stdout or b"", " a guest kernel hangs with it"
    if PROOF in output.decode(errors="replace"):
        return Accel("kvm", "the guest's kernel boots with it")
    return Accel("tcg", f"{device} exists, but{problem}")
