"""The part of the front end's client about intents of running jobs."""

from __future__ import annotations

from control_plane.api.intent_changes import (
    IntentChange,
    JobIntents,
    SizeChange,
    SizeChanges,
    SizesWritten,
)
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobBriefs
from control_plane.route_calls import NamedCalls


class IntentClient(NamedCalls):
    """Reads and writes intents; the caller is the writer of what it sends.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def list_job_briefs(self) -> JobBriefs:
        """Return all jobs in brief."""
        return await self.ask(JobBriefs, "list_job_briefs")

    async def get_intents(self, job: str) -> JobIntents:
        """Return the intents of each writer for a job, and their effect."""
        return await self.ask(JobIntents, "get_intents", job=job)

    async def put_intent(self, job: str, dimension: Dimension, change: IntentChange) -> JobIntents:
        """Write one dimension of a job; the type of the change is that of the dimension."""
        return await self.ask(JobIntents, f"put_{dimension}", change, job=job)

    async def put_sizes(self, sizes: dict[str, SizeChange]) -> SizesWritten:
        """Write the sizes of many jobs; each is written or refused separately."""
        return await self.ask(SizesWritten, "put_sizes", SizeChanges(sizes=sizes))

    async def withdraw_intent(
        self, job: str, dimension: Dimension, change: IntentChange
    ) -> JobIntents:
        """End a job's canary or hold before its time."""
        return await self.ask(
            JobIntents,
            "withdraw_intent",
            job=job,
            dimension=dimension.value,
            reason=change.reason or None,
            expect=change.expect,
            take_over="true" if change.take_over else None,
        )
