"""From a route table and handlers to an aiohttp application.

A handler takes a `Call` and returns the route's response type (or, for `stream_out`, an
async iterator of bytes). Every failure leaves as a problem document; nothing a client can
send makes a 500.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from wire import duplex
from wire.connection import attended, prepare
from wire.errors import Busy, InvalidInput, NotFound, Problem, TooLarge, TooSlow, TwineError
from wire.openapi import QUERY_MAX, document
from wire.routes import Route, decode_json
from wire.units import shown

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""Of a request that is not a stream. A job file is a few KiB."""
BODY_PAUSE_S = 30.0
"""How long one may wait for a body, all pauses together, …"""
BODY_BYTES_PER_S = 4096
"""… and a second more for so many bytes."""
_request_id: ContextVar[str] = ContextVar("request_id", default="")
NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
READER_CHECK_S = 5.0
"""How long a stream that has nothing to say (a quiet log) outlives its reader at most."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is calling, as proved by TLS or by the kernel."""

    name: str
    """URI SAN of the certificate, or `local:<uid>` on the unix socket."""
    role: str
    """`local`, or what stands behind the trust domain: `component`, `host`, `user`, …"""
    address: str = ""
    """IP address it calls from; empty on a unix socket."""
    valid_from: float = 0.0
    """When its certificate begins, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, decoded."""

    route: Route
    peer: Peer
    body: Any = None
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None
    request_id: str = ""
    """Made here for each request; the caller finds it in the header `X-Request-Id`."""

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a query parameter as a number that is finite and not negative."""
        text = self.query.get(name)
        if text is None or text == "":
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < QUERY_MAX:
            raise InvalidInput(f"parameter {name} must be a number >= 0, not {text!r}")
        return value

    def flag(self, name: str) -> bool:
        """Return whether a query parameter says yes."""
        return self.query.get(name, "").lower() in ("1", "true", "yes")


class Waiting:
    """Counts the requests that stay: followed logs, images, waits for news."""

    def __init__(self, most: int = 512, of_one: int = 128) -> None:
        """Let so many stay in all, and of one caller."""
        self._most, self._of_one = most, of_one
        self._of: Counter[str] = Counter()

    @contextmanager
    def of(self, caller: str) -> Iterator[None]:
        """Count one request for as long as it is answered, or raise `Busy`."""
        if self._of[caller] >= self._of_one or self._of.total() >= self._most:
            raise Busy(
                f"{self._of[caller]} requests of {caller or 'this caller'} wait already, of"
                f" {self._of.total()} in all",
                hint="end some of them: followed logs, for instance",
            )
        self._of[caller] += 1
        try:
            yield
        finally:
            self._of[caller] -= 1
            if not self._of[caller]:
                del self._of[caller]


Handler = Callable[[Call], Awaitable[Any]]
Authorize = Callable[[web.Request, Route], Peer]
"""Returns who calls, or raises `Unauthenticated` or `Forbidden`."""


def make_app(
    title: str,
    routes: Sequence[Route],
    handlers: Mapping[str, Handler],
    authorize: Authorize,
    *,
    version: str,
    metrics: Callable[[], bytes | Awaitable[bytes]] | None = None,
) -> web.Application:
    """Return the application; every route must have a handler and every handler a route."""
    if missing := {r.name for r in routes} ^ set(handlers):
        raise TypeError(f"routes and handlers differ: {', '.join(sorted(missing))}")
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[attended, _numbered, _problems]
    )
    app.on_response_prepare.extend([_name_request, prepare])
    waiting = Waiting()
    for route in routes:
        app.router.add_route(
            route.method, route.path, _endpoint(route, handlers[route.name], authorize, waiting)
        )
    spec = msgspec.json.encode(document(title, version, routes))

    async def openapi(request: web.Request) -> web.Response:
        authorize(request, Route("openapi", "GET", "/openapi.json"))
        return web.Response(body=spec, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)
    if metrics is not None:

        async def scrape(request: web.Request) -> web.Response:
            authorize(request, Route("metrics", "GET", "/metrics"))
            text = metrics()
            return web.Response(
                body=text if isinstance(text, bytes) else await text,
                headers={"Content-Type": "text/plain; version=0.0.4"},
            )

        app.router.add_get("/metrics", scrape)
    return app


def _endpoint(
    route: Route, handler: Handler, authorize: Authorize, waiting: Waiting
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def endpoint(request: web.Request) -> web.StreamResponse:
        peer = authorize(request, route)
        if route.is_waiting:
            with waiting.of(peer.name):
                return await answered(request, await _decode(route, request, peer))
        return await answered(request, await _decode(route, request, peer))

    async def answered(request: web.Request, call: Call) -> web.StreamResponse:
        if route.duplex:
            return await duplex.serve(request, await handler(call))
        if route.stream_out:
            return await _stream(request, await handler(call))
        result = await handler(call)
        status = 202 if result is None else 200
        return web.Response(
            body=msgspec.json.encode(result), status=status, content_type="application/json"
        )

    return endpoint


async def _decode(route: Route, request: web.Request, peer: Peer) -> Call:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidInput(
            "a compressed body is not taken", hint="send it as it is, without Content-Encoding"
        )
    if unknown := set(request.query) - set(route.query):
        raise InvalidInput(
            f"{route.method} {route.path} takes no parameter {', '.join(sorted(unknown))}",
            hint=f"it takes: {', '.join(route.query) or 'none'}",
        )
    body = None
    stream = None
    if route.stream_in:
        stream = _received(request)
    elif route.request is not None:
        data = b"".join([chunk async for chunk in _received(request, MAX_BODY_BYTES)])
        body = decode_json(data, route.request, "the request body", route.relations)
    query = dict(request.query)
    return Call(route, peer, body, dict(request.match_info), query, stream, request_id())


async def _received(request: web.Request, limit: int | None = None) -> AsyncIterator[bytes]:
    """Yield the body as it comes; one that breaks off is the caller's error, not ours."""
    size, clock = 0, asyncio.get_running_loop().time
    began, waited = clock(), 0.0
    chunks = request.content.iter_any().__aiter__()
    try:
        while True:
            asked = clock()
            left_s = BODY_PAUSE_S + size / BODY_BYTES_PER_S - waited
            async with asyncio.timeout(left_s):
                chunk = await anext(chunks, b"")
            waited += clock() - asked
            if not chunk:
                return
            size += len(chunk)
            if limit is not None and size > limit:
                raise TooLarge(f"the request body is over {limit} bytes")
            yield chunk
    except TimeoutError as e:
        raise TooSlow(
            f"of the request body {size} bytes came within {clock() - began:.0f} s",
            hint=f"send at least {BODY_BYTES_PER_S} bytes a second",
        ) from e
    except (aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError, ConnectionError) as e:
        raise InvalidInput("the request body broke off before its end") from e


