"""How a task is asked whether it works."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Argument, HttpPath, Port, Seconds, StartPeriod, Written

ProbeCommand = Annotated[list[Argument], Meta(max_length=4096)]
InARow = Annotated[int, Meta(ge=1, le=100)]


class ProbeKind(StrEnum):
    """How a task's health is asked for."""

    HTTP = "http"
    """An answer from 200 to 399 on `path`."""
    TCP = "tcp"
    """The port takes a connection."""
    EXEC = "exec"
    """`command` ends with 0; it runs inside the task, with the task's rights and limits."""


class Probe(Written, frozen=True, kw_only=True):
    """How to tell a healthy task from an unhealthy one."""

    kind: ProbeKind = ProbeKind.HTTP
    port: Port | None = None
    """For `http` and `tcp`."""
    path: HttpPath = "/"
    """For `http`."""
    command: ProbeCommand = []
    """For `exec`."""
    interval_s: Seconds = 2.0
    """From one probe to the next."""
    timeout_s: Seconds = 2.0
    """An answer that takes longer is a failure."""
    successes: InARow = 1
    """Answers in a row that make a task healthy."""
    failures: InARow = 3
    """Failures in a row that make a task unhealthy."""
    start_period_s: StartPeriod = 30.0
    """For how long after its start a task that was not healthy yet may fail its probe: it is
    neither, and it is not reported as broken. The first success ends it."""

    def __post_init__(self) -> None:
        """Refuse a probe without a target."""
        check_probe(self.kind, self.port, self.command)


def check_probe(kind: ProbeKind, port: object, command: list[str]) -> None:
    """Raise `ValueError` unless a probe has what its kind needs, and nothing of another."""
    if kind is ProbeKind.EXEC:
        if not command or port is not None:
            raise ValueError("a probe of kind exec needs a command, and no port")
    elif port is None or command:
        raise ValueError(f"a probe of kind {kind} needs a port, and no command")
