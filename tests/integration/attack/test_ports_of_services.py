"""The TCP ports of the delivery service and of controllers bound the connections of a caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from control_plane.identity.authority import CertificateSubject, open_authority
from conveyor.server import DeliveryAccess
from conveyor.server import serving as conveyor_serving
from taskcontrol import server
from taskcontrol.api import TaskControlResponse
from tests.unit.conveyor.delivery_model import World
from wire import tls
from wire.limits import ConnectionLimits

pytestmark = pytest.mark.behaviour("BUG-CP125")
MOST = ConnectionLimits().unproved_per_address
MORE = 10


@asynccontextmanager
async def the_conveyor(folder: Path, credential: tls.Credential, port: int) -> AsyncIterator[int]:
    """Serve the delivery service; yield its port."""
    world, context = await World().begin(), tls.server_context(credential, require_client=True)
    at = ("127.0.0.1", port, context)
    async with conveyor_serving(world.service, DeliveryAccess(frozenset()), folder / "c.sock", at):
        yield port


@asynccontextmanager
async def a_controller(folder: Path, credential: tls.Credential, _: int) -> AsyncIterator[int]:
    """Serve a controller that approves nothing; yield its port."""
    tls.save(credential, folder / "credential.json")
    answer = TaskControlResponse(ack=[])
    file = folder / "credential.json"
    async with server.serving(lambda _: answer, file, "127.0.0.1", 0) as port:
        yield port


@pytest.mark.parametrize("serve", [the_conveyor, a_controller])
async def test_idle_connections_of_one_address_are_bounded(serve, tmp_path: Path) -> None:
    """The oldest are closed, so that a new caller gets a place."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    subject = CertificateSubject("controller", "service", ("127.0.0.1",))
    probe = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    free = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()
    async with serve(tmp_path, authority.credential(subject, ""), free) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST + MORE)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
        await asyncio.wait_for(asyncio.gather(*ends[:MORE]), 60)  # closed by the server
        assert not any(end.done() for end in ends[-MORE:])
        for end in ends:
            end.cancel()
        for _, writer in opened:
            writer.close()
