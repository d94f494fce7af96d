"""The front end's handlers about running jobs: their intents and pushes."""

from __future__ import annotations

from control_plane.api.intent_changes import IntentChange, JobIntents
from control_plane.api.jobs import JobBriefs, JobStatus
from control_plane.api.operations import JobMove
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.front_end.recorder import caller_of
from wire.server import Call


class IntentHandlers(PlaneHandlers):
    """A handler for each row of `api.intent_routes`; the caller is the writer of what it sends."""

    async def pause_job(self, call: Call) -> JobStatus:
        """Hold back an update."""
        return await self._plane.pause_job(
            call.path["job"], paused=True, expect=call.whole("expect")
        )

    async def resume_job(self, call: Call) -> JobStatus:
        """Continue an update."""
        return await self._plane.pause_job(
            call.path["job"], paused=False, expect=call.whole("expect")
        )

    async def restart_job(self, call: Call) -> JobStatus:
        """Start every task again."""
        job, writer, expect = call.path["job"], caller_of(call.peer), call.whole("expect")
        return await self._plane.restart_job(job, writer, expect)

    async def rollback_job(self, call: Call) -> JobStatus:
        """Go back a version."""
        job, writer, expect = call.path["job"], caller_of(call.peer), call.whole("expect")
        return await self._plane.rollback_job(job, writer, expect)

    async def move_job(self, call: Call) -> JobStatus:
        """Move a job to another entitlement."""
        change: JobMove = call.body
        writer = caller_of(call.peer)
        return await self._plane.move_job(call.path["job"], change.entitlement, writer)

    async def list_job_briefs(self, _: Call) -> JobBriefs:
        """List the jobs in brief."""
        return await self._plane.intents.briefs()

    async def get_intents(self, call: Call) -> JobIntents:
        """Show the intents of each writer."""
        return await self._plane.intents.show(call.path["job"])

    async def put_push(self, call: Call) -> JobIntents:
        """Push to a part of the tasks."""
        return await self._plane.intents.push(call.path["job"], call.body, caller_of(call.peer))

    async def put_size(self, call: Call) -> JobIntents:
        """Set the number of tasks."""
        writer = caller_of(call.peer)
        return await self._plane.intents.size(call.path["job"], call.body, writer, call.also)

    async def put_canary(self, call: Call) -> JobIntents:
        """Run a variant on some tasks."""
        return await self._plane.intents.canary(call.path["job"], call.body, caller_of(call.peer))

    async def put_hold(self, call: Call) -> JobIntents:
        """Hold back changes for a while."""
        return await self._plane.intents.hold(call.path["job"], call.body, caller_of(call.peer))

    async def put_infrastructure(self, call: Call) -> JobIntents:
        """Set the runtime that operators roll out."""
        writer = caller_of(call.peer)
        return await self._plane.intents.infrastructure(call.path["job"], call.body, writer)

    async def withdraw_intent(self, call: Call) -> JobIntents:
        """End a canary or a hold."""
        change = IntentChange(
            reason=call.query.get("reason", "")[:512],
            expect=call.whole("expect"),
            take_over=call.flag("take_over"),
        )
        name, dimension = call.path["job"], call.path["dimension"]
        return await self._plane.intents.withdraw(name, dimension, change, caller_of(call.peer))
