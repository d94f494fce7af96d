"""A separate lab with one booted machine and a control plane, for commands of a job's owner."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.lab_client import BIN, COMMAND_S, NAME, LabClient
from tests.lab.one_guest import KEPT


class OneMachine(LabClient):
    """One machine, m1, and the commands of its owners and operators."""

    machines = ("m1",)

    def __init__(
        self, name: str, *, cpus: int | None = None, memory_mib: int | None = None
    ) -> None:
        """Boot nothing yet; `name` is the lab's name, appended to that of the suite's lab.

        None: the lab's default number of CPUs, and its default memory.
        """
        sizes = {"--cpus": cpus, "--memory-mib": memory_mib}
        self.sizes = [w for k, v in sizes.items() if v is not None for w in (k, str(v))]
        self.name = f"{NAME}-{name}"
        self.endpoint = f"unix:/run/twine-lab/{self.name}/cp.sock"

    def up(self) -> None:
        """Boot the lab, unless `TWINE_KEEP_LAB` declares it as running."""
        if not KEPT:
            self.lab("down")
            self.lab("up", "--count", "1", *self.sizes, timeout_s=1800)

    def down(self) -> None:
        """Remove the lab, and fail if a process, namespace or mount is left."""
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
        """Return the content of a file of the machine."""
        argv = [str(BIN / "twine-lab"), "ssh", "--name", self.name, "m1", "--", f"cat {path}"]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=True
        )
        return done.stdout

    def inside(self, task: str, command: str) -> str:
        """Return the output of a shell inside a task."""
        return self.ssh("m1", f"twine-agent exec {task} -- /bin/sh -c '{command}' 2>&1 || true")
