"""The front end's handlers about jobs, of the whole region or of one shard."""

from __future__ import annotations

from collections.abc import AsyncIterator

from control_plane.api.jobs import Jobs, JobStatus
from control_plane.api.operations import JobEvents, MoveRequest, RestartRequest, TaskStory
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.region_status import RegionStatus
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.front_end.recorder import caller_of
from control_plane.front_end.task_handlers import index_of
from control_plane.scheduler.event_log import PAGE_MAX
from wire.errors import InvalidInput
from wire.server import Call

MAX_TAIL_LINES = 100_000


class JobHandlers(PlaneHandlers):
    """A handler for each row about a job."""

    async def region_status(self, _: Call) -> RegionStatus:
        """Show the state of the region."""
        return self._plane.region_status()

    async def list_jobs(self, _: Call) -> Jobs:
        """List the jobs."""
        return await self._plane.list_jobs()

    async def apply_job(self, call: Call) -> JobStatus:
        """Create or change a job."""
        if call.body.name != call.path["job"]:
            raise InvalidInput(f"job {call.body.name} cannot be put at {call.path['job']!r}")
        return await self._plane.apply_job(
            call.body,
            dry_run=call.flag("dry_run"),
            writer=caller_of(call.peer),
            is_new=call.flag("new"),
        )

    async def plan_job(self, call: Call) -> JobPlan:
        """Show what applying a job would do."""
        if call.body.name != call.path["job"]:
            raise InvalidInput(f"job {call.body.name} cannot be planned at {call.path['job']!r}")
        writer = caller_of(call.peer)
        return await self._plane.job_planner.plan(call.body, writer)

    async def explain_job(self, call: Call) -> JobExplanation:
        """Explain why tasks wait."""
        return await self._plane.job_planner.explain(call.path["job"])

    async def get_job(self, call: Call) -> JobStatus:
        """Show a job."""
        return await self._plane.get_job(call.path["job"])

    async def stop_job(self, call: Call) -> JobStatus:
        """Stop a job."""
        return await self._plane.stop_job(call.path["job"])

    async def job_events(self, call: Call) -> JobEvents:
        """Show what was done to a job's tasks."""
        after, limit = call.whole("after") or 0, call.limit(PAGE_MAX, 100)
        return await self._plane.job_events(call.path["job"], after, limit)

    async def task_story(self, call: Call) -> TaskStory:
        """Show what is being done to a task."""
        return await self._plane.task_story(call.path["job"], index_of(call))

    async def move_task(self, call: Call) -> TaskStory:
        """Move a task to another machine."""
        request: MoveRequest = call.body
        return await self._plane.move_task(
            call.path["job"], index_of(call), request.to, request.reason
        )

    async def restart_task(self, call: Call) -> TaskStory:
        """Restart a task."""
        request: RestartRequest = call.body
        return await self._plane.restart_task(call.path["job"], index_of(call), request)

    async def job_logs(self, call: Call) -> AsyncIterator[bytes]:
        """Stream the output of a task."""
        tail, since = call.whole("tail"), call.number("since")
        return self._plane.job_logs(
            call.path["job"],
            index_of(call),
            follow=call.flag("follow"),
            since=None if since is None else f"{since:.6f}",
            tail=None if tail is None else min(tail, MAX_TAIL_LINES),
            previous=call.flag("previous"),
        )
