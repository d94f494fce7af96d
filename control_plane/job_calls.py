"""The calls of the front end about jobs: one method for each row of the route table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from agent.api import Relaxation
from control_plane.allocator.core.claims import Claims
from control_plane.api.endpoints import Endpoints
from control_plane.api.jobs import JobRecord, Jobs, JobSpec, JobStatus
from control_plane.api.operations import JobEvents, RestartRequest, TaskStory
from control_plane.api.watch import EndpointChanges
from control_plane.discovery.discovery import Discovery
from control_plane.running_shards import RunningShards
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.rollout import earlier, summarize
from control_plane.scheduler.core.rollout_progress import describe_blocked
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.task_service import TaskService
from wire.errors import InvalidInput


class JobCalls:
    """Answers from the jobs and shards of this process; a part of `ControlPlane`."""

    shards: RunningShards
    discovery: Discovery
    task_service: TaskService
    _control: JobControl
    _jobs: JobTable
    _events: EventLog
    _runtime: Runtime

    async def apply_job(
        self, spec: JobSpec, *, dry_run: bool = False, writer: str = "", is_new: bool = False
    ) -> JobStatus:
        """Create or change a job; an error lists all faults, and nothing was changed."""
        if not dry_run:
            await self.shards.assign_unused(spec.entitlement)
        record = await self._control.apply(spec, dry_run=dry_run, writer=writer, is_new=is_new)
        return self._status(record)

    def _status(self, record: JobRecord) -> JobStatus:
        """Return the status of a job after a change of its record, before its next round."""
        now = Moment(self._runtime.date(), self._runtime.now())
        return summarize(record, describe_blocked(record, now))

    def job_records(self) -> list[JobRecord]:
        """Return the records of all jobs of the region, by name."""
        return self._jobs.records()

    async def get_job(self, name: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return await self.shards.of_job(name).scheduler.status(name)

    async def list_jobs(self) -> Jobs:
        """Return all jobs of the shards of this process, by name."""
        local, found = {shard.number: shard for shard in self.shards.all}, list[JobStatus]()
        for name in self._jobs:
            number = self.shards.number_of_job(name)  # None: the job was deleted meanwhile
            if number is not None and number in local:
                found.append(await local[number].scheduler.status(name))
                await self._runtime.checkpoint(answers=True)
        return Jobs(jobs=found)

    async def stop_job(self, name: str) -> JobStatus:
        """Stop all tasks of a job; it disappears once they are gone."""
        return self._status(await self._control.stop(name))

    async def pause_job(self, name: str, *, paused: bool, expect: int | None = None) -> JobStatus:
        """Pause the update of a job, or resume it; `expect`: only if it is at this version."""
        return self._status(await self._control.pause(name, held_back=paused, expect=expect))

    async def restart_job(
        self, name: str, writer: str = "", expect: int | None = None
    ) -> JobStatus:
        """Restart every task of a job, like an update; `expect`: only if it is at this version."""
        return self._status(await self._control.restart(name, writer, expect))

    async def rollback_job(
        self, name: str, writer: str = "", expect: int | None = None
    ) -> JobStatus:
        """Return to the task settings of the previous version; `expect`: only from this one."""
        if before := self.rollback_target(name):
            self.shards.check_move(name, before)
        return self._status(await self._control.rollback(name, writer, expect))

    async def move_job(self, name: str, entitlement: str, writer: str = "") -> JobStatus:
        """Move a job to another entitlement."""
        await self.shards.assign_unused(entitlement)
        self.shards.check_move(name, entitlement)
        return self._status(await self._control.move(name, entitlement, writer))

    async def move_task(self, name: str, index: int, to: str, reason: str) -> TaskStory:
        """Move a task to another machine."""
        await self._control.move_task(name, index, to, reason)
        return await self.task_story(name, index)

    async def restart_task(self, name: str, index: int, request: RestartRequest) -> TaskStory:
        """Restart a task on its machine: within the budget, or at once (`request.now`)."""
        if not request.now:
            await self._control.restart_task(name, index, request.reason)
        elif not request.reason:
            raise InvalidInput(
                f"task {name}-{index} is restarted without its job's budget and controller only "
                "for a reason, which the audit log keeps",
                hint="twinectl task restart --now --reason …",
            )
        else:
            await self.task_service.restart(name, index)
        return await self.task_story(name, index)

    async def job_events(self, name: str, after: int = 0, limit: int = 100) -> JobEvents:
        """Return a page of the log of a job or a deleted job, oldest event first."""
        return await self._events.page(self._jobs, name, after, limit)

    async def task_story(self, name: str, index: int) -> TaskStory:
        """Return the present operation of a task, and its earlier ones."""
        return await self._events.story(self._jobs, name, index)

    def users_of_image(self, digest: str) -> list[str]:
        """Return the jobs that run an image, or are about to."""
        return self._control.users_of_image(digest)

    def job_logs(
        self,
        name: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now.

        `NotFound` is raised by the first `__anext__`, not by the call.
        """
        return self.task_service.logs(
            name, index, follow=follow, since=since, tail=tail, previous=previous
        )

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the listed tasks of a job; waits up to `wait_s` for a revision > `after`."""
        return await self.discovery.endpoints(job, after, wait_s)

    async def watch_endpoints(
        self, known: Mapping[str, int | None], wait_s: float = 0.0
    ) -> EndpointChanges:
        """Return the endpoints of those jobs whose revision is not the known one."""
        return await self.discovery.watch(known, wait_s)

    def rollback_target(self, job: str) -> str | None:
        """Return the entitlement to which a rollback would move a job; None: no earlier version."""
        record = self._jobs.find(job)
        version = earlier(record) if record is not None else None
        return record.specs[version].entitlement if record is not None and version else None

    # -- for access control and other services

    def entitlement_of(self, job: str) -> str | None:
        """Return the entitlement of a job, if there is such a job."""
        record = self._jobs.find(job)
        return None if record is None else record.spec.entitlement

    def is_raw(self, job: str) -> bool:
        """Return whether some version of a job that is kept has tasks without a sandbox."""
        record = self._jobs.find(job)
        specs = () if record is None else (record.spec, *record.specs.values())
        return any(Relaxation.RAW in spec.relaxations for spec in specs)

    def _claims_of(self, job: str) -> Claims | None:
        """Return the claims of a job on machines, if it has any."""
        return self.shards.of_job(job).allocator.index.claims.get(job)
