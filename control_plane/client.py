"""The client of the control plane: one typed method per row of the route table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from agent.api import ImageFormat, ImageInfo, Images, ImageSignature, Liveness, NamedImage
from agent.api.exec import Window
from control_plane.api.capacity import (
    DecisionNote,
    EntitlementRequest,
    EntitlementRequests,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
    EntitlementWish,
)
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.api.inventory import (
    BrokerMachines,
    BrokerViews,
    Drain,
    ImportResult,
    Lend,
    MachineScope,
    Records,
    Relabel,
    Revoke,
    Undrain,
)
from control_plane.api.jobs import Endpoints, Jobs, JobSpec, JobStatus
from control_plane.api.limits import Lift, LimitView, LimitViews
from control_plane.api.machines import MachineRecord, Machines, MachineView, Token, TokenRequest
from control_plane.api.maintenance import (
    GoOn,
    MaintenanceWish,
    Plans,
    PlanView,
    Preview,
    Reported,
)
from control_plane.api.operations import JobEvents, JobMove, MoveWish, RestartWish, TaskStory
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.profiles import ProfileStats, ProfileView, ProfileWish
from control_plane.api.routes import ROUTES
from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.api.tasks import TaskDescription
from control_plane.api.watch import EndpointsNews, WatchedJobs
from control_plane.api.weights import EndpointWeights
from control_plane.intent_client import IntentClient
from control_plane.people_client import PeopleClient
from control_plane.rebalance_client import RebalanceClient
from wire.duplex import Duplex
from wire.routes import Route

_T = TypeVar("_T")
_ROUTE: dict[str, Route] = {r.name: r for r in ROUTES}
PUSH_TIMEOUT_S = 3600.0
_CHUNK = 1 << 18


class ControlPlaneClient(IntentClient, PeopleClient, RebalanceClient):
    """Client of a region's front end, over TLS or its unix socket.

    Every method raises what the front end raised, or `Unreachable`.
    """

    max_answer_bytes = 2 << 30
    """All jobs of a large region, with each of their tasks."""

    async def list_jobs(self) -> Jobs:
        """Return all jobs."""
        return _as(Jobs, await self.call(_ROUTE["list_jobs"]))

    async def apply_job(
        self, spec: JobSpec, *, dry_run: bool = False, is_new: bool = False
    ) -> JobStatus:
        """Create or update a job; returns before the change is carried out.

        With `is_new` it is only created: `Conflict` if there is a job of this name.
        """
        answer = await self.call(
            _ROUTE["apply_job"],
            spec,
            job=spec.name,
            dry_run="true" if dry_run else None,
            new="true" if is_new else None,
        )
        return _as(JobStatus, answer)

    async def plan_job(self, spec: JobSpec) -> JobPlan:
        """Return what applying a job would do; changes nothing."""
        return _as(JobPlan, await self.call(_ROUTE["plan_job"], spec, job=spec.name))

    async def explain_job(self, job: str) -> JobExplanation:
        """Return how many tasks of a job have a machine, and all reasons why others wait."""
        return _as(JobExplanation, await self.call(_ROUTE["explain_job"], job=job))

    async def get_job(self, job: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return _as(JobStatus, await self.call(_ROUTE["get_job"], job=job))

    async def stop_job(self, job: str) -> JobStatus:
        """Stop a job; `get_job` raises `NotFound` once all its tasks are gone."""
        return _as(JobStatus, await self.call(_ROUTE["stop_job"], job=job))

    async def change_job(self, verb: str, job: str) -> JobStatus:
        """`pause`, `resume`, `restart` or `rollback` a job."""
        return _as(JobStatus, await self.call(_ROUTE[f"{verb}_job"], job=job))

    async def move_job(self, job: str, entitlement: str) -> JobStatus:
        """Move a job to another entitlement, by a rolling update."""
        wish = JobMove(entitlement=entitlement)
        return _as(JobStatus, await self.call(_ROUTE["move_job"], wish, job=job))

    async def job_events(self, job: str, after: int = 0, limit: int = 100) -> JobEvents:
        """Return what was done to a job's tasks after an event, oldest first."""
        return _as(
            JobEvents, await self.call(_ROUTE["job_events"], job=job, after=after, limit=limit)
        )

    async def task_story(self, job: str, index: int) -> TaskStory:
        """Return what is being done to a task of a job, and what was done before."""
        return _as(TaskStory, await self.call(_ROUTE["task_story"], job=job, index=index))

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
            _ROUTE["job_logs"],
            job=job,
            index=index,
            follow="true" if follow else None,
            since=since,
            tail=tail,
            previous="true" if previous else None,
        )

    async def describe_task(self, job: str, index: int) -> TaskDescription:
        """Return the state of a task, as its agent reports it now."""
        return _as(TaskDescription, await self.call(_ROUTE["describe_task"], job=job, index=index))

    async def restart_task(self, job: str, index: int, wish: RestartWish) -> TaskStory:
        """Stop a task and start it again where it is."""
        answer = await self.call(_ROUTE["restart_task"], wish, job=job, index=str(index))
        return _as(TaskStory, answer)

    def exec_task(
        self, job: str, index: int, command: list[str], *, tty: bool, window: Window
    ) -> AbstractAsyncContextManager[Duplex]:
        """Run a command inside a task; the last message of the stream is an `ExecEnd`."""
        return self.converse(
            _ROUTE["exec_task"],
            job=job,
            index=index,
            command=msgspec.json.encode(command).decode(),
            tty="true" if tty else None,
            rows=window.rows,
            columns=window.columns,
        )

    async def endpoints(self, job: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the healthy tasks of a job; waits for a revision above `after`."""
        answer = await self.call(
            _ROUTE["get_endpoints"], timeout_s=wait_s + 10.0, job=job, after=after, wait_s=wait_s
        )
        return _as(Endpoints, answer)

    async def shard(self, job: str, shard: str, after: int = 0, wait_s: float = 0.0) -> Endpoints:
        """Return the healthy tasks that serve a shard; waits as `endpoints` does."""
        answer = await self.call(
            _ROUTE["get_shard"],
            timeout_s=wait_s + 10.0,
            job=job,
            shard=shard,
            after=after,
            wait_s=wait_s,
        )
        return _as(Endpoints, answer)

    async def get_shards(self, job: str) -> ShardMapView:
        """Return which tasks serve which shards of a job."""
        return _as(ShardMapView, await self.call(_ROUTE["get_shards"], job=job))

    async def put_weights(self, job: str, weights: EndpointWeights) -> Endpoints:
        """Set the tasks' shares of a job's requests for a while."""
        return _as(Endpoints, await self.call(_ROUTE["put_weights"], weights, job=job))

    async def put_shards(self, job: str, shards: ShardMap) -> ShardMapView:
        """Set which tasks serve which shards of a job."""
        return _as(ShardMapView, await self.call(_ROUTE["put_shards"], shards, job=job))

    async def watch_endpoints(
        self, known: Mapping[str, int | None], wait_s: float = 0.0
    ) -> EndpointsNews:
        """Return the endpoints of the jobs that changed, out of many."""
        wanted = WatchedJobs(known=dict(known), wait_s=wait_s)
        answer = await self.call(_ROUTE["watch_endpoints"], wanted, timeout_s=wait_s + 10.0)
        return _as(EndpointsNews, answer)

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        """Return all machines, or all machines of a scope; reads every page."""
        scope = scope or MachineScope()
        given = {name: getattr(scope, name) for name in MachineScope.__struct_fields__}
        if scope.unavailable is not None:
            given["unavailable"] = "true" if scope.unavailable else "false"
        machines: list[MachineView] = []
        after: str | None = None
        while after != "":
            answer = await self.call(_ROUTE["list_machines"], after=after, **given)
            page = _as(Machines, answer)
            machines += page.machines
            after = page.next
        return Machines(machines=machines)

    async def get_machine(self, machine: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        return _as(MachineView, await self.call(_ROUTE["get_machine"], machine=machine))

    async def remove_machine(self, machine: str) -> None:
        """Forget a free machine that is decommissioned or was replaced."""
        await self.call(_ROUTE["remove_machine"], machine=machine)

    async def import_machines(
        self, data: bytes, format_: str = "csv", *, dry_run: bool = False, simulated: bool = False
    ) -> ImportResult:
        """Bring the region's machines in line with a list, all of it or nothing."""

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]

        answer = await self.call(
            _ROUTE["import_machines"],
            stream=chunks(),
            timeout_s=PUSH_TIMEOUT_S,
            format=format_,
            dry_run="true" if dry_run else None,
            simulated="true" if simulated else None,
        )
        return _as(ImportResult, answer)

    async def drain_machines(self, wish: Drain) -> Records:
        """Announce that machines will be away: their tasks move, and no new ones come."""
        return _as(Records, await self.call(_ROUTE["drain_machines"], wish))

    async def label_machines(self, wish: Relabel) -> Records:
        """Set and remove labels of machines."""
        return _as(Records, await self.call(_ROUTE["label_machines"], wish))

    async def undrain_machines(self, wish: Undrain) -> Records:
        """End planned unavailability of machines."""
        return _as(Records, await self.call(_ROUTE["undrain_machines"], wish))

    async def held_back_machines(self) -> HeldBackMachines:
        """Return silent machines whose state is not decided yet, and why."""
        return _as(HeldBackMachines, await self.call(_ROUTE["held_back_machines"]))

    async def confirm_down(self, wish: ConfirmDown) -> ConfirmedDown:
        """Confirm that silent machines are down, whatever holds the verdict back."""
        return _as(ConfirmedDown, await self.call(_ROUTE["confirm_down"], wish))

    async def list_limits(self) -> LimitViews:
        """Return the limits on destructive operations, and what they hold back."""
        return _as(LimitViews, await self.call(_ROUTE["list_limits"]))

    async def lift_limit(self, name: str, wish: Lift) -> LimitView:
        """Lift a limit for a while."""
        return _as(LimitView, await self.call(_ROUTE["lift_limit"], wish, limit=name))

    async def list_plans(self) -> Plans:
        """Return all planned work on machines, the newest first."""
        return _as(Plans, await self.call(_ROUTE["list_plans"]))

    async def get_plan(self, name: str) -> PlanView:
        """Return a plan with all its waves."""
        return _as(PlanView, await self.call(_ROUTE["get_plan"], plan=name))

    async def preview_plan(self, name: str, wish: MaintenanceWish) -> Preview:
        """Return the effect of planned work on jobs; changes nothing."""
        return _as(Preview, await self.call(_ROUTE["preview_plan"], wish, plan=name))

    async def accept_plan(self, name: str, wish: MaintenanceWish) -> PlanView:
        """Announce planned work on machines, wave by wave."""
        return _as(PlanView, await self.call(_ROUTE["accept_plan"], wish, plan=name))

    async def cancel_plan(self, name: str) -> PlanView:
        """Cancel planned work."""
        return _as(PlanView, await self.call(_ROUTE["cancel_plan"], plan=name))

    async def report_plan(self, name: str, wish: Reported) -> PlanView:
        """Report that the work on some machines is over."""
        return _as(PlanView, await self.call(_ROUTE["report_plan"], wish, plan=name))

    async def resume_plan(self, name: str, wish: GoOn) -> PlanView:
        """Continue a paused plan."""
        return _as(PlanView, await self.call(_ROUTE["resume_plan"], wish, plan=name))

    async def move_task(self, name: str, index: int, wish: MoveWish) -> TaskStory:
        """Move a task of a job to another machine."""
        answer = await self.call(_ROUTE["move_task"], wish, job=name, index=str(index))
        return _as(TaskStory, answer)

    async def propose_profile(
        self, entitlement: str, wish: ProfileWish, *, dry_run: bool = False
    ) -> ProfileView:
        """Bring the machines of an entitlement to a changed profile, a few at a time."""
        route, dry = _ROUTE["propose_profile"], "true" if dry_run else None
        answer = await self.call(route, wish, entitlement=entitlement, dry_run=dry)
        return _as(ProfileView, answer)

    async def get_profile_rollout(self, entitlement: str) -> ProfileView:
        """Return the profile of an entitlement, and how far a change of it is."""
        route = _ROUTE["get_profile_rollout"]
        return _as(ProfileView, await self.call(route, entitlement=entitlement))

    async def rollback_profile(self, entitlement: str) -> ProfileView:
        """Bring its machines back to the profile before."""
        route = _ROUTE["rollback_profile"]
        return _as(ProfileView, await self.call(route, entitlement=entitlement))

    async def profile_stats(self) -> ProfileStats:
        """Return how long hosts take to change each kind of setting."""
        return _as(ProfileStats, await self.call(_ROUTE["profile_stats"]))

    async def lend_machine(self, wish: Lend) -> MachineRecord:
        """Give a whole, empty machine to another entitlement for a while."""
        return _as(MachineRecord, await self.call(_ROUTE["lend_machine"], wish))

    async def revoke_machines(self, wish: Revoke) -> Records:
        """Call lent machines back."""
        return _as(Records, await self.call(_ROUTE["revoke_machines"], wish))

    async def list_brokers(self) -> BrokerViews:
        """Return the resource brokers, one per data center."""
        return _as(BrokerViews, await self.call(_ROUTE["list_brokers"]))

    async def broker_machines(self, datacenter: str, name_after: str = "") -> BrokerMachines:
        """Return a page of a broker's machines, and the revision from which to watch them."""
        answer = await self.call(
            _ROUTE["broker_machines"], datacenter=datacenter, name_after=name_after or None
        )
        return _as(BrokerMachines, answer)

    async def broker_changes(
        self, datacenter: str, after: int, wait_s: float = 0.0
    ) -> BrokerMachines:
        """Return a broker's changes after a revision; waits for the first."""
        answer = await self.call(
            _ROUTE["broker_machines"],
            timeout_s=wait_s + 30.0,
            datacenter=datacenter,
            after=after,
            wait_s=wait_s,
        )
        return _as(BrokerMachines, answer)

    async def list_entitlements(self) -> Entitlements:
        """Return all entitlements."""
        return _as(Entitlements, await self.call(_ROUTE["list_entitlements"]))

    async def get_entitlement(self, name: str) -> EntitlementView:
        """Return an entitlement, or raise `NotFound`."""
        return _as(EntitlementView, await self.call(_ROUTE["get_entitlement"], entitlement=name))

    async def put_entitlement(self, name: str, spec: EntitlementSpec) -> EntitlementView:
        """Create an entitlement or change it, at once or not at all."""
        answer = await self.call(_ROUTE["put_entitlement"], spec, entitlement=name)
        return _as(EntitlementView, answer)

    async def delete_entitlement(self, name: str) -> None:
        """Remove an entitlement that has no jobs."""
        await self.call(_ROUTE["delete_entitlement"], entitlement=name)

    async def request_entitlement(self, name: str, wish: EntitlementWish) -> EntitlementRequest:
        """Request an entitlement, a change or a removal; the answer has the outcome."""
        answer = await self.call(_ROUTE["request_entitlement"], wish, entitlement=name)
        return _as(EntitlementRequest, answer)

    async def list_requests(self, *, decided: bool = False) -> EntitlementRequests:
        """Return the requests that wait for a decision, or all of them."""
        answer = await self.call(_ROUTE["list_requests"], all="true" if decided else None)
        return _as(EntitlementRequests, answer)

    async def get_request(self, request_id: str) -> EntitlementRequest:
        """Return a request, or raise `NotFound`."""
        return _as(EntitlementRequest, await self.call(_ROUTE["get_request"], request=request_id))

    async def approve_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Grant a request."""
        return await self._decide("approve_request", request_id, note)

    async def deny_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Refuse a request."""
        return await self._decide("deny_request", request_id, note)

    async def withdraw_request(self, request_id: str, note: str = "") -> EntitlementRequest:
        """Withdraw the caller's own request."""
        return await self._decide("withdraw_request", request_id, note)

    async def _decide(self, route: str, request_id: str, note: str) -> EntitlementRequest:
        answer = await self.call(_ROUTE[route], DecisionNote(note=note), request=request_id)
        return _as(EntitlementRequest, answer)

    async def get_capacity(self) -> CapacityReport:
        """Return granted, held, used and remaining capacity."""
        return _as(CapacityReport, await self.call(_ROUTE["get_capacity"], timeout_s=120.0))

    async def list_images(self) -> Images:
        """Return all images of the image store."""
        return _as(Images, await self.call(_ROUTE["list_store_images"]))

    async def remove_image(self, digest: str) -> None:
        """Remove an image that no job runs, or raise `Conflict` with their names."""
        await self.call(_ROUTE["remove_image"], digest=digest)

    async def push_image(
        self, digest: str, format_: ImageFormat, stream: AsyncIterator[bytes]
    ) -> ImageInfo:
        """Stream an image into the store; it is kept only if it has this digest."""
        answer = await self.call(
            _ROUTE["push_image"],
            stream=stream,
            timeout_s=PUSH_TIMEOUT_S,
            digest=digest,
            format=format_.value,
        )
        return _as(ImageInfo, answer)

    async def sign_image(self, digest: str, signature: ImageSignature) -> ImageInfo:
        """Store a signature of an image."""
        return _as(ImageInfo, await self.call(_ROUTE["sign_image"], signature, digest=digest))

    async def name_image(self, digest: str, name: str) -> ImageInfo:
        """Let a name mean an image of the store from now on."""
        wish = NamedImage(name=name)
        return _as(ImageInfo, await self.call(_ROUTE["name_image"], wish, digest=digest))

    def fetch_image(self, digest: str) -> AsyncIterator[bytes]:
        """Yield the stream of an image."""
        return self.stream(_ROUTE["fetch_image"], digest=digest)

    async def create_token(self, request: TokenRequest) -> Token:
        """Return a one-time join token."""
        return _as(Token, await self.call(_ROUTE["create_token"], request))

    async def readyz(self) -> Liveness:
        """Return whether the control plane is ready, or raise `Busy`."""
        return _as(Liveness, await self.call(_ROUTE["readyz"]))


def _as(kind: type[_T], value: object) -> _T:
    assert isinstance(value, kind)
    return value
