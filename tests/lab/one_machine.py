"""A lab of its own: one booted machine and a control plane, for what a job's owner types."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.one_guest import KEPT
from tests.lab.the_lab import BIN, COMMAND_S, NAME, TheLab


class OneMachine(TheLab):
    """One machine, m1, and what its owners and operators say to it."""

    machines = ("m1",)

    def __init__(
        self, name: str, *, cpus: int | None = None, memory_mib: int | None = None
    ) -> None:
        """Boot nothing yet; `name` is what the lab is called, behind that of the suite's.

        None: as many CPUs, and as much memory, as the lab's machines have otherwise.
        """
        sizes = {"--cpus": cpus, "--memory-mib": memory_mib}
        self.sizes = [w for k, v in sizes.items() if v is not None for w in (k, str(v))]
        self.name = f"{NAME}-{name}"
        self.endpoint = f"unix:/run/twine-lab/{self.name}/cp.sock"

    def up(self) -> None:
        """Boot it, unless `TWINE_KEEP_LAB` says that it stands."""
        if not KEPT:
            self.lab("down")
            self.lab("up", "--count", "1", *self.sizes, timeout_s=1800)

    def down(self) -> None:
        """Take it away, and fail if a process, namespace or mount is left."""
        if not KEPT:
            self.lab("down")

    def deploy(self, name: str, folder: Path, text: str) -> None:
        """Apply a job, and return once it is stable."""
        words = ("job", "apply", str(self.file(name, folder, text)))
        self.run("twinectl", *words, "--wait", "--timeout", "1200s", timeout_s=1800)

    def file(self, name: str, folder: Path, text: str) -> Path:
        """Return a job file."""
        file = folder / f"{name}.toml"
        file.write_text(f'name = "{name}"\n{text}')
        return file

    def read(self, path: str) -> bytes:
        """Return a file of the machine."""
        argv = [str(BIN / "twine-lab"), "ssh", "--name", self.name, "m1", "--", f"cat {path}"]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=True
        )
        return done.stdout

    def inside(self, task: str, command: str) -> str:
        """Return what a shell inside a task says."""
        return self.ssh("m1", f"twine-agent exec {task} -- /bin/sh -c '{command}' 2>&1 || true")
