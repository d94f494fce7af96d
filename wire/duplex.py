"""A websocket between two programs: frames both ways, closed by either side.

The opening request is checked like any other. Later errors are sent in the last frame, because
a websocket client cannot read the body of a refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import aiohttp
from aiohttp import web

from wire.errors import InvalidInput

Frame = bytes | str
"""Bytes of a stream, or a control message as JSON."""
MAX_FRAME_BYTES = 256 << 10
HEARTBEAT_S = 20.0
"""Time between two pings of the other side."""


class Duplex(Protocol):
    """One side of a conversation."""

    def frames(self) -> AsyncIterator[Frame]:
        """Yield what the other side sends, until it has gone."""
        ...

    async def send(self, frame: Frame) -> None:
        """Send a frame; one to a closed connection is dropped."""
        ...


Talk = Callable[[Duplex], Awaitable[None]]


class Socket:
    """A websocket of aiohttp, of either side."""

    def __init__(self, ws: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
        """`ws` is an open websocket."""
        self._ws = ws

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield what the other side sends, until it has gone."""
        async for message in self._ws:
            if message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                yield message.data

    async def send(self, frame: Frame) -> None:
        """Send a frame; one to a closed connection is dropped."""
        try:
            if isinstance(frame, str):
                await self._ws.send_str(frame)
            else:
                await self._ws.send_bytes(frame)
        except ConnectionError:
            pass


async def serve(request: web.Request, talk: Talk) -> web.StreamResponse:
    """Answer a request with a websocket; return when `talk` ends."""
    ws = web.WebSocketResponse(
        heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES, compress=False, timeout=2.0
    )
    if not ws.can_prepare(request):
        raise InvalidInput(
            f"{request.path} is a websocket", hint="open it as a websocket (RFC 6455)"
        )
    await ws.prepare(request)
    await talk(Socket(ws))
    await ws.close()
    return ws


async def relay(one: Duplex, other: Duplex) -> None:
    """Carry frames both ways until one side has gone."""

    async def carry(source: Duplex, target: Duplex) -> None:
        async for frame in source.frames():
            await target.send(frame)

    carriers = [asyncio.ensure_future(carry(one, other)), asyncio.ensure_future(carry(other, one))]
    try:
        await asyncio.wait(carriers, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)


async def relay_to(opened: AbstractAsyncContextManager[Duplex]) -> Talk:
    """Open a connection, and return the talk that joins its caller's with it.

    It is opened before the caller's websocket, so that errors reach the caller as an answer. The
    websocket reports later failures.
    """
    far = await opened.__aenter__()

    async def talk(near: Duplex) -> None:
        try:
            await relay(near, far)
        finally:
            await opened.__aexit__(None, None, None)

    return talk
