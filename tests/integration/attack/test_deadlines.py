"""A client that does not read its answer, or does not send its body, is disconnected."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agent.identity import keys
from agent.routes import JOIN_ROUTES
from control_plane.identity.authority import public_key_of
from wire import server
from wire.admission import ConnectionAdmission
from wire.errors import InvalidInput
from wire.fairness import Peer
from wire.limits import ConnectionLimits
from wire.server import Call, make_app

pytestmark = pytest.mark.behaviour("BUG-HT4")

ROUTES = [r for r in JOIN_ROUTES if r.name in ("renew", "fetch_image")]
QUICK = ConnectionLimits(write_s=0.5, first_byte_s=0.5, header_s=0.5, idle_s=0.5)


async def _large_body(_: Call) -> AsyncIterator[bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65_536)

    return chunks()


async def _renew(_: Call) -> Any:
    raise AssertionError("its body never came")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[ConnectionAdmission, int]]:
    app = make_app(
        "x",
        ROUTES,
        {"fetch_image": _large_body, "renew": _renew},
        lambda _request, _route: Peer("ann", "user"),
        version="0",
    )
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with ConnectionAdmission(
        runner, listener, None, QUICK, logging.getLogger("x")
    ) as admission:
        yield admission, port
        await runner.cleanup()


async def empty(admission: ConnectionAdmission) -> None:
    """Wait until no connection is left."""
    async with asyncio.timeout(60):
        while admission.count() != (0, 0):
            await asyncio.sleep(0.05)


@pytest.mark.behaviour("BUG-HT4")
async def test_a_reader_that_reads_nothing_is_disconnected() -> None:
    """The answer stays in memory until it is read."""
    async with served() as (admission, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET /v1/images/x/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(60):
                while admission.count() == (0, 0):
                    await asyncio.sleep(0)
            await empty(admission)


@pytest.mark.behaviour("BUG-HT4")
@pytest.mark.parametrize("sent", [b"", b"G", b"GET /readyz HTTP/1.1\r\nA: b"])
async def test_an_idle_connection_is_closed(sent: bytes) -> None:
    """The same without TLS."""
    async with served() as (admission, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(sent)
            async with asyncio.timeout(60):
                while admission.count() == (0, 0):
                    await asyncio.sleep(0)
            await empty(admission)


@pytest.mark.behaviour("BUG-HT4")
async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an announced body of a gigabyte kept a connection for minutes."""
    monkeypatch.setattr(server, "BODY_PAUSE_S", 0.3)
    async with served() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/renew HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.behaviour("BUG-HT7")
def test_no_certificate_request_makes_an_error_of_ours() -> None:
    """Regression: a request of version 1 was a 500. Here 10,000 requests are changed at random."""
    chance = random.Random(7)
    good = keys.signing_request(keys.new_key(), "vm1")
    assert public_key_of(good) is not None
    accepted = 0
    for _ in range(10_000):
        text = bytearray(good.encode())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            match chance.randrange(3):
                case 0:
                    text[at] = chance.randrange(256)
                case 1:
                    del text[at : at + chance.randint(1, 40)]
                case _:
                    text[at:at] = text[at : at + chance.randint(1, 40)]
        try:
            public_key_of(text.decode("latin-1"))
            accepted += 1
        except InvalidInput:
            pass
    assert accepted < 9_000
