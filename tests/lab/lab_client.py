"""The commands of an operator, for tests."""

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

from tests.lab.quiescence import uneven, unsettled, unusable

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NAME = os.environ.get("TWINE_TEST_LAB", "test")
JOB = ROOT / "vm_lab" / "jobs" / "web.toml"
COMMAND_S = 600.0
"""Timeout of a command: far above its duration. A slow machine makes tests slower, not red."""
WAIT_S = 600.0
"""Timeout for an expected event."""
REST_S = 1200.0
"""Timeout until the lab is at rest: it moves one task a minute until they are spread evenly."""


class Failed(AssertionError):
    """A command of ours failed."""

    def __init__(self, arguments: list[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.code = done.returncode
        self.stderr = done.stderr


class LabClient:
    """The commands of an operator."""

    machines = ("m1", "m2", "m3")
    name = NAME
    endpoint = f"unix:/run/twine-lab/{NAME}/cp.sock"

    def run(
        self,
        program: str,
        *arguments: str,
        timeout_s: float = COMMAND_S,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        ours = {"TWINE_ENDPOINT": self.endpoint, "TWINE_LAB_NAME": self.name}
        done = subprocess.run(
            [str(BIN / program), *arguments],
            env={**os.environ, **ours, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise Failed([program, *arguments], done)
        return done.stdout

    def lab(
        self,
        *arguments: str,
        timeout_s: float = COMMAND_S,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        return self.run("twine-lab", *arguments, timeout_s=timeout_s, environment=environment)

    def ctl(self, *arguments: str, timeout_s: float = COMMAND_S) -> Any:
        return json.loads(self.run("twinectl", *arguments, "-o", "json", timeout_s=timeout_s))

    def ssh(self, machine: str, command: str, timeout_s: float = COMMAND_S) -> str:
        return self.lab("ssh", machine, "--", command, timeout_s=timeout_s)

    def apply(self, image: str, *changes: str, name: str = "web") -> Any:
        """Apply the demo's job file with changes, and wait until the job is stable."""
        settings = [w for change in (f"image={image}", *changes) for w in ("--set", change)]
        arguments = ("job", "apply", str(JOB), *settings, "--wait", "--timeout", f"{WAIT_S:g}s")
        self.run("twinectl", *arguments, timeout_s=WAIT_S + COMMAND_S)
        return self.job(name)

    def job(self, name: str = "web") -> Any:
        return self.ctl("job", "status", name)

    def machine_list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ctl("machine", "list")["machines"]
        return found

    def usable(self) -> None:
        """Return once every machine takes tasks and is trusted to keep them."""
        self.until_none("reasons why a machine is unusable", lambda: unusable(self.machine_list()))

    def rest(self, *jobs: str) -> None:
        """Return once no operation is running in the lab, and none is due.

        Tests that read where tasks are, or compare before and after, need a lab at rest.
        """
        names = jobs or ("web",)
        self.until_none(
            "reasons why the lab is not at rest",
            lambda: unsettled(self.machine_list(), [self.job(name) for name in names]),
            REST_S,
        )

    def spread(self, image: str, tasks: int) -> None:
        """Spread the demo's job evenly in a lab at rest, with the same number of tasks on each
        machine.

        Tasks left uneven by a test would move without a command, one a minute. Restarting them all
        takes less time.
        """
        self.usable()
        job = self.apply(image, f"tasks={tasks}")
        if uneven(self.machine_list(), job):
            self.apply(image, "tasks=0")
            self.apply(image, f"tasks={tasks}")
        self.rest()

    def tasks(self, name: str = "web") -> dict[int, Any]:
        return {t["index"]: t for t in self.job(name)["record"]["tasks"]}

    def invocations(self) -> dict[str, str]:
        """Return task → invocation id of its unit, as systemd on the machines reports it."""
        found: dict[str, str] = {}
        for machine in self.machines:
            shown = self.ssh(machine, "systemctl show -p Id -p InvocationID 'twine-task-*.service'")
            for unit in filter(None, shown.split("\n\n")):
                properties = dict(line.split("=", 1) for line in unit.splitlines() if line)
                name = properties["Id"].removeprefix("twine-task-").removesuffix(".service")
                found[name] = properties["InvocationID"]
        return found

    def remove(self, machine: str, task: str) -> None:
        """Stop a task that was started by hand; return once nothing is left of it."""
        self.ssh(machine, f"twine-agent stop {task}")

        def gone() -> bool:
            tasks = json.loads(self.ssh(machine, "twine-agent ps -o json"))["tasks"]
            return task not in {t["task_id"] for t in tasks}

        self.until(f"{task} is gone from {machine}", gone)

    def units(self, machine: str) -> list[str]:
        """Return the units of tasks on a machine that have processes."""
        listed = self.ssh(
            machine,
            "systemctl list-units --plain --no-legend --state=running 'twine-task-*.service'",
        )
        return sorted(line.split()[0] for line in listed.splitlines())

    def get(self, url: str) -> str:
        return self.lab("exec", "--", "curl", "--silent", "--show-error", "--max-time", "120", url)

    def proxy(self) -> str:
        """Forward to the job by HAProxy; return its URL."""
        return self.lab("proxy", "start", "web:http").strip().splitlines()[-1]

    def traffic(self, url: str = "") -> subprocess.Popen[bytes]:
        """Start constant requests to the job, or to its proxy; `outcome` ends them."""
        return subprocess.Popen(
            [
                *(str(BIN / "twine-lab"), "exec", "--name", self.name, "--"),
                *(sys.executable, "-m", "vm_lab.traffic"),
                *("--endpoint", self.endpoint, "--job", "web", "--url", url),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def outcome(self, traffic: subprocess.Popen[bytes]) -> Any:
        out, _ = traffic.communicate(timeout=COMMAND_S)
        return json.loads(out.splitlines()[-1])

    def until(self, what: str, seen: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
        """Wait until a condition is met; return the number of seconds that it took."""
        began = time.monotonic()
        while True:
            try:
                if seen():
                    return time.monotonic() - began
            except (Failed, json.JSONDecodeError):
                pass  # the component is not reachable yet
            if time.monotonic() - began > timeout_s:
                pytest.fail(f"after {timeout_s:g} s still not: {what}")
            time.sleep(1.0)

    def until_none(
        self, what: str, left: Callable[[], list[str]], timeout_s: float = WAIT_S
    ) -> None:
        """Wait until nothing is left; report the leftovers otherwise."""
        began = time.monotonic()
        while True:
            try:
                seen = left()
            except Failed as e:
                seen = [str(e)]
            if not seen:
                return
            if time.monotonic() - began > timeout_s:
                pytest.fail(f"after {timeout_s:g} s still {what}: {'; '.join(seen)}")
            time.sleep(1.0)
