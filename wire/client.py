"""Calls a row of a route table: over TCP with mutual TLS, or over a unix socket.

A refused request raises the same error class that the server raised. Each request is sent once,
whatever its method; retries are up to the caller, which knows if they are safe.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from wire.decoding import decode_in_parts
from wire.duplex import HEARTBEAT_S, MAX_FRAME_BYTES, Duplex, Socket
from wire.error_text import why
from wire.errors import (
    Forbidden,
    InvalidInput,
    Problem,
    ProtocolError,
    Refused,
    TwineError,
    Unreachable,
    from_problem,
)
from wire.routes import Route
from wire.tls import EXPECTED_SERVER
from wire.units import about_size

_T = TypeVar("_T")


class Lane(Enum):
    """What a call is for; each has connections of its own."""

    COMMAND = "command"
    POLL = "poll"
    """A call that may wait for news."""
    READER = "reader"
    """A stream, open until its end: logs, images."""


_LIMITS = {Lane.COMMAND: 100, Lane.POLL: 16, Lane.READER: 100}
"""Connections to one server."""


def _lane_of(route: Route) -> Lane:
    if route.stream_out or route.stream_in:
        return Lane.READER
    return Lane.POLL if route.is_waiting else Lane.COMMAND


def check_endpoint(endpoint: str) -> None:
    """Raise `InvalidInput` if the text is no address of a server."""
    if wrong := _endpoint_error(endpoint):
        raise InvalidInput(
            f"cannot connect to {endpoint!r}: {wrong}",
            hint="for instance unix:/run/twine/agent.sock or https://cp.example:7440",
        )


def _endpoint_error(endpoint: str) -> str:
    if endpoint.startswith("unix:"):
        return "" if endpoint != "unix:" else "the path of the socket is missing"
    if not endpoint.startswith("https://"):
        return "not an https:// or unix: address"
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - raises outside of 0 to 65535
    except ValueError:
        return "the port is not a number from 0 to 65535, or the address is malformed"
    return "" if parts.hostname else "the name of the host is missing"


class WireClient:
    """A connection pool to one server: `https://host:port` or `unix:/path/to.sock`."""

    max_answer_bytes = 64 << 20
    """Room for about 100,000 tasks; the client keeps no longer answer in memory."""
    limits: Mapping[Lane, int] = _LIMITS
    """Connections to the server, by kind of call."""

    def __init__(
        self, endpoint: str, tls: ssl.SSLContext | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Plain http is refused."""
        self.endpoint = endpoint
        self.expected = ""
        """Identity of the server, such as `/host/vm1`, where the context serves many peers."""
        self.headers: Callable[[], Mapping[str, str]] = dict
        """Returns headers that are added to each request."""
        self.on_answer: Callable[[Mapping[str, str]], None] = lambda _: None
        """Called with the headers of each answer."""
        self._base = "http://local" if endpoint.startswith("unix:") else endpoint.rstrip("/")
        self._timeout_s = timeout_s
        self._tls = tls
        self._sessions: dict[Lane, aiohttp.ClientSession] = {}
        self._is_closed = False
        check_endpoint(endpoint)

    async def __aenter__(self) -> Self:
        """Open the pool."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.close()

    async def close(self) -> None:
        """Close all connections, also those in use. The client opens no more."""
        self._is_closed = True
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _open(self, lane: Lane = Lane.COMMAND) -> aiohttp.ClientSession:
        """Return the connections of one kind of calls, so that kinds do not delay each other."""
        if self._is_closed:
            raise Unreachable(f"the connections to {self.endpoint} are closed permanently")
        if self.expected:
            EXPECTED_SERVER.set(self.expected)  # of the task that is about to connect
        session, limit = self._sessions.get(lane), self.limits[lane]
        if session is None or session.closed:
            connector: aiohttp.BaseConnector
            if self.endpoint.startswith("unix:"):
                path = self.endpoint.removeprefix("unix:")
                connector = aiohttp.UnixConnector(path=path, limit=limit)
            else:
                tls = self._tls if self._tls else True
                connector = aiohttp.TCPConnector(ssl=tls, limit=limit)
            session = self._sessions[lane] = aiohttp.ClientSession(connector=connector)
            # aiohttp silently repeats a PUT or DELETE on a connection that broke. The first one
            # may have been carried out, and another client may have written in between.
            session._retry_connection = False
        return session

    @asynccontextmanager
    async def _request(
        self,
        lane: Lane,
        method: str,
        path: str,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        data: Any = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response, or raise why the server cannot be reached."""
        try:
            async with self._open(lane).request(
                method,
                self._base + path,
                data=data,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise self._connect_error(method, path, e) from e

    async def call(
        self,
        route: Route,
        body: Any = None,
        *,
        stream: AsyncIterator[bytes] | None = None,
        timeout_s: float | None = None,
        **parameters: object,
    ) -> Any:
        """Return the route's response; raise what the server raised, or `Unreachable`."""
        data: Any = stream if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        lane, path = _lane_of(route), route.url(**parameters)
        request = self._request(lane, route.method, path, self.headers(), timeout, data)
        async with request as response:
            answer = await self._read_answer(route, response)
            self.on_answer(response.headers)
            if response.status >= 300:
                raise _refusal(route, response.status, answer)
        if route.response is None:
            return None
        try:
            return await decode_in_parts(answer, route.response)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
            raise ProtocolError(
                f"{self.endpoint} answered {route.name} with an unknown format",
                hint="does it have the same version, and is it a service of Twine?",
            ) from e

    async def stream(self, route: Route, **parameters: object) -> AsyncIterator[bytes]:
        """Yield the chunks of a `stream_out` route as they arrive, until its end."""
        path, timeout = route.url(**parameters), self._connect_timeout()
        request = self._request(Lane.READER, route.method, path, self.headers(), timeout)
        async with request as response:
            if response.status >= 300:
                raise _refusal(route, response.status, await self._read_answer(route, response))
            async for chunk in response.content.iter_any():
                yield chunk

    def forward(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request unchanged, with the rights of this client; yield the answer unread."""
        timeout = self._connect_timeout()
        return self._request(Lane.READER, method, path, headers, timeout, body or None)

    def _connect_timeout(self) -> aiohttp.ClientTimeout:
        """Return the limit of an answer that may last: the connection must be made in time."""
        return aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)

    @asynccontextmanager
    async def open_duplex(self, route: Route, **parameters: object) -> AsyncIterator[Duplex]:
        """Open a `duplex` route; leaving ends the conversation."""
        path = route.url(**parameters)
        try:
            async with self._open(Lane.READER).ws_connect(
                self._base + path,
                heartbeat=HEARTBEAT_S,
                max_msg_size=MAX_FRAME_BYTES,
                compress=0,
                headers=self.headers(),
            ) as ws:
                yield Socket(ws)
        except aiohttp.WSServerHandshakeError as e:
            call_plainly: Any = self.call
            await call_plainly(route, **parameters)  # raises: a plain answer contains the reason
            raise ProtocolError(f"{self.endpoint} refused {route.name}: {e.message}") from e
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise self._connect_error(route.method, path, e) from e

    async def _read_answer(self, route: Route, response: aiohttp.ClientResponse) -> bytes:
        """Return the whole answer. Raises `ProtocolError` above `max_answer_bytes`."""
        answer = bytearray()
        async for chunk in response.content.iter_any():
            answer += chunk
            if len(answer) > self.max_answer_bytes:
                response.close()
                raise ProtocolError(
                    f"{self.endpoint} answered {route.name} with more than "
                    f"{about_size(self.max_answer_bytes)}, which is not a valid answer"
                )
        return bytes(answer)

    def _connect_error(self, method: str, url: str, error: BaseException) -> TwineError:
        cause = getattr(error, "os_error", error)
        if isinstance(cause, PermissionError):
            return Forbidden(
                f"may not open {self.endpoint}", hint="call as root, or as a member of its group"
            )
        kind = Refused if isinstance(cause, ConnectionRefusedError) else Unreachable
        return kind(
            f"cannot call {method} {url.partition('?')[0]} at {self.endpoint}: {why(error)}",
            hint="is the service running, and is this its address?",
        )


def answer_as(kind: type[_T], answer: object) -> _T:
    """Return the answer of `WireClient.call` with its declared type, for the type checker."""
    assert isinstance(answer, kind)
    return answer


def _refusal(route: Route, status: int, answer: bytes) -> Exception:
    try:
        return from_problem(msgspec.json.decode(answer, type=Problem))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = answer[:200].decode("utf-8", "replace")
        return ProtocolError(f"{route.name} was answered with HTTP {status}: {text}")
