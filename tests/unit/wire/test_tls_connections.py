"""The memory that a TLS connection uses while it is open."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from control_plane.identity.authority import CertificateSubject, OwnIdentity, open_authority
from wire import tls

CONNECTIONS, KIB = 20, 1 << 10


@pytest.mark.behaviour("BUG-CP56")
async def test_a_connection_that_waits_keeps_little_and_passes_much(tmp_path: Path) -> None:
    """Formerly asyncio's buffer of 256 KiB at each end was most of a shard's cost for a host."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    held = authority.credential(CertificateSubject("user", "ann"), "", 600.0)
    sent = bytes(range(256)) * (4 * KIB)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(sent)))
        await writer.drain()

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = tls.client_context(held, tls.CONTROL_PLANE)
        return await asyncio.open_connection("127.0.0.1", port, ssl=context)

    context = OwnIdentity(authority, ["127.0.0.1"]).server_context()
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await connect()
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        waiting = [(await connect())[1] for _ in range(CONNECTIONS)]
        kept, _ = tracemalloc.get_traced_memory()
        for writer in waiting:
            writer.close()
    assert kept / CONNECTIONS < 160 * KIB, "both ends, which are in this process"
