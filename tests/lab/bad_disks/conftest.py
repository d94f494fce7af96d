"""The agent of this guest, as an operator sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from disk import WAIT_S, BadDisk, shell


class TheAgent:
    """The agent and its tasks, through the command line."""

    def start(self) -> None:
        shell("systemctl reset-failed twine-agent.service; systemctl start twine-agent.service")

    def run(self, name: str, *options: str) -> None:
        words = " ".join(options)
        command = "/bin/busybox sleep 1000000"
        shell(f"twine-agent run {name} --image /root/image.tar --memory 16MiB {words} -- {command}")

    def pid(self) -> int:
        return int(shell("systemctl show -p MainPID --value twine-agent.service"))

    def health(self) -> dict[str, Any]:
        """Return the agent's health, or fail if there is no answer within 30 seconds."""
        ask = "curl --fail --silent --max-time 30 --unix-socket /run/twine/agent.sock"
        found: dict[str, Any] = json.loads(shell(f"{ask} http://agent/healthz"))
        return found

    def problems(self) -> list[str]:
        found: list[str] = json.loads(shell("twine-agent facts -o json")).get("problems", [])
        return found

    def tasks(self) -> dict[str, dict[str, Any]]:
        found = json.loads(shell("twine-agent ps -o json"))["tasks"]
        return {task["task_id"]: task for task in found}

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not seen():
            if time.monotonic() - began > WAIT_S:
                pytest.fail(f"after {WAIT_S:g} s still not: {what}")
            time.sleep(0.5)


@pytest.fixture
def disk() -> Iterator[BadDisk]:
    with BadDisk() as found:
        yield found


@pytest.fixture
def agent(disk: BadDisk) -> TheAgent:
    """Yield the agent with one task, `old`, on the disk of the test."""
    found = TheAgent()
    found.start()
    found.run("old")
    return found
