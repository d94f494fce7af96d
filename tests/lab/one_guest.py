"""One booted guest without a control plane, for tests of sidekick on a real kernel."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab_client import BIN, COMMAND_S, NAME, ROOT, WAIT_S, Failed

INSIDE = Path(__file__).parent / "in_guest"
FOLDER = "/root/in_guest"
KEPT = bool(os.environ.get("TWINE_KEEP_LAB"))
"""Whether to use a running guest and keep it running; `twine-lab push` updates its code."""
STATE = "twine-agent ps; journalctl -u twine-agent -n 30 --no-pager"
"""Commands whose output is printed if a condition was not met in time."""


class OneGuest:
    """A lab of one machine, m1, or of a few more; without a control plane."""

    def __init__(
        self,
        variant: str = "base",
        name: str = "",
        count: int = 1,
        cpus: int | None = None,
        memory_mib: int | None = None,
    ) -> None:
        self.name = f"{NAME}-{name or variant}"
        sizes = {"--cpus": cpus, "--memory-mib": memory_mib}
        self.sizes = [w for key, n in sizes.items() if n is not None for w in (key, str(n))]
        self.variant, self.count = variant, count

    def lab(self, *arguments: str, timeout_s: float = COMMAND_S, stdin: bytes | None = None) -> str:
        """Return the output of `twine-lab`."""
        argv = [str(BIN / "twine-lab"), arguments[0], "--name", self.name, *arguments[1:]]
        done = subprocess.run(
            argv, input=stdin or b"", capture_output=True, timeout=timeout_s, check=False, cwd=ROOT
        )
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if done.returncode:
            raise Failed(argv, subprocess.CompletedProcess(argv, done.returncode, out, err))
        return out

    def up(self) -> None:
        if not KEPT:
            self.lab("down")
        arguments = ("--bare", "--count", str(self.count), "--variant", self.variant, *self.sizes)
        self.lab("up", *arguments, timeout_s=1800)

    def down(self) -> None:
        if not KEPT:
            self.lab("down")  # fails if a process, namespace or mount is left

    def ssh(self, command: str, timeout_s: float = COMMAND_S, machine: str = "m1") -> str:
        return self.lab("ssh", machine, "--", command, timeout_s=timeout_s)

    def find(self, command: str) -> str:
        """Return the output of a command, "" while the guest does not answer."""
        try:
            return self.ssh(command).strip()
        except (Failed, subprocess.TimeoutExpired):
            return ""

    def put(self, path: str, content: str | bytes, machine: str = "m1") -> None:
        """Write a file of a guest, and make its folder."""
        data = content.encode() if isinstance(content, str) else content
        command = f"mkdir -p $(dirname {path}); cat > {path}"
        self.lab("ssh", machine, "--", command, stdin=data, timeout_s=900)

    def pytest(self, *arguments: str, inside: Path = INSIDE, timeout_s: float = 3600.0) -> None:
        """Run the tests of a folder in the guest and print their output, which is also the failure
        message.
        """
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in (INSIDE / "guest_host.py", *sorted(inside.glob("*"))):
                if path.is_file():
                    tar.add(path, arcname=path.name)
        unpack = f"rm -rf {FOLDER} && mkdir {FOLDER} && tar -xzf - -C {FOLDER}"
        self.lab("ssh", "m1", "--", unpack, stdin=packed.getvalue())
        line = shlex.join(
            ["/opt/twine/bin/python", "-u", "-m", "pytest", "-q", "--durations=5", *arguments]
        )
        argv = [str(BIN / "twine-lab"), "ssh", "--name", self.name, "m1", "--"]
        output = ""
        with subprocess.Popen(
            ["timeout", f"{timeout_s:g}", *argv, f"cd {FOLDER} && {line}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            errors="replace",
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for part in process.stdout:
                print(part, end="", flush=True)
                output += part
        assert process.returncode == 0, output[-6000:]

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        """Wait until a condition is met."""
        began = time.monotonic()
        while not seen():
            if time.monotonic() - began > WAIT_S:
                found = self.find(STATE)
                pytest.fail(f"after {WAIT_S:g} s still not: {what}\n{found}")
            time.sleep(1.0)

    def boot_id(self) -> str:
        return self.find("cat /proc/sys/kernel/random/boot_id")

    def booted_again(self, before: str) -> None:
        """Return once another boot has reached sidekick's resume.

        A host without a profile has nothing to resume: there this is the end of the boot.
        """
        self.until("it booted again", lambda: self.boot_id() not in ("", before))
        resume = "sidekick-resume.service"
        done = f"systemctl is-active -q {resume} || systemctl is-failed -q {resume}"
        done += " || systemctl is-active -q multi-user.target; echo $?"
        self.until("its boot is over", lambda: self.find(done) == "0")

    def line(self) -> list[str]:
        return self.ssh("cat /proc/cmdline").split()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ssh("sidekick status -o json; true"))
        return found
