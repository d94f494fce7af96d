"""A front end as a separate process: it authenticates callers and forwards their calls to the core.

It keeps no state and refuses only unauthenticated callers, so any number of front ends may run. The
core trusts a front end only for the name of the calling user (`access`).

After a pause of its process it refuses changes that it may have received before: their callers may
have sent them again through another front end, and other changes since.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from agent.api import Liveness
from control_plane.api.routes import ROUTES
from control_plane.api.shard_routes import CALLER_HEADER
from control_plane.front_end.access import ANYONE, Access, caller_header
from control_plane.runtime.runtime import Runtime
from wire.client import Lane, WireClient
from wire.connection import HttpConnection
from wire.duplex import relay_to
from wire.errors import Busy, Forbidden, TwineError, Unreachable
from wire.fairness import Peer
from wire.process_metrics import add_process_metrics
from wire.routes import Route
from wire.server import Call, make_app

log = logging.getLogger(__name__)
_HOST_ROUTES = frozenset(("join",))
"""Routes that hosts call without a certificate; the core needs the addresses of the hosts."""
RELAYED: tuple[Route, ...] = tuple(
    route
    for route in ROUTES
    if (route.needs or ANYONE in route.roles) and route.name not in _HOST_ROUTES
)
"""The routes that users and unauthenticated callers may call."""
_CALL_S, _WAIT_S, _PUSH_S = 30.0, 90.0, 3600.0
"""Timeouts of a usual call, of one that waits for changes, and of a large transfer."""
_PROBE_S, _PROBE_TIMEOUT_S = 0.5, 2.0
_CALLER: ContextVar[Peer] = ContextVar("caller")
"""The caller whose request the present asyncio task forwards."""
_ACCEPTED: ContextVar[float] = ContextVar("accepted", default=math.inf)
"""When the connection of that caller was accepted, by the time of the event loop."""
_HEALTH = next(route for route in ROUTES if route.name == "healthz")


class CoreClient(WireClient):
    """A client of one core."""

    max_answer_bytes = 2 << 30
    limits: Mapping[Lane, int] = dict.fromkeys(Lane, 4096)
    """Connections of all callers of this front end; each caller waits for changes separately."""

    def __init__(self, url: str, tls: ssl.SSLContext) -> None:
        super().__init__(url, tls, timeout_s=_CALL_S)
        self.headers = lambda: {CALLER_HEADER: caller_header(_CALLER.get())}


class FrontEndRelay:
    """A handler for each of `RELAYED`, which calls the leading core."""

    def __init__(
        self, cores: Sequence[str], tls: ssl.SSLContext, domain: str, runtime: Runtime
    ) -> None:
        """`cores` are URLs; only the leading core listens. No connection is opened yet."""
        self._runtime, self._paused_until = runtime, -math.inf
        runtime.on_pause(self._note_pause)
        self._cores = [CoreClient(url, tls) for url in cores]
        self._core, self._access = self._cores[0], Access(owner_uid=-1, domain=domain)
        self._registry = add_process_metrics(CollectorRegistry())

    def app(self, version: str) -> web.Application:
        """Return the application."""
        handlers = {route.name: partial(self._forward, route) for route in RELAYED}
        app = make_app(
            "Twine front end",
            RELAYED,
            {**handlers, "healthz": self.healthz},
            self.authorize,
            version=version,
            metrics=lambda: generate_latest(self._registry),
        )
        app.on_response_prepare.append(self._close_older)
        return app

    def authorize(self, request: web.Request, route: Route) -> Peer:
        """Return the calling user, or raise; hosts and components must call the core."""
        self._runtime.check_clocks()
        _ACCEPTED.set(_accepted_at(request))
        peer = self._access(request, route)
        if peer.role not in ("user", ANYONE):
            raise Forbidden(
                f"{peer.name} may not call this front end: it serves users only",
                hint="hosts and components call the core directly",
            )
        return peer

    async def follow_core(self) -> None:
        """Switch to the core that leads whenever the present one does not answer, forever."""
        _CALLER.set(Peer(name=ANYONE, role=ANYONE))
        while True:
            if not await self._is_answering(self._core):
                for core in self._cores:
                    if core is not self._core and await self._is_answering(core):
                        log.info("calls another core", extra={"url": core.endpoint})
                        self._core = core
                        break
            await asyncio.sleep(_PROBE_S)

    async def close(self) -> None:
        """Close all connections."""
        for core in self._cores:
            await core.close()

    async def healthz(self, _: Call) -> Liveness:
        """Answer that this process is alive; `readyz` is that of the core."""
        return Liveness(ok=True)

    async def _is_answering(self, core: CoreClient) -> bool:
        try:
            await core.call(_HEALTH, timeout_s=_PROBE_TIMEOUT_S)
        except TwineError as e:
            log.debug("core does not answer", extra={"url": core.endpoint, "reason": str(e)})
            return False
        return True

    def _note_pause(self, _: float) -> None:
        self._paused_until = self._runtime.now()

    def _check_pause(self) -> None:
        """Raise if this process may have received a change before a pause.

        A connection accepted after the pause has a present caller, who took part in its handshake.
        """
        self._runtime.check_clocks()
        if _ACCEPTED.get() <= self._paused_until:
            raise Busy(
                "this front end was paused, and does not pass on changes from before",
                hint="try again on a new connection; nothing was changed",
            )

    async def _close_older(self, request: web.Request, response: web.StreamResponse) -> None:
        """Close a connection from before a pause with its answer."""
        if _accepted_at(request) <= self._paused_until:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _forward(self, route: Route, call: Call) -> Any:
        _CALLER.set(call.peer)
        if route.is_change:
            self._check_pause()
        core, parameters = self._core, {**call.path, **call.query}
        if route.stream_out:
            return core.stream(route, **parameters)
        timeout_s = _PUSH_S if route.stream_in else _WAIT_S if route.is_waiting else _CALL_S
        sent: dict[str, Any] = {"stream": call.stream, "timeout_s": timeout_s, **parameters}
        try:
            if route.duplex:
                return await relay_to(core.open_duplex(route, **parameters))
            return await core.call(route, call.body, **sent)
        except Unreachable as e:
            raise _core_away(e) from e


def _accepted_at(request: web.Request) -> float:
    connection = request.protocol
    return connection.accepted_at if isinstance(connection, HttpConnection) else math.inf


def _core_away(why: TwineError) -> Busy:
    return Busy(
        f"the core did not answer: {why}",
        hint="try again in some seconds; the change may have been made: read the object first",
    )
