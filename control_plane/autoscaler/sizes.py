"""Writes sizes: the one place where the autoscaler changes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from control_plane.api.autoscale import REASON_MAX, SizeWish
from control_plane.api.jobs import JobStatus
from control_plane.client import ControlPlaneClient
from wire.errors import TwineError


class SizeWriter(Protocol):
    """How a size is made the size of a job."""

    async def write(self, status: JobStatus, tasks: int, reason: str) -> str:
        """Ask for a size, given the job as it was seen; return why it was refused, or nothing."""
        ...


@dataclass(frozen=True, slots=True)
class JobResizer:
    """Resizes jobs through the front end, if size and version are still those that were seen."""

    client: ControlPlaneClient

    async def write(self, status: JobStatus, tasks: int, reason: str) -> str:
        """Ask for a size; return why it was refused, or nothing."""
        record = status.record
        wish = SizeWish(
            tasks=tasks, was=record.spec.tasks, version=record.version, reason=reason[:REASON_MAX]
        )
        try:
            await self.client.resize_job(record.name, wish)
        except TwineError as e:
            return str(e)
        return ""
