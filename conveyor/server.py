"""The HTTP API of the delivery service: a unix socket, and mutual TLS if configured."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

from aiohttp import web

from conveyor.api import PipelineSpec
from conveyor.routes import READS, ROUTES, WRITES
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

    def __init__(self, writers: frozenset[str]) -> None:
        self._writers = writers

    def __call__(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise `Unauthenticated` or `Forbidden`."""
        user = local_user(request.transport)
        if user is not None:
            if user[0] not in (0, os.getuid()):
                raise Forbidden(f"user id {user[0]} may not use this socket", hint="call as root")
            return Peer(name="local", role="local", is_trusted=True)
        peer = tls_peer(request.transport)
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
    return {
        "list_pipelines": lambda _: service.views(),
        "get_pipeline": lambda call: service.view(_name(call)),
        "apply_pipeline": lambda call: service.apply(_spec(call), _caller(call.peer)),
        "remove_pipeline": lambda call: service.remove(_name(call)),
        "plan_pipeline": lambda call: service.plan(_spec(call)),
        "start_run": lambda call: service.start(_name(call), call.body, _caller(call.peer)),
        "control_run": lambda call: service.control(_name(call), call.body, _caller(call.peer)),
        "get_history": lambda call: service.history(
            _name(call), call.limit(HISTORY_MAX, 10), call.whole("run")
        ),
    }


def _name(call: Call) -> str:
    return call.path["pipeline"]


def _spec(call: Call) -> PipelineSpec:
    """Return the pipeline that a call sends, or raise `InvalidInput` if its name is another one."""
    spec: PipelineSpec = call.body
    if spec.name != _name(call):
        raise InvalidInput(f"pipeline {spec.name} cannot be put at {_name(call)!r}")
    return spec


def _caller(peer: Peer) -> str:
    """Return the name of a caller in the history of a pipeline: `user:ann`, `local`."""
    return f"user:{principal(peer)}" if peer.role == "user" else peer.name


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
    tcp, context = None, None
    with listen.local_socket(local) as sock:
        if tls is not None:
            host, port, context = tls
            tcp = listen.tcp_socket(host, port)
        async with listen.serving(app, tcp, context, sock):
            yield
