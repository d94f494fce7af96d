"""The front end: the public API of the control plane, made from the route table.

Handlers translate; they decide nothing. Rights of callers are in `access` and `guard`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from agent.api import Ack, ImageFormat, ImageInfo, Images, Liveness
from control_plane.api.endpoints import Endpoints
from control_plane.api.intent_changes import JobIntents, SizeChanges, SizesWritten
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord
from control_plane.api.people import IssuedCredential
from control_plane.api.routes import ROUTES
from control_plane.api.shards import ShardMapView
from control_plane.api.watch import EndpointChanges, WatchedJobs
from control_plane.front_end.access import Access
from control_plane.front_end.capacity_handlers import CapacityHandlers, ProfileHandlers
from control_plane.front_end.forwarding import Forwarding, ShardClient
from control_plane.front_end.guard import Guard
from control_plane.front_end.identity_handlers import IdentityHandlers
from control_plane.front_end.intent_handlers import IntentHandlers
from control_plane.front_end.job_handlers import JobHandlers
from control_plane.front_end.machine_handlers import MachineHandlers, waiting_time
from control_plane.front_end.maintenance_handlers import MaintenanceHandlers, RebalanceHandlers
from control_plane.front_end.metrics import Metrics, one_chunk
from control_plane.front_end.people_handlers import Issued, PeopleHandlers
from control_plane.front_end.recorder import Recorder, caller_of
from control_plane.front_end.safety_handlers import SafetyHandlers
from control_plane.front_end.task_handlers import TaskHandlers
from control_plane.front_end.trail import Trail
from control_plane.identity.people import KINDS, People
from control_plane.identity.registrar import Registrar
from control_plane.identity.sessions import BrowserSessions
from control_plane.images.store import ImageStore
from control_plane.roles import ControlPlane
from wire.errors import Busy, InvalidInput, Problem, TwineError
from wire.fairness import Peer
from wire.peers import principal
from wire.routes import Route
from wire.server import Call, Handler, make_app

_PUT_SIZE = next(route for route in ROUTES if route.name == "put_size")


def _size_version(answer: JobRecord | JobIntents) -> int:
    """Return the version of a size that was written here, or by the process of a shard."""
    if isinstance(answer, JobRecord):
        return answer.intents[Dimension.SIZE].version
    return next(v.intent.version for v in answer.intents if v.dimension == Dimension.SIZE)


def _wait_parameters(call: Call) -> tuple[int, float]:
    """Return the revision after which a caller wants changes, and the seconds it waits for them."""
    return call.whole("after") or 0, waiting_time(call)


async def _nothing_issued() -> list[IssuedCredential]:
    return []


class FrontEnd(
    JobHandlers,
    CapacityHandlers,
    MachineHandlers,
    SafetyHandlers,
    MaintenanceHandlers,
    ProfileHandlers,
    PeopleHandlers,
    TaskHandlers,
    IdentityHandlers,
    RebalanceHandlers,
    IntentHandlers,
):
    """Has a handler for each row of the table, with the name of the row."""

    def __init__(
        self,
        control_plane: ControlPlane,
        registrar: Registrar,
        images: ImageStore,
        people: People,
        trail: Trail,
        issued: Issued = _nothing_issued,
        ending: Callable[[], Sequence[str]] = list,
        shard_tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take the services that the handlers call.

        `ending` returns the machines whose certificates end within a week. `shard_tls` is for calls
        to the processes of shards.
        """
        self.handlers: dict[str, Handler] = {}
        """By route, behind the guard and the recorder; made by `app`."""
        super().__init__(control_plane)
        self._guard, self._registrar = Guard(people, control_plane), registrar
        self._trail, self._issued, self._shard_tls = trail, issued, shard_tls
        self.sessions = BrowserSessions()
        self.store_failure: Callable[[], str] = str
        """Returns why the main store refuses writes of this process; empty: it accepts them."""
        self._images = images
        self._metrics = Metrics(
            ROUTES,
            control_plane,
            ending,
            registrar.duplicates.known,
            control_plane.rebalancer,
            control_plane.elastic.counts,
        )

    def app(self, access: Access, version: str) -> web.Application:
        """Return the application; its routes are those of the table."""
        tls = self._shard_tls
        connect = None if tls is None else partial(ShardClient, tls=tls)
        forwarding = Forwarding(self._plane, connect)
        recorder = Recorder(self._trail, self.revision_of, ROUTES, forwarding.is_local)
        found = {r.name: forwarding.wrap(r, getattr(self, r.name)) for r in ROUTES}
        self.handlers = {r.name: self._guarded(r, found[r.name], recorder) for r in ROUTES}
        self._recorder, self._access = recorder, access
        self._put_one_size = forwarding.wrap(_PUT_SIZE, self._resize)
        app = make_app(
            "Twine control plane",
            ROUTES,
            self.handlers,
            self.authorize,
            version=version,
            metrics=self._scrape,
        )
        app.middlewares.insert(0, self._metrics.count)
        app.middlewares.append(recorder.refusals(access))
        return app

    def authorize(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise if the route's rule refuses it independently of the body."""
        peer = self._access(request, route)
        self._guard.people.check(peer)
        self._guard.check_early(peer, route)
        return peer.trusted(self._guard.is_trusted(peer))

    async def audit_refusal(
        self, request: web.Request, route: Route, path: Mapping[str, str], error: TwineError
    ) -> None:
        """Record that a form of the console was refused."""
        await self._recorder.note_refusal(request, self._access, route, path, error)

    def check(self, call: Call) -> None:
        """Raise `Forbidden` if the caller may not make this call."""
        self._guard.check(call)

    def _guarded(self, route: Route, handler: Handler, recorder: Recorder) -> Handler:
        """Return a handler behind the guard, and behind the recorder if it changes something."""

        async def guarded(call: Call) -> Any:
            self._guard.check(call)
            self.check_deletion(call)
            if route.is_change and not call.flag("dry_run"):
                return await recorder.carry_out(call, handler)
            try:
                answer = await handler(call)
            except TwineError:
                self._check_leading(route)  # the error depends on what was read, too
                raise
            self._check_leading(route)
            return answer  # it was read while this process led

        return guarded

    def _check_leading(self, route: Route) -> None:
        """Raise `Busy` if this process no longer leads: what it read may have changed since."""
        if route.name != "readyz" and (failure := self.store_failure()):
            raise Busy(f"this control plane can no longer answer: {failure}")

    def revision_of(self, kind: str, name: str) -> int | None:
        """Return the revision of a stored record; None if that kind has none."""
        if kind in KINDS:
            return self._guard.people.revision(f"{kind}/{name}")
        return self._plane.revision_of(kind, name)

    async def _scrape(self) -> bytes:
        return self._metrics.text()

    async def put_sizes(self, call: Call) -> SizesWritten:
        """Write the size of each job as if it were requested alone; none, if one is forbidden.

        Each has its own entry in the audit log and its own answer; together they share the disk's
        syncs, a connection and a request.
        """
        changes: SizeChanges = call.body
        calls = {
            job: dataclasses.replace(call, route=_PUT_SIZE, path={"job": job}, body=change)
            for job, change in changes.sizes.items()
        }
        for size_call in calls.values():
            self._guard.check(size_call)
        written = (
            self._recorder.carry_out(size_call, self._put_one_size) for size_call in calls.values()
        )
        found = await asyncio.gather(*written, return_exceptions=True)
        versions, refused = dict[str, int](), dict[str, Problem]()
        for job, answer in zip(calls, found, strict=True):
            if isinstance(answer, TwineError):
                refused[job] = answer.problem()
            elif isinstance(answer, BaseException):
                raise answer
            else:
                versions[job] = _size_version(answer)
        return SizesWritten(versions=versions, refused=refused)

    async def _resize(self, call: Call) -> JobRecord:
        """Write a size; only a caller of `put_size` gets its effect on the tasks."""
        writer = caller_of(call.peer)
        return await self._plane.intents.resize(call.path["job"], call.body, writer, call.also)

    async def fetch_image(self, call: Call) -> AsyncIterator[bytes]:
        """Stream an image out."""
        return await self._images.stream(call.path["digest"])

    async def push_image(self, call: Call) -> ImageInfo:
        """Stream an image in."""
        assert call.stream is not None
        text = call.query.get("format", ImageFormat.TAR.value)
        try:
            format_ = ImageFormat(text)
        except ValueError:
            raise InvalidInput(f"parameter format must be tar or btrfs, not {text!r}") from None
        bounded = "" if self._guard.caller(call.peer).is_operator else principal(call.peer)
        return await self._images.put(call.path["digest"], format_, call.stream, bounded)

    async def sign_image(self, call: Call) -> ImageInfo:
        """Keep a signature with an image."""
        return await self._images.sign(call.path["digest"], call.body)

    async def name_image(self, call: Call) -> ImageInfo:
        """Give an image a name."""
        by = "" if self._guard.caller(call.peer).is_operator else principal(call.peer)
        return await self._images.name(call.path["digest"], call.body.name, by)

    async def remove_image(self, call: Call) -> Ack:
        """Remove an image that no job runs."""
        digest = call.path["digest"]
        await self._images.remove(digest, self._plane.users_of_image)
        return Ack(detail=f"{digest} is removed")

    async def list_store_images(self, _: Call) -> Images:
        """List the image store."""
        return await self._images.list_images()

    async def get_endpoints(self, call: Call) -> Endpoints:
        """Show the endpoints of a job; can wait for a change."""
        return await self._plane.endpoints(call.path["job"], *_wait_parameters(call))

    async def watch_endpoints(self, call: Call) -> EndpointChanges:
        """Show the endpoints of many jobs; can wait for a change."""
        wanted: WatchedJobs = call.body
        return await self._plane.watch_endpoints(wanted.known, wanted.wait_s)

    async def put_weights(self, call: Call) -> Endpoints:
        """Set the tasks' shares of the requests."""
        return self._plane.discovery.set_weights(call.path["job"], call.body)

    async def put_shards(self, call: Call) -> ShardMapView:
        """Set which tasks serve which shards."""
        return await self._plane.discovery.set_shard_map(call.path["job"], call.body.shards)

    async def get_shards(self, call: Call) -> ShardMapView:
        """Show which tasks serve which shards."""
        return self._plane.discovery.shard_map(call.path["job"])

    async def get_shard(self, call: Call) -> Endpoints:
        """Show the endpoints of a shard; can wait for a change."""
        after, wait_s = _wait_parameters(call)
        job, shard = call.path["job"], call.path["shard"]
        return await self._plane.discovery.shard_endpoints(job, shard, after, wait_s)

    async def shard_metrics(self, call: Call) -> AsyncIterator[bytes]:
        """Stream the metrics of this process, for a shard that it runs."""
        self._plane.shards.of_number(call.path["shard"])
        return one_chunk(self._metrics.text())

    async def readyz(self, _: Call) -> Liveness:
        """Answer whether everything is loaded and runs."""
        state = await self._plane.ready()
        if not state.ok:
            raise Busy(f"the control plane is not ready: {state.detail}")
        return state
