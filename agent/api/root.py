"""Modes of a task: access to its root, destination of its output, and handling of out-of-memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import COUNT_MAX


class RootMode(StrEnum):
    """Access of a task to the files of its root."""

    READ_ONLY = "read-only"
    WRITABLE = "writable"
    """Its writes are limited in size, and discarded at its next start."""


RootBytes = Annotated[int, Meta(ge=1 << 20, le=COUNT_MAX)]
ROOT_MAX_BYTES = 1 << 30


class Stdout(StrEnum):
    """Destination of a task's standard output and standard error."""

    JOURNAL = "journal"
    """A socket of the journal. It cannot be opened by name, and journald drops empty lines."""
    PIPE = "pipe"
    """A pipe that is copied to the journal byte for byte; the default (docs/logs.md)."""


class OomPolicy(StrEnum):
    """What the kernel kills when a task is above its memory limit."""

    TASK = "task"
    """All processes of the task; then its restart policy applies."""
    PROCESS = "process"
    """The process that the kernel chooses. The task continues unless this was its main process."""
