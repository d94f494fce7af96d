"""The front end of a core in a simulated region whose shards run as processes.

Requests about a job go through the product's forwarding to the front end of its shard's process.
The connection between the two may be slow or cut, and the other process may be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.api.machines import Machines
from control_plane.api.operations import JobMove, MoveRequest, RestartRequest, TaskStory
from control_plane.api.routes import ROUTES
from control_plane.front_end.forwarding import CoreState, Forwarding, ShardClient
from control_plane.front_end.intent_handlers import IntentHandlers
from control_plane.front_end.job_handlers import JobHandlers
from control_plane.front_end.machine_handlers import MachineHandlers
from control_plane.front_end.shard_front_end import ShardFrontEnd
from control_plane.roles import ControlPlane
from wire.errors import TwineError, Unreachable
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call, Handler

if TYPE_CHECKING:
    from vm_lab.region.process_life import ProcessLife

OWNER = Peer("user:owner", "user", is_trusted=True)
CORE = Peer("component:control-plane", "forwarded", is_trusted=True)
_BY_NAME = {route.name: route for route in ROUTES}
_CALL_S = 10.0
LATENCY_S = (0.0003, 0.002)


class CoreHandlers(JobHandlers, IntentHandlers, MachineHandlers):
    """The handlers of the front end that a simulated region uses."""


class CoreFrontEnd:
    """Stands for a `ControlPlane`: forwards requests to shards, and passes the rest to the core."""

    def __init__(
        self,
        plane: ControlPlane,
        life: ProcessLife,
        find: Callable[[str], ProcessLife | None],
    ) -> None:
        """`find(url)` returns the process that takes requests there now."""
        self._plane = plane
        handlers = CoreHandlers(plane)
        forwarding = Forwarding(plane, lambda *to: ShardConnection(life, find, *to))
        self._handlers: dict[str, Handler] = {
            name: forwarding.wrap(_BY_NAME[name], getattr(handlers, name))
            for name in (
                *("apply_job", "get_job", "stop_job", "move_task", "restart_task", "move_job"),
                "list_machines",
            )
        }

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the core."""
        return getattr(self._plane, name)

    async def apply_job(self, spec: JobSpec) -> JobStatus:
        """Create a job or change what is wanted of it."""
        return await self._call("apply_job", spec, job=spec.name)  # type: ignore[no-any-return]

    async def get_job(self, name: str) -> JobStatus:
        """Return a job, or raise `NotFound`."""
        return await self._call("get_job", job=name)  # type: ignore[no-any-return]

    async def stop_job(self, name: str) -> JobStatus:
        """Stop all tasks of a job."""
        return await self._call("stop_job", job=name)  # type: ignore[no-any-return]

    async def move_task(self, name: str, index: int, to: str, reason: str) -> TaskStory:
        """Move a task to another machine."""
        request = MoveRequest(to=to, reason=reason)
        return await self._call("move_task", request, job=name, index=str(index))  # type: ignore[no-any-return]

    async def restart_task(self, name: str, index: int, request: RestartRequest) -> TaskStory:
        """Restart a task."""
        return await self._call("restart_task", request, job=name, index=str(index))  # type: ignore[no-any-return]

    async def move_job(self, name: str, entitlement: str) -> JobStatus:
        """Move a job to another entitlement."""
        request = JobMove(entitlement=entitlement)
        return await self._call("move_job", request, job=name)  # type: ignore[no-any-return]

    async def list_machines(self) -> Machines:
        """Return all machines, each as reported by the process that follows it."""
        return await self._call("list_machines")  # type: ignore[no-any-return]

    async def _call(self, name: str, body: Any = None, **path: str) -> Any:
        return await self._handlers[name](Call(_BY_NAME[name], OWNER, body, path))


class ShardConnection(ShardClient):
    """The core's client of a shard's process, over a modelled connection."""

    def __init__(
        self,
        life: ProcessLife,
        find: Callable[[str], ProcessLife | None],
        url: str,
        shard: int,
        core: Callable[[], CoreState],
    ) -> None:
        super().__init__(url, shard, core, None)
        self._life, self._find, self._core = life, find, core

    async def call(
        self,
        route: Route,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> Any:
        """Return the answer of the process at the URL, or raise `Unreachable`."""
        timeline, done = self._life.timeline, self._life.loop.create_future()
        timeline.after(timeout_s or _CALL_S, self._time_out, done)
        call = Call(route, CORE, body, parameters)
        if self._life.path.cut_out:
            return await done
        timeline.after(self._draw_latency(), self._receive, call, self._core(), done)
        answer, self.revision = await done
        return answer

    def _draw_latency(self) -> float:
        return self._life.random.uniform(*LATENCY_S)

    def _receive(self, call: Call, core: CoreState, done: asyncio.Future[Any]) -> None:
        shard = self._find(self.endpoint)
        if shard is None:
            refused = Unreachable(f"cannot reach {self.endpoint}: connection refused")
            self._life.timeline.after(self._draw_latency(), self._life.complete, done, refused)
        elif not shard.path.cut_in:
            shard.loop.create_task(self._answer_from(shard, call, core, done))

    async def _answer_from(
        self, shard: ProcessLife, call: Call, core: CoreState, done: asyncio.Future[Any]
    ) -> None:
        front_end = shard.front_end
        if front_end is None:
            return
        outcome: Any
        try:
            await front_end.follow(core.written, core.life)
            outcome = await front_end.handler(call.route)(call), shard.revision()
        except TwineError as e:
            outcome = e
        if not shard.path.cut_out and shard.alive:
            self._life.timeline.after(self._draw_latency(), self._deliver_answer, done, outcome)

    def _deliver_answer(self, done: asyncio.Future[Any], outcome: Any) -> None:
        if not self._life.path.cut_in:
            self._life.complete(done, outcome)

    def _time_out(self, done: asyncio.Future[Any]) -> None:
        self._life.complete(done, Unreachable(f"cannot reach {self.endpoint}: no answer"))


def shard_front_end_of(plane: ControlPlane, life: ProcessLife) -> ShardFrontEnd:
    """Return the front end of a shard's process, which the core calls."""
    assert life.store is not None
    return ShardFrontEnd(plane, life.store, "sim")
