"""One connection of an HTTP server: what it is doing, and whether it is past a deadline."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
from aiohttp import web

from wire.certificates import begins_at, ends_at, identity_in
from wire.errors import Problem
from wire.limits import ConnectionLimits
from wire.pending import PendingConnection

MAX_LINE_BYTES = 8190
"""Longest request line and header; a longer one is answered with 400."""
_HALF_CLOSED_S = 2.0
"""Seconds until a half-closed connection without a request is closed."""
_CLOSING_S = 5.0
SERVER = "Twine"
"""Value of the header `Server`, without versions."""
_NO_ACCESS_LOG: Any = None
NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpConnection(web.RequestHandler):
    """An admitted connection: its caller proved an identity, or has none."""

    __slots__ = (
        "_blocked_at",
        "_closing_at",
        "_half_closed_at",
        "_header_began_at",
        "_idle_since",
        "_on_close",
        "_on_disconnect",
        "_request",
        "accepted_at",
        "address",
        "name",
        "network",
        "not_after",
        "notify",
        "peer",
        "valid_from",
    )

    def __init__(
        self,
        runner: web.AppRunner,
        logger: logging.Logger,
        on_close: Callable[[HttpConnection], None],
        notify: Callable[[], None],
        pending: PendingConnection,
        certificate: Mapping[str, Any],
    ) -> None:
        """`on_close` is called when the connection ends, `notify` when a deadline begins.

        That deadline may be earlier than the present one.
        """
        loop = asyncio.get_running_loop()
        assert runner.server is not None
        super().__init__(
            runner.server,
            loop=loop,
            access_log=_NO_ACCESS_LOG,
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            logger=logger,
        )
        self.address, self.network = pending.address, pending.network
        self.name = identity_in(certificate)
        self.accepted_at = pending.since
        """When it was accepted, before its handshake, by the time of the event loop."""
        self.valid_from, self.not_after = begins_at(certificate), ends_at(certificate)
        """When its certificate begins and ends, in seconds since 1970."""
        self.peer: Any = None
        """What the server has stored about the caller; None before its first request."""
        self._on_close, self.notify = on_close, notify
        self._on_disconnect: list[Callable[[], object]] = []
        """Called when the connection is lost."""
        self._request: web.Request | None = None
        self._idle_since = loop.time()
        """When its last request was answered, or the connection was made."""
        self._header_began_at: float | None = None
        """When the first byte of an incomplete header came."""
        self._blocked_at: float | None = None
        self._half_closed_at: float | None = None
        self._closing_at: float | None = None

    @property
    def is_served(self) -> bool:
        """Return whether a request is being answered."""
        return self._request is not None

    def deadline(self, now: float, wall: float, limits: ConnectionLimits) -> tuple[float, str]:
        """Return when the connection must end if nothing changes, and why; infinity: no limit.

        Times are those of the event loop. A request that is being answered has no deadline.
        """
        known = [(now + self.not_after - wall, "the certificate has expired")]
        if self._blocked_at is not None:
            known.append((self._blocked_at + limits.write_s, "the client did not read answers"))
        if self.transport is None or self.transport.is_closing():
            self._closing_at = self._closing_at or now
            known.append((self._closing_at + _CLOSING_S, "it did not close in time"))
            return min(known)
        if self._half_closed_at is not None:
            most = _HALF_CLOSED_S if self._request is None else limits.header_s
            known.append((self._half_closed_at + most, "no further request was possible"))
        if self._request is not None:
            return min(known)
        if self._header_began_at is not None:
            known.append((self._header_began_at + limits.header_s, "a header was incomplete"))
        else:
            most = limits.idle_s if self.name or not self.address else limits.header_s
            known.append((self._idle_since + most, "no request came"))
        return min(known)

    def abort(self) -> None:
        """Close the connection without waiting for anything."""
        if self.transport is not None:
            self.transport.abort()

    def begin_request(self, request: web.Request) -> None:
        """Record that a request is being answered from now on."""
        self._request, self._header_began_at = request, None
        if self._half_closed_at is not None:
            self._no_more_body()

    def end_request(self) -> None:
        """Record that the handler of the request has answered."""
        self._request, self._idle_since = None, self._loop.time()
        self.notify()

    @property
    def is_half_closed(self) -> bool:
        """Return whether the client has ended its stream, and waits for its answer."""
        return self._half_closed_at is not None

    # -- called by the transport

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and record when a header began."""
        if self._request is None and self._header_began_at is None:
            self._header_began_at = self._loop.time()
            self.notify()
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection open after the client ended its stream, until it is answered."""
        super().eof_received()
        if self._request is None and self._header_began_at is None:
            return False  # the client sent no request
        self._half_closed_at = self._loop.time()
        self.notify()
        if self._request is not None:
            self._no_more_body()
        return not isinstance(self._get_ssl(), ssl.SSLObject)  # TLS cannot be half closed here

    def _get_ssl(self) -> object:
        return None if self.transport is None else self.transport.get_extra_info("ssl_object")

    def _no_more_body(self) -> None:
        assert self._request is not None
        if not self._request.content.is_eof():
            self._request.content.set_exception(ConnectionResetError("closed before its end"))
            self._request.content.feed_eof()  # so that the handler does not wait for the rest

    def pause_writing(self) -> None:
        """Record that the client does not read what is written."""
        self._blocked_at = self._loop.time()
        self.notify()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        self._blocked_at = None
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release everything."""
        super().connection_lost(exc)
        self._data_received_cb = None  # of a websocket, which refers to this connection: a cycle
        self._request = None
        for call in tuple(self._on_disconnect):
            call()
        self._on_close(self)

    @contextmanager
    def on_disconnect(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` if the connection is lost meanwhile."""
        self._on_disconnect.append(call)
        try:
            yield
        finally:
            self._on_disconnect.remove(call)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer broken HTTP with a problem document."""
        super().handle_error(request, status, exc, message)
        detail = "this is not a valid HTTP request"
        code = "invalid_input" if status < 500 else "internal"
        if status >= 500:
            detail = "the server failed because of a bug; its log has the traceback"
        response = web.Response(
            body=msgspec.json.encode(Problem(code=code, status=status, detail=detail)),
            status=status,
            headers={"Server": SERVER},
            content_type="application/problem+json",
        )
        response.force_close()
        self.notify()
        return response


@web.middleware
async def tracked(request: web.Request, handler: NextHandler) -> web.StreamResponse:
    """Report to the connection when its request begins and ends."""
    connection = request.protocol
    if not isinstance(connection, HttpConnection):
        return await handler(request)
    connection.begin_request(request)
    try:
        return await handler(request)
    finally:
        connection.end_request()


def on_disconnect(request: web.Request, call: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `call` if the caller of a request disconnects meanwhile."""
    connection = request.protocol
    return (
        connection.on_disconnect(call) if isinstance(connection, HttpConnection) else nullcontext()
    )


def is_disconnected(request: web.Request) -> bool:
    """Return whether the caller of a request can no longer receive an answer."""
    return request.transport is None or request.transport.is_closing()


async def prepare_response(request: web.Request, response: web.StreamResponse) -> None:
    """Set `Server` without versions; close a half-closed connection after its answer."""
    response.headers["Server"] = SERVER
    connection = request.protocol
    if isinstance(connection, HttpConnection) and connection.is_half_closed:
        response.headers["Connection"] = "close"
        response.force_close()
