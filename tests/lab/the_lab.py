"""The commands an operator types, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NAME = os.environ.get("TWINE_TEST_LAB", "test")
JOB = ROOT / "vm_lab" / "jobs" / "web.toml"


class Failed(AssertionError):
    """A command of ours failed."""

    def __init__(self, words: list[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.code = done.returncode
        self.stderr = done.stderr


class TheLab:
    """The commands an operator types."""

    machines = ("m1", "m2", "m3")
    endpoint = f"unix:/run/twine-lab/{NAME}/cp.sock"

    def run(
        self,
        program: str,
        *words: str,
        timeout_s: float = 300,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        ours = {"TWINE_ENDPOINT": self.endpoint, "TWINE_LAB_NAME": NAME}
        done = subprocess.run(
            [str(BIN / program), *words],
            env={**os.environ, **ours, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise Failed([program, *words], done)
        return done.stdout

    def lab(
        self,
        *words: str,
        timeout_s: float = 300,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        return self.run("twine-lab", *words, timeout_s=timeout_s, environment=environment)

    def ctl(self, *words: str, timeout_s: float = 300) -> Any:
        return json.loads(self.run("twinectl", *words, "-o", "json", timeout_s=timeout_s))

    def ssh(self, machine: str, command: str, timeout_s: float = 120) -> str:
        return self.lab("ssh", machine, "--", command, timeout_s=timeout_s)

    def apply(self, image: str, *changes: str, name: str = "web") -> Any:
        """Apply the demo's job file with changes, and wait until the job is stable."""
        settings = [w for change in (f"image={image}", *changes) for w in ("--set", change)]
        self.run("twinectl", "job", "apply", str(JOB), *settings, "--wait", timeout_s=600)
        return self.job(name)

    def job(self, name: str = "web") -> Any:
        return self.ctl("job", "status", name)

    def tasks(self, name: str = "web") -> dict[int, Any]:
        return {t["index"]: t for t in self.job(name)["record"]["tasks"]}

    def invocations(self) -> dict[str, str]:
        """Return task → invocation id of its unit, as systemd on the machines says."""
        found: dict[str, str] = {}
        for machine in self.machines:
            for task in json.loads(self.ssh(machine, "twine-agent ps -o json"))["tasks"]:
                shown = self.ssh(machine, f"systemctl show -P InvocationID {task['unit']}")
                found[task["task_id"]] = shown.strip()
        return found

    def units(self, machine: str) -> list[str]:
        """Return the units of tasks on a machine that have processes."""
        listed = self.ssh(
            machine,
            "systemctl list-units --plain --no-legend --state=running 'twine-task-*.service'",
        )
        return sorted(line.split()[0] for line in listed.splitlines())

    def get(self, url: str) -> str:
        return self.lab("exec", "--", "curl", "--silent", "--show-error", "--max-time", "20", url)

    def traffic(self) -> subprocess.Popen[bytes]:
        """Start constant requests to the job; `outcome` ends them."""
        return subprocess.Popen(
            [
                *(str(BIN / "twine-lab"), "exec", "--name", NAME, "--"),
                *(sys.executable, "-m", "vm_lab.traffic"),
                *("--endpoint", self.endpoint, "--job", "web"),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def outcome(self, traffic: subprocess.Popen[bytes]) -> Any:
        out, _ = traffic.communicate(timeout=60)
        return json.loads(out.splitlines()[-1])

    def until(self, what: str, seen: Callable[[], bool], timeout_s: float = 180) -> float:
        """Wait for something to be seen; return after how many seconds it was."""
        began = time.monotonic()
        while True:
            try:
                if seen():
                    return time.monotonic() - began
            except Failed:
                pass
            if time.monotonic() - began > timeout_s:
                pytest.fail(f"after {timeout_s:g} s still not: {what}")
            time.sleep(1.0)
