"""Long polls release their slots once their clients left, and they block no other caller."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from control_plane.front_end.access import Access
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    open_authority,
)
from wire import tls
from wire.admission import ConnectionAdmission
from wire.limits import ConnectionLimits
from wire.routes import Route
from wire.server import Call, make_app

from .test_identity_flood import PATIENT_S, client, come

FEW = 3
"""Number of anonymous connections from one address."""
LIMITS = ConnectionLimits(
    unproved_per_address=FEW,
    first_byte_s=PATIENT_S,
    handshake_s=PATIENT_S,
    header_s=PATIENT_S,
    idle_s=PATIENT_S,
)
ROLES = ("anyone", "user")
ROUTES = (
    Route("wait", "GET", "/wait", response=int, query=("wait_s",), roles=ROLES, needs="viewer"),
    Route("follow", "GET", "/follow", stream_out=True, roles=ROLES, needs="viewer"),
)


class News:
    """Long polls that never get news, and a count of them."""

    def __init__(self) -> None:
        self.waiting = 0

    async def wait(self, _: Call) -> int:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        return 0

    async def follow(self, call: Call) -> AsyncIterator[bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"begun\n"
            await self.wait(call)

        return chunks()


@asynccontextmanager
async def served(authority: CertificateAuthority, news: News) -> AsyncIterator[int]:
    """Serve long polls to any client, over TLS."""
    own = authority.credential(CertificateSubject("component", "control-plane", ("127.0.0.1",)), "")
    handlers = {"wait": news.wait, "follow": news.follow}
    app = make_app("x", ROUTES, handlers, Access(owner_uid=0), version="0")
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    context = tls.server_context(own, require_client=False)
    async with ConnectionAdmission(runner, listener, context, LIMITS, logging.getLogger("x")):
        yield listener.getsockname()[1]
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.mark.behaviour("BUG-HT22")
async def test_a_wait_ends_when_its_client_leaves(tmp_path: Path) -> None:
    """Regression: a long poll whose client had left kept its slot for up to a minute."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    ann, news = client(authority, "ann"), News()
    async with served(authority, news) as port:
        for path in (b"/wait?wait_s=60", b"/follow"):
            async with AsyncExitStack() as stack:
                for _ in range(5):
                    _, writer = await stack.enter_async_context(come(port, ann))
                    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: news.waiting == 5)
            await until(lambda: news.waiting == 0)


@pytest.mark.behaviour("BUG-HT23")
async def test_anonymous_long_polls_do_not_shut_out_a_certificate(tmp_path: Path) -> None:
    """Regression: a task in its host's network cut off its own host's agent."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    ann, anonymous, news = client(authority, "ann"), client(authority, ""), News()
    async with served(authority, news) as port, AsyncExitStack() as stack:
        for _ in range(FEW):
            _, writer = await stack.enter_async_context(come(port, anonymous))
            writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: news.waiting == FEW)
        reader, writer = await stack.enter_async_context(come(port, anonymous))
        writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not await _read(reader), "one address has its share"
        for _ in range(3 * FEW):
            reader, writer = await stack.enter_async_context(come(port, ann))
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await _read(reader)).startswith(b"HTTP/1.1 200 ")
        assert news.waiting == FEW


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(PATIENT_S):
            return await reader.read(65_536)
    except ConnectionError:
        return b""
