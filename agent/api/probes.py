"""Probes: checks of whether a task works."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Argument, HttpPath, Port, Seconds, StartPeriod, Written

ProbeCommand = Annotated[list[Argument], Meta(max_length=4096)]
InARow = Annotated[int, Meta(ge=1, le=100)]


class ProbeKind(StrEnum):
    """The condition for the success of a probe."""

    HTTP = "http"
    """A GET of `path` is answered with a status from 200 to 399."""
    TCP = "tcp"
    """The port accepts a connection."""
    EXEC = "exec"
    """`command` exits with 0. It runs inside the task, with the task's rights and limits."""


class Probe(Written, frozen=True, kw_only=True):
    """How the agent checks whether a task is healthy."""

    kind: ProbeKind = ProbeKind.HTTP
    port: Port | None = None
    """For `http` and `tcp`."""
    path: HttpPath = "/"
    """For `http`."""
    command: ProbeCommand = []
    """For `exec`."""
    interval_s: Seconds = 2.0
    """From one probe to the next; at least 0.1 s pass, 0.5 s for `exec`."""
    timeout_s: Seconds = 2.0
    """A probe that takes longer has failed."""
    successes: InARow = 1
    """Successes in a row that make a task healthy."""
    failures: InARow = 3
    """Failures in a row that make a task unhealthy."""
    start_period_s: StartPeriod = 30.0
    """Time after the start in which failures of a task that was never healthy do not count: its
    health is unknown. The first success ends this time."""

    def __post_init__(self) -> None:
        """Refuse a probe without a target."""
        check_probe(self.kind, self.port, self.command)


def check_probe(kind: ProbeKind, port: object, command: list[str]) -> None:
    """Raise `ValueError` unless a probe has what its kind needs, and nothing of another."""
    if kind is ProbeKind.EXEC:
        if not command or port is not None:
            raise ValueError("a probe of kind exec needs a command and cannot have a port")
    elif port is None or command:
        raise ValueError(f"a probe of kind {kind} needs a port and cannot have a command")
