"""The client of the control plane: one typed method per row of the route table.

Methods about jobs, images and the front end itself are here; others have a module per subject.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec

from agent.api import ImageFormat, ImageInfo, Images, ImageSignature, Liveness, NamedImage
from agent.api.exec import Window
from control_plane.api.endpoints import Endpoints
from control_plane.api.jobs import Jobs, JobSpec, JobStatus
from control_plane.api.limits import Lift, LimitView, LimitViews
from control_plane.api.machines import Token, TokenRequest
from control_plane.api.operations import JobEvents, JobMove, MoveRequest, RestartRequest, TaskStory
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.api.tasks import TaskDescription
from control_plane.api.watch import EndpointChanges, WatchedJobs
from control_plane.api.weights import EndpointWeights
from control_plane.capacity_client import CapacityClient
from control_plane.intent_client import IntentClient
from control_plane.machine_client import MachineClient
from control_plane.people_client import PeopleClient
from control_plane.rebalance_client import RebalanceClient
from control_plane.route_calls import ROUTE
from wire.duplex import Duplex

PUSH_TIMEOUT_S = 3600.0


class ControlPlaneClient(
    CapacityClient, IntentClient, MachineClient, PeopleClient, RebalanceClient
):
    """Client of a region's front end, over TLS or its unix socket.

    Every method raises what the front end raised, or `Unreachable`.
    """

    max_answer_bytes = 2 << 30
    """All jobs of a large region, with each of their tasks."""

    async def list_jobs(self) -> Jobs:
        """Return all jobs."""
        return await self.ask(Jobs, "list_jobs")

    async def apply_job(
        self, spec: JobSpec, *, dry_run: bool = False, is_new: bool = False
    ) -> JobStatus:
        """Create or update a job; returns before the change is carried out.

        With `is_new` it is only created: `Conflict` if there is a job of this name.
        """
        return await self.ask(
            JobStatus,
            "apply_job",
            spec,
            job=spec.name,
            dry_run="true" if dry_run else None,
            new="true" if is_new else None,
        )

    async def plan_job(self, spec: JobSpec) -> JobPlan:
        """Return the effects of applying a job; changes nothing."""
        return await self.ask(JobPlan, "plan_job", spec, job=spec.name)

    async def explain_job(self, job: str) -> JobExplanation:
        """Return how many tasks of a job have a machine, and all reasons why others wait."""
        return await self.ask(JobExplanation, "explain_job", job=job)

    async def get_job(self, job: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return await self.ask(JobStatus, "get_job", job=job)

    async def stop_job(self, job: str) -> JobStatus:
        """Stop a job; `get_job` raises `NotFound` once all its tasks are gone."""
        return await self.ask(JobStatus, "stop_job", job=job)

    async def change_job(self, verb: str, job: str, expect: int | None = None) -> JobStatus:
        """`pause`, `resume`, `restart` or `rollback` a job.

        `expect`: only if the job is at this version.
        """
        return await self.ask(JobStatus, f"{verb}_job", job=job, expect=expect)

    async def move_job(self, job: str, entitlement: str) -> JobStatus:
        """Move a job to another entitlement, by a rolling update."""
        request = JobMove(entitlement=entitlement)
        return await self.ask(JobStatus, "move_job", request, job=job)

    async def job_events(self, job: str, after: int = 0, limit: int = 100) -> JobEvents:
        """Return the operations on a job's tasks after an event, oldest first."""
        return await self.ask(JobEvents, "job_events", job=job, after=after, limit=limit)

    async def task_story(self, job: str, index: int) -> TaskStory:
        """Return the present operation of a task, and its earlier ones."""
        return await self.ask(TaskStory, "task_story", job=job, index=index)

    def job_logs(
        self,
        job: str,
        index: int,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield the output of a task; `previous`: of its last ended run; `follow`: also future
        output.
        """
        return self.stream(
            ROUTE["job_logs"],
            job=job,
            index=index,
            follow="true" if follow else None,
            since=since,
            tail=tail,
            previous="true" if previous else None,
        )

    async def describe_task(self, job: str, index: int) -> TaskDescription:
        """Return the state of a task, as its agent reports it now."""
        return await self.ask(TaskDescription, "describe_task", job=job, index=index)

    async def restart_task(self, job: str, index: int, request: RestartRequest) -> TaskStory:
        """Stop a task and start it again where it is."""
        return await self.ask(TaskStory, "restart_task", request, job=job, index=str(index))

    async def move_task(self, name: str, index: int, request: MoveRequest) -> TaskStory:
        """Move a task of a job to another machine."""
        return await self.ask(TaskStory, "move_task", request, job=name, index=str(index))

    def exec_task(
        self, job: str, index: int, command: list[str], *, tty: bool, window: Window
    ) -> AbstractAsyncContextManager[Duplex]:
        """Run a command inside a task; the last message of the stream is an `ExecEnd`."""
        return self.open_duplex(
            ROUTE["exec_task"],
            job=job,
            index=index,
            command=msgspec.json.encode(command).decode(),
            tty="true" if tty else None,
            rows=window.rows,
            columns=window.columns,
        )

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the healthy tasks of a job; waits for a revision above `after`."""
        return await self.ask(
            Endpoints, "get_endpoints", timeout_s=wait_s + 10.0, job=job, after=after, wait_s=wait_s
        )

    async def shard(self, job: str, shard: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the healthy tasks that serve a shard; waits as `endpoints` does."""
        return await self.ask(
            Endpoints,
            "get_shard",
            timeout_s=wait_s + 10.0,
            job=job,
            shard=shard,
            after=after,
            wait_s=wait_s,
        )

    async def get_shards(self, job: str) -> ShardMapView:
        """Return which tasks serve which shards of a job."""
        return await self.ask(ShardMapView, "get_shards", job=job)

    async def put_weights(self, job: str, weights: EndpointWeights) -> Endpoints:
        """Set the tasks' shares of a job's requests for a while."""
        return await self.ask(Endpoints, "put_weights", weights, job=job)

    async def put_shards(self, job: str, shards: ShardMap) -> ShardMapView:
        """Set which tasks serve which shards of a job."""
        return await self.ask(ShardMapView, "put_shards", shards, job=job)

    async def watch_endpoints(
        self, known: Mapping[str, int | None], wait_s: float = 0.0
    ) -> EndpointChanges:
        """Return the endpoints of the jobs that changed, out of many."""
        wanted = WatchedJobs(known=dict(known), wait_s=wait_s)
        return await self.ask(EndpointChanges, "watch_endpoints", wanted, timeout_s=wait_s + 10.0)

    async def list_limits(self) -> LimitViews:
        """Return the limits on destructive operations, and what they hold back."""
        return await self.ask(LimitViews, "list_limits")

    async def lift_limit(self, name: str, request: Lift) -> LimitView:
        """Lift a limit for a while."""
        return await self.ask(LimitView, "lift_limit", request, limit=name)

    async def list_images(self) -> Images:
        """Return all images of the image store."""
        return await self.ask(Images, "list_store_images")

    async def remove_image(self, digest: str) -> None:
        """Remove an image that no job runs, or raise `Conflict` with their names."""
        await self.call(ROUTE["remove_image"], digest=digest)

    async def push_image(
        self, digest: str, format_: ImageFormat, stream: AsyncIterator[bytes]
    ) -> ImageInfo:
        """Stream an image into the store; it is kept only if it has this digest."""
        return await self.ask(
            ImageInfo,
            "push_image",
            stream=stream,
            timeout_s=PUSH_TIMEOUT_S,
            digest=digest,
            format=format_.value,
        )

    async def sign_image(self, digest: str, signature: ImageSignature) -> ImageInfo:
        """Store a signature of an image."""
        return await self.ask(ImageInfo, "sign_image", signature, digest=digest)

    async def name_image(self, digest: str, name: str) -> ImageInfo:
        """Let a name mean an image of the store from now on."""
        request = NamedImage(name=name)
        return await self.ask(ImageInfo, "name_image", request, digest=digest)

    async def create_token(self, request: TokenRequest) -> Token:
        """Return a one-time join token."""
        return await self.ask(Token, "create_token", request)

    async def readyz(self) -> Liveness:
        """Return whether the control plane is ready, or raise `Busy`."""
        return await self.ask(Liveness, "readyz")
