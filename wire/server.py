"""Makes an aiohttp application of a route table and handlers.

A handler takes a `Call` and returns the route's response type (or, for `stream_out`, an
async iterator of bytes). Every failure is answered with a problem document. No input of a client
causes a 500.
"""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import MultiMapping

from wire import duplex
from wire.connection import prepare_response, tracked
from wire.errors import InvalidInput, NotFound, Problem, TooLarge, TooSlow, TwineError
from wire.fairness import (
    MAX_BODY_BYTES,
    AccountLocks,
    ComputeShares,
    OpenRequests,
    Peer,
    body_limit,
)
from wire.json_parts import has_many, json_parts
from wire.long_answers import CallerLeft, answer_in_chunks, until_caller_leaves
from wire.openapi import QUERY_MAX, document
from wire.routes import Route, decode_json
from wire.units import shown

log = logging.getLogger(__name__)

BODY_PAUSE_S = 30.0
"""How long the server waits for a body, all pauses together."""
BODY_BYTES_PER_S = 4096
"""Bytes of a body that add a second to `BODY_PAUSE_S`."""
_ENCODE_S = 0.001
"""Time for which a long answer is encoded before the event loop gets a turn."""
_FLAGS = {
    **dict.fromkeys(("1", "true", "yes"), True),
    **dict.fromkeys(("", "0", "false", "no"), False),
}
_request_id: ContextVar[str] = ContextVar("request_id", default="")
NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
    """Made by the server for each request; returned in the header `X-Request-Id`."""
    also: Sequence[Any] = ()
    """Records that the handler stores in the transaction of its change: the audit record."""

    def storing(self, also: Sequence[Any]) -> Call:
        """Return the same call, whose handler stores `also` with its change."""
        return replace(self, also=also)

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
            raise InvalidInput(f"parameter {name} must be a number >= 0, not {text[:80]!r}")
        return value

    def whole(self, name: str, default: int | None = None, least: int = 0) -> int | None:
        """Return a query parameter as a whole number that is at least `least`."""
        if not self.query.get(name):
            return default
        value = self.number(name) or 0.0
        if value < least or not value.is_integer():
            text = self.query[name]
            raise InvalidInput(
                f"parameter {name} must be a whole number >= {least}, not {text[:80]!r}"
            )
        return int(value)

    def limit(self, most: int, default: int | None = None) -> int:
        """Return the parameter `limit`, at most `most`; without it `default`, or else `most`."""
        return min(self.whole("limit", default, least=1) or most, most)

    def flag(self, name: str) -> bool:
        """Return whether a query parameter is true; false if it is absent."""
        text = self.query.get(name, "").lower()
        if text not in _FLAGS:
            raise InvalidInput(f"parameter {name} must be true or false, not {text!r}")
        return _FLAGS[text]


Handler = Callable[[Call], Awaitable[Any]]
Authorize = Callable[[web.Request, Route], Peer]
"""Returns the caller, or raises `Unauthenticated` or `Forbidden`."""


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
        client_max_size=MAX_BODY_BYTES,
        middlewares=[tracked, _with_request_id, _with_problem_documents],
    )
    app.on_response_prepare.extend([_set_request_id, prepare_response])
    fairness = _Fairness()
    for route in routes:
        endpoint = _Endpoint(route, handlers[route.name], authorize, fairness)
        app.router.add_route(
            route.method, route.path, endpoint.serve, expect_handler=_check_expectation
        )
    _add_documents(app, msgspec.json.encode(document(title, version, routes)), authorize, metrics)
    return app


def _add_documents(
    app: web.Application,
    spec: bytes,
    authorize: Authorize,
    metrics: Callable[[], bytes | Awaitable[bytes]] | None,
) -> None:
    """Add the API document, and the metrics if there are any."""

    def check(request: web.Request, name: str) -> None:
        route = Route(name, "GET", request.path)
        authorize(request, route)
        _check_parameters(route, request)

    async def openapi(request: web.Request) -> web.Response:
        check(request, "openapi")
        return web.Response(body=spec, content_type="application/json")

    async def scrape(request: web.Request) -> web.Response:
        assert metrics is not None
        check(request, "metrics")
        text = metrics()
        body = text if isinstance(text, bytes) else await text
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=body, headers=headers)

    app.router.add_get("/openapi.json", openapi)
    if metrics is not None:
        app.router.add_get("/metrics", scrape)


@dataclass(frozen=True, slots=True)
class _Fairness:
    """The limits that callers share."""

    open_requests: OpenRequests = field(default_factory=OpenRequests)
    computing: ComputeShares = field(default_factory=ComputeShares)
    account_locks: AccountLocks = field(default_factory=AccountLocks)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One route, and the handler of its calls."""

    route: Route
    handler: Handler
    authorize: Authorize
    fairness: _Fairness

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, and charge its caller for the computing time."""
        computing, peer = self.fairness.computing, self.authorize(request, self.route)
        await computing.wait_for_share(peer)
        if peer.is_trusted:
            return await self._within_limits(request, peer)
        return await computing.charged(peer, self._within_limits(request, peer))

    async def _within_limits(self, request: web.Request, peer: Peer) -> web.StreamResponse:
        if self.route.is_waiting:
            with self.fairness.open_requests.counted(peer):
                return await self._answer(request, peer)
        if self.route.is_costly:
            async with self.fairness.account_locks.of(peer):
                return await self._answer(request, peer)
        return await self._answer(request, peer)

    async def _answer(self, request: web.Request, peer: Peer) -> web.StreamResponse:
        route, call = self.route, await self._decode_call(request, peer)
        if route.duplex:
            return await duplex.serve(request, await self.handler(call))
        if route.stream_out:
            return await answer_in_chunks(request, await self.handler(call))
        work = self.handler(call)
        try:
            result = await (until_caller_leaves(request, work) if route.is_waiting else work)
        except CallerLeft:
            return web.Response(status=499)  # goes nowhere; an error would be logged
        status = 202 if result is None else 200
        body = await _encode(result)
        return web.Response(body=body, status=status, content_type="application/json")

    async def _decode_call(self, request: web.Request, peer: Peer) -> Call:
        route, body, stream = self.route, None, None
        _check_parameters(route, request)
        if route.stream_in:
            stream = _receive_body(request)
        elif route.request is not None:
            data = await _read_body(request, body_limit(route, peer))
            # many bodies of one caller may have come meanwhile
            await self.fairness.computing.wait_for_share(peer)
            body = decode_json(data, route.request, "the request body", route.relations)
        path, query = dict(request.match_info), dict(request.query)
        return Call(route, peer, body, path, query, stream, request_id())


