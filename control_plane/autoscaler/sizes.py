"""Writes sizes: the one place where the autoscaler changes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from control_plane.api.intent_wishes import REASON_MAX, SizeWish
from control_plane.api.intents import Dimension, StoredIntent
from control_plane.api.jobs import JobStatus
from control_plane.client import ControlPlaneClient
from wire.errors import TwineError


class SizeWriter(Protocol):
    """How a size is made the size of a job."""

    async def write(self, status: JobStatus, tasks: int, reason: str) -> str:
        """Ask for a size, given the job as it was seen; return why it was refused, or nothing."""
        ...


@dataclass(frozen=True, slots=True)
class SizeIntents:
    """Writes the `size` intent of jobs, if it is still the one that was seen.

    The size of a person who took it over (`job scale --take-over`) is refused by the front end and
    stays, until the job's file is applied again.
    """

    client: ControlPlaneClient

    async def write(self, status: JobStatus, tasks: int, reason: str) -> str:
        """Ask for a size; return why it was refused, or nothing."""
        try:
            await self.client.put_intent(
                status.record.name, Dimension.SIZE, size_wish(status, tasks, reason)
            )
        except TwineError as e:
            return str(e)
        return ""


def size_wish(status: JobStatus, tasks: int, reason: str) -> SizeWish:
    """Return the write of a size on top of the one that was seen."""
    known = status.record.intents.get(Dimension.SIZE, StoredIntent())
    return SizeWish(tasks=tasks, reason=reason[:REASON_MAX], expect=known.version)
