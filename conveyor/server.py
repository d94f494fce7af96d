"""The HTTP API of the delivery service: a unix socket, and mutual TLS if configured."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

from aiohttp import web

from conveyor.routes import READS, ROUTES, WRITES
from conveyor.runs import PipelinePlan, PipelineView, PipelineViews, RunHistory
from conveyor.service import DeliveryService
from wire import listen
from wire.errors import Forbidden, InvalidInput, Unauthenticated
from wire.fairness import Peer
from wire.peers import local_user, principal, tls_peer
from wire.routes import Route
from wire.server import Call, Handler, make_app

TITLE = "Twine conveyor"
HISTORY_MAX = 100


class DeliveryAccess:
    """The rights of callers: users read, the named writers and the local socket change."""

    def __init__(self, writers: frozenset[str], domain: str = "") -> None:
        self._writers, self._domain = writers, domain

    def __call__(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise `Unauthenticated` or `Forbidden`."""
        user = local_user(request.transport)
        if user is not None:
            if user[0] not in (0, os.getuid()):
                raise Forbidden(f"user id {user[0]} may not use this socket", hint="call as root")
            return Peer(name="local", role="local", is_trusted=True)
        peer = tls_peer(request.transport, self._domain)
        if peer is None:
            raise Unauthenticated("the delivery service is served over TLS only")
        if peer.role != "user":
            raise Forbidden(f"{peer.name} is not a user")
        if route.needs == WRITES and principal(peer) not in self._writers:
            raise Forbidden(
                f"{peer.name} may not change pipelines",
                hint="add the user to `writers` in the service's configuration",
            )
        if route.needs not in (READS, WRITES) and route.name != "openapi":
            raise Forbidden(f"no role may call {route.path}")
        return peer


def handlers(service: DeliveryService) -> Mapping[str, Handler]:
    """Return a handler for each row of the route table."""

    async def list_pipelines(_: Call) -> PipelineViews:
        return await service.views()

    async def get_pipeline(call: Call) -> PipelineView:
        return await service.view(call.path["pipeline"])

    async def apply_pipeline(call: Call) -> PipelineView:
        _same_name(call)
        return await service.apply(call.body, _caller(call.peer))

    async def remove_pipeline(call: Call) -> None:
        await service.remove(call.path["pipeline"])

    async def plan_pipeline(call: Call) -> PipelinePlan:
        _same_name(call)
        return await service.plan(call.body)

    async def start_run(call: Call) -> PipelineView:
        return await service.start(call.path["pipeline"], call.body, _caller(call.peer))

    async def control_run(call: Call) -> PipelineView:
        return await service.control(call.path["pipeline"], call.body, _caller(call.peer))

    async def get_history(call: Call) -> RunHistory:
        limit, run = call.limit(HISTORY_MAX, 10), call.whole("run")
        return await service.history(call.path["pipeline"], limit, run)

    found = (
        list_pipelines,
        get_pipeline,
        apply_pipeline,
        remove_pipeline,
        plan_pipeline,
        start_run,
        control_run,
        get_history,
    )
    return {handler.__name__: handler for handler in found}


def _caller(peer: Peer) -> str:
    """Return the name of a caller in the history of a pipeline: `user:ann`, `local`."""
    return f"user:{principal(peer)}" if peer.role == "user" else peer.name


def _same_name(call: Call) -> None:
    if call.body.name != call.path["pipeline"]:
        raise InvalidInput(f"pipeline {call.body.name} cannot be put at {call.path['pipeline']!r}")


@asynccontextmanager
async def serving(
    service: DeliveryService,
    access: DeliveryAccess,
    local: Path,
    tls: tuple[str, int, ssl.SSLContext] | None = None,
) -> AsyncIterator[None]:
    """Serve on a unix socket and, with `tls` (host, port, context), on TCP, until left."""
    app = make_app(
        TITLE, ROUTES, handlers(service), access, version=metadata.version("twine-cluster")
    )
    sock = listen.unix_socket(local)
    tcp, context = None, None
    try:
        if tls is not None:
            host, port, context = tls
            tcp = listen.tcp_socket(host, port)
        async with listen.serving(app, tcp, context, sock):
            yield
    finally:
        sock.close()
        local.unlink(missing_ok=True)
