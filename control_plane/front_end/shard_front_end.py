"""The server of a shard's process: it accepts only requests that the core forwards.

The core checks the caller's rights. The shard trusts the caller's name in the request, because only
the core may call here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar

from aiohttp import web

from agent.api import Ack, Liveness
from control_plane.api.machines import MachineRecord, RegionMap
from control_plane.api.maintenance import PlacesFound
from control_plane.api.region_status import ProcessStatus
from control_plane.api.shard_routes import (
    CALLER_HEADER,
    CORE_HEADER,
    FORWARDED,
    REVISION_HEADER,
    SHARD_ROUTES,
)
from control_plane.front_end.intent_handlers import IntentHandlers
from control_plane.front_end.job_handlers import JobHandlers
from control_plane.front_end.machine_handlers import MachineHandlers
from control_plane.front_end.metrics import Metrics, one_chunk
from control_plane.front_end.task_handlers import TaskHandlers
from control_plane.roles import ControlPlane
from control_plane.store import Store
from wire.errors import Busy, Forbidden, TwineError
from wire.fairness import Peer
from wire.peers import expect_peer, peer_of
from wire.routes import Route
from wire.server import Call, Handler, NextHandler, make_app
from wire.tls import CONTROL_PLANE

BEHIND_S = 2.0
"""How long a request waits until this process has read what the core had written."""
_CORE_LIFE: ContextVar[str] = ContextVar("core", default="")
"""Identifier of the core process that sent the request; empty: a core of an earlier release."""


class ShardFrontEnd(JobHandlers, IntentHandlers, TaskHandlers, MachineHandlers):
    """A handler for each of `SHARD_ROUTES`."""

    def __init__(self, control_plane: ControlPlane, store: Store, domain: str) -> None:
        """`domain` is the trust domain of the core."""
        super().__init__(control_plane)
        self._store, self._domain = store, domain

    def app(self, version: str) -> web.Application:
        """Return the application."""
        self._metrics = Metrics(SHARD_ROUTES, self._plane)
        handlers = {r.name: self.handler(r) for r in SHARD_ROUTES}
        app = make_app("Twine shard", SHARD_ROUTES, handlers, self.authorize, version=version)
        app.middlewares.insert(0, self._metrics.count)
        app.middlewares.append(self._synchronize)
        return app

    async def map_region(self, call: Call) -> RegionMap:
        """Count the machines that this process follows, and no others."""
        plane = self._plane

        def is_own(record: MachineRecord) -> bool:
            pool = record.entitlement
            return bool(pool) and plane.role.runs(plane.ownership.shard_of(pool))

        return await self._plane.inventory.region_map(call.query.get("by", "state"), is_own)

    def authorize(self, request: web.Request, _: Route) -> Peer:
        """Return the user whose request the core forwards; raise for any other component."""
        transport = request.transport
        ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
        if ssl_object is None:
            raise Forbidden("a shard is served over TLS only")
        certificate = ssl_object.getpeercert()
        expect_peer(certificate, CONTROL_PLANE, self._domain)
        core = peer_of(certificate, self._domain)
        caller = request.headers.get(CALLER_HEADER, core.name)
        return Peer(name=caller, role="forwarded", is_trusted=True)

    def handler(self, route: Route) -> Handler:
        """Return the handler of a row, which refuses calls that belong to another shard.

        It also refuses calls of a core that was replaced. An answer counts only while this process
        still leads: another one may have changed it.
        """
        handler: Handler = getattr(self, route.name)

        async def checked(call: Call) -> object:
            self._check_core()
            if route.name in FORWARDED:
                self._check_owner(route, call)
            try:
                answer = await handler(call)
            except TwineError:
                self._check_leading()
                raise
            self._check_leading()
            return answer

        of_process = ("healthz", "readyz", "process_status", "shard_metrics")
        return handler if route.name in of_process else checked

    def _check_core(self) -> None:
        """Raise if the core that sent the request no longer leads (BUG-CP57).

        A core that was paused may forward a request that its client has sent again meanwhile.
        """
        life, processes = _CORE_LIFE.get(), self._plane.processes
        if life and processes is not None and life != processes.core_life():
            raise Busy("this core no longer leads: another one was elected", hint="try again")

    def _check_leading(self) -> None:
        if failure := self._store.failure():
            raise Busy(f"this shard can no longer answer: {failure}")

    def _check_owner(self, route: Route, call: Call) -> None:
        """Raise if a request belongs to another shard."""
        shards, job = self._plane.shards, call.path.get("job", "")
        if job and shards.number_of_job(job) is not None:
            shards.of_job(job)
        elif route.name in ("apply_job", "plan_job"):
            shards.of_entitlement(call.body.entitlement)

    @web.middleware
    async def _synchronize(self, request: web.Request, handler: NextHandler) -> web.StreamResponse:
        """Handle a request once this process has read the core's revision; answer with its own."""
        asked = request.headers.get(REVISION_HEADER, "")
        if asked.isdecimal():
            await self.follow(int(asked), request.headers.get(CORE_HEADER, ""))
        response = await handler(request)
        if not response.prepared:
            response.headers[REVISION_HEADER] = str(self._store.revision())
        return response

    async def follow(self, revision: int, core: str) -> None:
        """Return once this process has followed to the revision of a core, or raise `Busy`.

        Then it knows the election of that core, so another one that leads is a later one.
        """
        _CORE_LIFE.set(core)
        if not await self._plane.followed(revision, BEHIND_S):
            raise Busy("this shard is behind the store", hint="try again")

    async def release_idle(self, call: Call) -> Ack:
        """Give back idle machines."""
        await self._plane.release_idle(call.path["entitlement"])
        return Ack()

    async def shard_metrics(self, _: Call) -> AsyncIterator[bytes]:
        """Stream the metrics of this process."""
        return one_chunk(self._metrics.text())

    async def process_status(self, _: Call) -> ProcessStatus:
        """Report the state of this process."""
        return self._plane.process_counts(self._plane.shards.loads())

    async def find_places(self, call: Call) -> PlacesFound:
        """Find places for tasks of this shard's jobs."""
        return await self._plane.maintenance.previewer.find_places(call.body)

    async def readyz(self, _: Call) -> Liveness:
        """Answer whether everything is loaded and runs."""
        state = await self._plane.ready()
        if not state.ok:
            raise Busy(f"the shard is not ready: {state.detail}")
        return state
