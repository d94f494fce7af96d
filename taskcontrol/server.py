"""Serves a controller over HTTP with mutual TLS, only for this cluster's control plane."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from aiohttp import web

from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.routes import PROCESS, ROUTES
from wire import listen, tls
from wire.errors import ConfigError, Unauthenticated
from wire.fairness import Peer
from wire.openapi import document
from wire.peers import expect_peer
from wire.routes import Route
from wire.server import Call, make_app
from wire.tls import CONTROL_PLANE, Credential

log = logging.getLogger(__name__)
Answer = TaskControlResponse | Awaitable[TaskControlResponse]
Process = Callable[[TaskControlRequest], Answer]
"""The controller: a function, or a coroutine function, of a request."""
TITLE = "Twine TaskController"
_RELOAD_S = 30.0
"""Interval between two reads of the credential file; a new one is used without a restart."""


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a controller, as plain values."""
    return document(TITLE, metadata.version("twine-cluster"), ROUTES)


def app(process: Process) -> web.Application:
    """Return the application that calls `process`. It must be served over mutual TLS."""

    async def answer(call: Call) -> TaskControlResponse:
        response = process(call.body)
        return await response if inspect.isawaitable(response) else response

    return make_app(
        TITLE,
        ROUTES,
        {PROCESS.name: answer},
        _authorize,
        version=metadata.version("twine-cluster"),
    )


def _authorize(request: web.Request, _: Route) -> Peer:
    transport = request.transport
    ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
    if ssl_object is None:
        raise Unauthenticated("a controller is served over TLS only")
    return expect_peer(ssl_object.getpeercert(), CONTROL_PLANE)


@asynccontextmanager
async def serving(process: Process, credential: Path, host: str, port: int) -> AsyncIterator[int]:
    """Serve until left; yields the port, a free one if `port` is 0."""
    held = tls.load(credential)
    contexts = tls.RenewedContexts()
    context = contexts.add(partial(tls.server_context, require_client=True), held)
    sock = listen.tcp_socket(host, port)
    reloading = asyncio.create_task(_reload_credential(credential, held, contexts))
    try:
        async with listen.serving(app(process), sock, context, None):
            yield sock.getsockname()[1]
    finally:
        reloading.cancel()
        with suppress(asyncio.CancelledError):
            await reloading
        sock.close()


async def _reload_credential(path: Path, held: Credential, contexts: tls.RenewedContexts) -> None:
    """Load a renewed credential and its authorities without a restart, until cancelled."""
    while True:
        await asyncio.sleep(_RELOAD_S)
        try:
            loaded = tls.load(path)
            if loaded != held:
                contexts.renew(loaded)
                held = loaded
                log.info("new credential loaded", extra={"not_after": held.not_after})
        except ConfigError as e:
            log.warning("the credential cannot be read", extra={"reason": str(e)})


async def serve(
    process: Process,
    credential: Path,
    host: str = "0.0.0.0",
    port: int = 7450,
    started: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with serving(process, credential, host, port) as chosen:
        log.info("controller serves", extra={"host": host, "port": chosen})
        started(chosen)
        await stopping.wait()


def run(process: Process, credential: str | Path, host: str = "0.0.0.0", port: int = 7450) -> None:
    """Serve a custom controller; runs until SIGTERM or SIGINT."""
    asyncio.run(serve(process, Path(credential), host, port))
