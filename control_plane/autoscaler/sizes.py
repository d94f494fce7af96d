"""Writes sizes: the only module of the autoscaler that changes jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from control_plane.api.intent_changes import REASON_MAX, SizeChange
from control_plane.api.intents import Dimension, StoredIntent
from control_plane.api.jobs import JobStatus
from control_plane.client import ControlPlaneClient
from wire.errors import TwineError

_AT_ONCE = 250
"""Sizes of one request."""


@dataclass(frozen=True, slots=True)
class NewSize:
    """A size for a job, and the size intent that it replaces."""

    status: JobStatus
    tasks: int
    reason: str


class SizeWriter(Protocol):
    """Writes the sizes of jobs."""

    async def write(self, sizes: Sequence[NewSize]) -> dict[str, str]:
        """Request sizes; return refused job → reason."""
        ...


@dataclass(frozen=True, slots=True)
class SizeIntents:
    """Writes the `size` intents of jobs, each unless it changed since it was read.

    If a user took over the size (`job scale --take-over`), the front end refuses another one until
    the job's file is applied again.
    """

    client: ControlPlaneClient

    async def write(self, sizes: Sequence[NewSize]) -> dict[str, str]:
        """Request sizes; return refused job → reason."""
        refused = dict[str, str]()
        for first in range(0, len(sizes), _AT_ONCE):
            changes = {
                s.status.record.name: size_change(s) for s in sizes[first : first + _AT_ONCE]
            }
            try:
                answer = await self.client.put_sizes(changes)
            except TwineError as e:
                refused |= dict.fromkeys(changes, str(e))
            else:
                refused |= {job: problem.detail for job, problem in answer.refused.items()}
        return refused


def size_change(size: NewSize) -> SizeChange:
    """Return the write of a size that replaces the one that was read."""
    known = size.status.record.intents.get(Dimension.SIZE, StoredIntent())
    return SizeChange(tasks=size.tasks, reason=size.reason[:REASON_MAX], expect=known.version)
