"""One certificate may hold a bounded number of connections; others are not affected."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    open_authority,
)
from wire import tls
from wire.admission import ConnectionAdmission
from wire.fairness import Peer
from wire.limits import ConnectionLimits
from wire.server import make_app

pytestmark = pytest.mark.behaviour("BUG-HT4")

BOUND, BEYOND = 4, 12
PATIENT_S = 600.0
"""No deadline may end a connection here."""
LIMITS = ConnectionLimits(
    per_peer=BOUND,
    first_byte_s=PATIENT_S,
    handshake_s=PATIENT_S,
    header_s=PATIENT_S,
    idle_s=PATIENT_S,
    write_s=PATIENT_S,
)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def served(authority: CertificateAuthority) -> AsyncIterator[tuple[ConnectionAdmission, int]]:
    """Serve only health, over TLS."""
    own = authority.credential(CertificateSubject("component", "control-plane", ("127.0.0.1",)), "")
    app = make_app("x", [], {}, lambda _request, _route: Peer("ann", "user"), version="0")
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = tls.server_context(own, require_client=False)
    async with ConnectionAdmission(
        runner, listener, context, LIMITS, logging.getLogger("x")
    ) as admission:
        yield admission, port
        await runner.cleanup()


async def is_answered(connection: Connection) -> bool:
    """Send a request; False: the connection ended without an answer."""
    reader, writer = connection
    try:
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(PATIENT_S):
            answer = await reader.read(65_536)
    except OSError:
        return False
    assert not answer or answer.startswith(b"HTTP/1.1 404 ")
    return bool(answer)


@asynccontextmanager
async def come(port: int, context: ssl.SSLContext) -> AsyncIterator[Connection]:
    """Open a connection; it is closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def client(authority: CertificateAuthority, name: str) -> ssl.SSLContext:
    """Return the context of a user, or of an unauthenticated caller if there is no name."""
    context = tls.unverified_context()
    if name:
        tls.install(context, authority.credential(CertificateSubject("user", name), ""))
    return context


@pytest.mark.behaviour("BUG-HT4")
async def test_a_flood_of_one_identity_ends_at_its_bound(tmp_path: Path) -> None:
    """A caller with a certificate is not suspect, and still cannot take every connection."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    eve, ann, anonymous = (client(authority, name) for name in ("eve", "ann", ""))
    async with served(authority) as (admission, port):
        for _ in range(2):  # everything works again after a flood, too
            async with AsyncExitStack() as stack:
                flood = [
                    await stack.enter_async_context(come(port, eve)) for _ in range(BOUND + BEYOND)
                ]
                answered = [await is_answered(one) for one in flood]
                assert sum(answered) == BOUND
                for other in (ann, anonymous):
                    assert await is_answered(await stack.enter_async_context(come(port, other)))
                assert admission.count() == (BOUND + 2, 1)
                kept = [one for one, was in zip(flood, answered, strict=True) if was]
                assert all([await is_answered(one) for one in kept])
            async with asyncio.timeout(PATIENT_S):
                while admission.count() != (0, 0):
                    await asyncio.sleep(0.05)
