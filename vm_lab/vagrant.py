"""The `vagrant` program, driven inside the sandbox."""

import os
import shutil
import subprocess
from pathlib import Path

from vm_lab.errors import LabError
from vm_lab.image.build import Image
from vm_lab.progress import PATIENCE_S
from vm_lab.sandbox import NETWORK, LabSandbox
from vm_lab.state import LabRecord
from vm_lab.topology import Topology

VAGRANT_CWD = Path(__file__).resolve().parent
BOX_VERSION = "1"


class Vagrant:
    """`vagrant` with the settings of one lab."""

    def __init__(self, sandbox: LabSandbox, topology: Topology, record: LabRecord) -> None:
        self.sandbox = sandbox
        self.topology = topology
        self.record = record

    def environment(self) -> dict[str, str]:
        """Return the environment: all values that the Vagrantfile needs, none from the home."""
        paths = self.sandbox.paths
        settings = {
            "VAGRANT_CWD": str(VAGRANT_CWD),
            "VAGRANT_HOME": str(paths.vagrant_home),
            "VAGRANT_DOTFILE_PATH": str(paths.vagrant_dotfiles),
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "VAGRANT_DEFAULT_PROVIDER": "libvirt",
            "VAGRANT_NO_COLOR": "1",
            "TWINE_LAB_IMAGE": str(paths.boot),
            "TWINE_LAB_BOX": self.record.image,
            "TWINE_LAB_COUNT": str(self.record.count),
            "TWINE_LAB_CPUS": str(self.record.cpus),
            "TWINE_LAB_MEMORY_MIB": str(self.record.memory_mib),
            "TWINE_LAB_ACCEL": self.record.accel,
            "TWINE_LAB_BOOT": "disk" if self.record.variant == "grub" else "direct",
            "TWINE_LAB_NETWORK": NETWORK,
            "TWINE_LAB_SUBNET": str(self.topology.network),
            "TWINE_LAB_POOL_PATH": str(paths.pool),
            "TWINE_LAB_CONSOLES": str(paths.consoles),
            "TWINE_LAB_PREFIX": "",
        }
        for machine in self.topology.first(self.record.count):
            settings[f"TWINE_LAB_MAC_{machine.name}"] = machine.mac
        return {**os.environ, **settings}

    def has_box(self) -> bool:
        """Return whether the lab has an image already, which `up` then uses."""
        return (self.sandbox.paths.boot / "initrd").exists()

    def install_box(self, image: Image) -> None:
        """Link the box and its disk to the places where vagrant and libvirt would copy them.

        This takes 12 s less than `vagrant box add` and an upload to the pool.
        """
        paths = self.sandbox.paths
        box = paths.vagrant_home / "boxes" / image.name / BOX_VERSION / "libvirt"
        box.mkdir(parents=True, exist_ok=True)
        for name in ("metadata.json", "Vagrantfile", "box.img"):
            _link(image.folder / name, box / name)
        _link(image.disk, paths.pool / f"{image.name}_vagrant_box_image_{BOX_VERSION}_box.img")
        _link(image.kernel, paths.boot / "vmlinuz")
        _link(image.initrd, paths.boot / "initrd")

    def run(self, *args: str, timeout_s: float = PATIENCE_S) -> None:
        """Run one vagrant command; its output goes to the lab's vagrant.log."""
        log = self.sandbox.paths.vagrant_log
        argv = self.sandbox.command(["vagrant", *args], mounts=True)
        began_at = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            try:
                done = subprocess.run(
                    argv,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as e:
                raise LabError(
                    f"`vagrant {' '.join(args)}` did not end within {timeout_s:g} s",
                    hint=f"see {log}",
                ) from e
        if done.returncode != 0:
            lines = log.read_bytes()[began_at:].decode(errors="replace").strip().splitlines()
            tail = "\n".join(lines[-12:])
            raise LabError(f"`vagrant {' '.join(args)}` failed:\n{tail}", hint=f"see {log}")

    def interactive(self, *args: str) -> int:
        """Run one vagrant command on this terminal; return its exit status."""
        argv = self.sandbox.command(["vagrant", *args], mounts=True)
        return subprocess.run(argv, env=self.environment(), check=False).returncode


def _link(source: Path, target: Path) -> None:
    """Link `target` to `source`, or copy it if they are on different file systems."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