async def _encode(result: Any) -> bytes | io.BytesIO:
    """Return an answer as JSON. A long list is encoded, and later sent, in parts: other requests
    are answered in between.
    """
    if not has_many(result):
        return msgspec.json.encode(result)
    body, clock = io.BytesIO(), time.perf_counter
    until = clock() + _ENCODE_S
    for part in json_parts(result):
        body.write(part)
        if clock() > until:
            await asyncio.sleep(0)
            until = clock() + _ENCODE_S
    body.seek(0)
    return body


def _check_parameters(route: Route, request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidInput(
            "a compressed body is not supported", hint="send it without Content-Encoding"
        )
    if unknown := set(request.query) - set(route.query):
        raise InvalidInput(
            f"{route.method} {route.path} has no parameter {', '.join(sorted(unknown))}",
            hint=f"its parameters: {', '.join(route.query) or 'none'}",
        )
    refuse_repeated(request.query)


def refuse_repeated(query: MultiMapping[str]) -> None:
    """Raise `InvalidInput` for a parameter that is given twice: only one value could be used."""
    if len(query) != len(set(query)):
        twice = sorted(name for name in set(query) if len(query.getall(name)) > 1)
        raise InvalidInput(
            f"query parameter {', '.join(twice)} is given more than once", hint="give it once"
        )


async def _read_body(request: web.Request, limit: int) -> bytes:
    """Return the whole body. A small body has mostly arrived with its header."""
    content = request.content
    if not content.is_eof() or content.exception() is not None:
        return b"".join([chunk async for chunk in _receive_body(request, limit)])
    data = content.read_nowait()
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is over {limit} bytes")


async def _receive_body(request: web.Request, limit: int | None = None) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. A body that breaks off is the caller's error."""
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
                raise _too_large(limit)
            yield chunk
    except TimeoutError as e:
        raise TooSlow(
            f"only {size} bytes of the request body came within {clock() - began:.0f} s",
            hint=f"send at least {BODY_BYTES_PER_S} bytes a second",
        ) from e
    except (aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError, ConnectionError) as e:
        raise InvalidInput("the request body ended early") from e


def request_id() -> str:
    """Return the id of the request that is being answered; empty outside of one."""
    return _request_id.get()


@web.middleware
async def _with_request_id(request: web.Request, handler: NextHandler) -> web.StreamResponse:
    """Give the request an id that its answer, the log and the audit log contain."""
    _request_id.set(secrets.token_hex(8))
    return await handler(request)


async def _check_expectation(request: web.Request) -> web.StreamResponse | None:
    """Request the body, or refuse another expectation with a problem document (BUG-HT27)."""
    wanted = request.headers.get("Expect", "")
    if request.version != HttpVersion11:
        return None
    if wanted.lower() != "100-continue":
        detail = f"only 100-continue can be expected here, not {shown(wanted)}"
        return _problem_response(Problem(code="expectation_failed", status=417, detail=detail))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer itself has not begun
    return None


async def _set_request_id(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request_id()


@web.middleware
async def _with_problem_documents(request: web.Request, handler: NextHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TwineError as e:
        return _problem_response(e.problem())
    except web.HTTPNotFound:
        error = NotFound(f"there is no {request.path} here", hint="see /openapi.json")
        return _problem_response(error.problem())
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        detail = f"{request.path} supports {allowed}, not {shown(request.method)}"
        answer = _problem_response(Problem(code="no_such_method", status=405, detail=detail))
        answer.headers["Allow"] = allowed
        return answer
    except web.HTTPException as e:
        return _problem_response(Problem(code="http", status=e.status, detail=e.reason))
    except ConnectionResetError:
        raise
    except Exception:
        extra = {"path": request.path, "request": request_id()}
        log.exception("a request failed because of a bug", extra=extra)
        detail = "the server failed because of a bug; its log has the traceback"
        return _problem_response(Problem(code="internal", status=500, detail=detail))


def _problem_response(problem: Problem) -> web.Response:
    problem = msgspec.structs.replace(problem, request_id=request_id())
    headers = {"Retry-After": "1"} if problem.retryable else {}
    return web.Response(
        body=msgspec.json.encode(problem),
        status=problem.status,
        headers=headers,
        content_type="application/problem+json",
    )


class _NoClientErrors(logging.Filter):
    """Drops tracebacks of broken HTTP, which any client can send."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def http_log(owner: str) -> logging.Logger:
    """Return the logger to give to an `AppRunner` of this module."""
    logger = logging.getLogger(f"{owner}.http")
    logger.addFilter(_NoClientErrors())
    return logger
