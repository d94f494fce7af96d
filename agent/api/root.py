"""What a task may do to its root, where its output goes, and what ends for want of memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import COUNT_MAX


class RootMode(StrEnum):
    """What a task may do to the files of its root."""

    READ_ONLY = "read-only"
    WRITABLE = "writable"
    """What it writes there is bounded, and gone with its next start."""


RootBytes = Annotated[int, Meta(ge=1 << 20, le=COUNT_MAX)]
ROOT_MAX_BYTES = 1 << 30


class Stdout(StrEnum):
    """What a task's output and errors are written to."""

    JOURNAL = "journal"
    """A socket of the journal's: it cannot be opened by name, and journald drops empty lines."""
    PIPE = "pipe"
    """A pipe that is copied to the journal byte for byte; the default (docs/logs.md)."""


class OomPolicy(StrEnum):
    """What ends when a task is above its memory limit."""

    TASK = "task"
    """All of it; its restart policy goes on from there."""
    PROCESS = "process"
    """The process that the kernel chooses; the task goes on unless it was its main one."""