async def _stream(request: web.Request, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
    """Answer in chunks. What fails before the first one is a problem document like any other;
    a stream that breaks later ends without its end mark, so that the reader can tell.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    try:
        async for chunk in _while_connected(request, chunks):
            if not response.prepared:
                await response.prepare(request)
            await response.write(chunk)
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        log.debug("the reader of a stream went away", extra={"path": request.path})
    except Exception as e:
        if not response.prepared:
            raise
        log.warning("a stream broke off", extra={"path": request.path, "reason": str(e)})
        if request.transport is not None:
            request.transport.abort()
    return response


async def _while_connected(
    request: web.Request, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield the chunks until there are no more, or nobody is there to read them."""
    try:
        while True:
            waiting = asyncio.ensure_future(anext(chunks))
            try:
                while not (await asyncio.wait({waiting}, timeout=READER_CHECK_S))[0]:
                    if request.transport is None or request.transport.is_closing():
                        return
                yield waiting.result()
            except StopAsyncIteration:
                return
            finally:
                await _cancelled(waiting)
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


async def _cancelled(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.cancel()
        await asyncio.wait({future})


def request_id() -> str:
    """Return the id of the request that is being answered; empty outside of one."""
    return _request_id.get()


@web.middleware
async def _numbered(request: web.Request, handler: NextHandler) -> web.StreamResponse:
    """Give the request an id, by which answer, log and audit log can be brought together."""
    _request_id.set(secrets.token_hex(8))
    return await handler(request)


async def _name_request(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request_id()


@web.middleware
async def _problems(request: web.Request, handler: NextHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TwineError as e:
        return _refused(e.problem())
    except web.HTTPNotFound:
        error = NotFound(f"there is no {request.path} here", hint="see /openapi.json")
        return _refused(error.problem())
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        detail = f"{request.path} takes {allowed}, not {shown(request.method)}"
        answer = _refused(Problem(code="no_such_method", status=405, detail=detail))
        answer.headers["Allow"] = allowed
        return answer
    except web.HTTPException as e:
        return _refused(Problem(code="http", status=e.status, detail=e.reason))
    except ConnectionResetError:
        raise
    except Exception:
        extra = {"path": request.path, "request": request_id()}
        log.exception("a request failed in a way that is a bug", extra=extra)
        detail = "the server failed in a way that is a bug; its log has the traceback"
        return _refused(Problem(code="internal", status=500, detail=detail))


def _refused(problem: Problem) -> web.Response:
    problem = msgspec.structs.replace(problem, request_id=request_id())
    headers = {"Retry-After": "1"} if problem.retryable else {}
    return web.Response(
        body=msgspec.json.encode(problem),
        status=problem.status,
        headers=headers,
        content_type="application/problem+json",
    )


class _OursOnly(logging.Filter):
    """Keeps broken HTTP, which anybody can send, from filling the log with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def http_log(owner: str) -> logging.Logger:
    """Return the logger to give to an `AppRunner` of this module."""
    logger = logging.getLogger(f"{owner}.http")
    logger.addFilter(_OursOnly())
    return logger
